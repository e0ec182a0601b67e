"""Engines over one small random model."""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.recorded_graphs import seen_arithmetic
from tests.tiny_models import make_tiny_hf
from tlt_megatron.config.schema import RolloutSection
from tlt_megatron.config.strategy import OFF, SpeculationStrategy
from tlt_megatron.engines.embedded.embedded_engine import EmbeddedEngine
from tlt_megatron.engines.embedded.speculate import Speculation
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.draft_inference import DraftInference
from tlt_megatron.models.draft_model import DraftModel, make_draft_config
from tlt_megatron.models.hf_io import HfReader, checksum_tensors, policy_tensors
from tlt_megatron.models.kv_cache import KvCache
from tlt_megatron.models.matrix import packs
from tlt_megatron.models.transformer import Transformer
from tlt_megatron.runtime.device import Device, select_device
from tlt_megatron.speculation.selector import Decision, FixedSelector, StrategySelector
from tlt_megatron.stop_strings import StopStrings
from tlt_megatron.types import Prompt, RolloutGroup

MakeEngine = Callable[..., EmbeddedEngine]
VOCAB_SIZE = 48
checksum = checksum_tensors  # as a sender of weights computes it
# The texts of the tokens: one to three letters, so that stop strings begin and end within them.
TEXTS = [
    random.Random(token).choice(["a", "b", "ab", "ba", "cab", "€"]) for token in range(VOCAB_SIZE)
]


def weight_bytes(model: Transformer) -> int:
    """The bytes of the weights, and of the packed copies that the first pass makes."""
    tensors = list(model._views.values())
    if packs(model.dtype, model.device):
        tensors.append(model.lm_head)
        for layer in model.layers:
            tensors += [layer.qkv, layer.output, layer.gate_up, layer.down]
    return sum(tensor.nbytes for tensor in tensors)


def cache_bytes(cache: KvCache) -> int:
    """The bytes of the whole pool."""
    tensors = cache.kv_LKTH, cache.bias_T, cache.features_TD, cache.token_ids_T
    return sum(tensor.nbytes for tensor in tensors)


def alive_caches() -> list[weakref.ref[KvCache]]:
    """The KV of all engines of this process that somebody still holds."""
    gc.collect()
    return [weakref.ref(thing) for thing in gc.get_objects() if type(thing) is KvCache]


def engine_over(
    path: Path,
    *,
    dtype: str = "float64",
    tap_layers: tuple[int, ...] = (),
    device: Device | None = None,
    max_prompt_tokens: int = 1024,
    **settings: int,
) -> EmbeddedEngine:
    """An engine with the weights at `path` loaded as version 1; `settings` go to RolloutSection.
    `device` None: the CPU.
    """
    section = RolloutSection(dtype=dtype, **settings)
    config = load_model_config(path)
    device = device or select_device("cpu")
    with seen_arithmetic(device):
        engine = EmbeddedEngine(
            config, section, device, max_prompt_tokens=max_prompt_tokens, tap_layers=tap_layers
        )
    load_from(path, engine, dtype)
    return engine


def load_from(path: Path, engine: EmbeddedEngine, dtype: str = "float64") -> None:
    """Load the weights at `path` as version 1."""
    tensors = list(policy_tensors(path, load_model_config(path), getattr(torch, dtype)))
    engine.load_weights(tensors, version=1, checksum=lambda: checksum(tensors))


def make_drafter(
    engine: EmbeddedEngine, architecture: str = "eagle", *, seed: int = 0, is_wrong: bool = False
) -> DraftModel:
    """A random drafter over an engine's policy. With `is_wrong` it proposes the tokens that it
    takes for the least likely.
    """
    embedding, head = engine.target_tensors()
    config = make_draft_config(engine._weights.config, architecture, embedding)
    head = -head if is_wrong else head
    return DraftModel(config, embedding_VD=embedding, lm_head_VD=head, seed=seed)


def speculate(
    engine: EmbeddedEngine,
    strategies: str | Sequence[SpeculationStrategy],
    *,
    selector: StrategySelector | None = None,
    drafter: DraftModel | None = None,
    num_ids: int = 0,
) -> Speculation:
    """Let an engine speculate, with the first of the strategies unless there is a selector, and
    with a random drafter unless there is another."""
    if isinstance(strategies, str):
        strategies = [SpeculationStrategy.parse(text) for text in strategies.split()]
    model = drafter or make_drafter(engine)
    with seen_arithmetic(engine._device):
        draft = DraftInference(model, num_ids=num_ids)
    selector = selector or FixedSelector(strategies[0])
    speculation = Speculation(draft, selector, strategies)
    engine.set_speculation(speculation)
    return speculation


class SwitchingSelector(FixedSelector):
    """The next of these strategies at every step, whatever the batch."""

    def __init__(self, strategies: Iterator[SpeculationStrategy]) -> None:
        super().__init__(OFF)
        self._strategies = strategies

    def choose(self, batch_size: int) -> Decision:
        """See `StrategySelector`."""
        return Decision(strategy=next(self._strategies), reason="next")


def at_random(strategies: Sequence[SpeculationStrategy], seed: int) -> SwitchingSelector:
    """Any of the strategies at any step."""
    draw = random.Random(seed)
    return SwitchingSelector(draw.choice(strategies) for _ in itertools.count())


def by_turns(strategies: Sequence[SpeculationStrategy]) -> SwitchingSelector:
    """Another strategy at every step."""
    return SwitchingSelector(itertools.cycle(strategies))


def make_prompts(*lengths: int, seed: int = 0, first_draw: int = 0) -> list[Prompt]:
    """Random prompts p0, p1, ... of these lengths."""
    draw = random.Random(seed)
    return [
        Prompt(
            prompt_id=f"p{number}",
            draw_index=first_draw + number,
            token_ids=tuple(draw.randrange(VOCAB_SIZE) for _ in range(length)),
        )
        for number, length in enumerate(lengths)
    ]


def stop_at(*strings: str) -> StopStrings:
    """Stop strings over TEXTS."""
    return StopStrings(strings, lambda token_id: TEXTS[token_id].encode())


def tokens_of(groups: Sequence[RolloutGroup]) -> list[list[int]]:
    return [rollout.token_ids.tolist() for group in groups for rollout in group.rollouts]


def accept_lengths(groups: Sequence[RolloutGroup]) -> list[int]:
    return [n for group in groups for rollout in group.rollouts for n in rollout.accept_lengths]


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A qwen3 of 2 layers and 48 tokens. A tied head would only repeat tokens."""
    path = tmp_path_factory.mktemp("model")
    return make_tiny_hf(path, "qwen3", num_layers=2, vocab_size=VOCAB_SIZE)


@pytest.fixture
def tensors_of(tiny_path: Path) -> Callable[[str], list[tuple[str, Tensor]]]:
    """The model's tensors in a dtype."""

    def read(dtype: str) -> list[tuple[str, Tensor]]:
        return [(name, t.to(getattr(torch, dtype))) for name, t in HfReader(tiny_path).items()]

    return read


@pytest.fixture
def make_engine(tiny_path: Path) -> MakeEngine:
    """`make_engine(dtype=..., **rollout settings)` with weights of version 1 loaded."""
    return partial(engine_over, tiny_path)
