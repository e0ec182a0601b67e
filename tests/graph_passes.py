"""What the tests of captured graphs run: steps over rows in lanes of a small random target and
drafter, on CPU and GPU, and a stand-in for a GPU's graphs on the CPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.slow_draft import TARGET, VOCAB_SIZE, make_draft_model
from tests.tiny_models import random_weights
from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.engines.embedded.graph_plan import GraphPlan
from tlt_megatron.engines.embedded.graph_pool import GraphPool
from tlt_megatron.engines.embedded.lane_steps import LaneBatch, LaneSteps, Rows
from tlt_megatron.models.attention.lanes import LaneView
from tlt_megatron.models.draft_inference import DraftInference
from tlt_megatron.models.kv_cache import KvCache
from tlt_megatron.models.transformer import Transformer
from tlt_megatron.runtime.device import Device, GraphMemory
from tlt_megatron.speculation import sampling
from tlt_megatron.speculation.tree import DraftTree, chain_tree
from tlt_megatron.types import SamplingParams

STRATEGIES = [SpeculationStrategy.parse(text) for text in ("2_1_2", "3_2_6")]
MAX_BATCH_SIZE = 8
NUM_UNSEEN = 4  # pairs that a captured draft computes: the largest depth + 1
LANE, PAGE, PROMPT = 64, 16, 20  # slots of a lane and of a page, committed positions of every row

# What a capture may not do on a GPU: read back, or bring numbers from Python.
_FORBIDDEN = ("_local_scalar_dense", "lift_fresh", "nonzero", "is_nonzero", "equal")


class RecordedGraphs:
    """Graph memory without a GPU: a graph is the list of calls on tensors that the work made, and
    replaying it makes them again on the very same tensors, without any Python of the work's.
    `graphs` has a reference to each."""

    def __init__(self, graphs: list[weakref.ref] | None = None) -> None:
        self._graphs = [] if graphs is None else graphs

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `engines.embedded.graph_pool.GraphMemory`. Noise is made by torch as on a GPU,
        because calls of NumPy are not seen.
        """
        with mock.patch.object(sampling, "noise_of_ids", sampling.gumbel_of):
            work()
            with _Recorder() as recorder:
                work()
        self._graphs.append(weakref.ref(recorder))
        return recorder.replay


@torch.inference_mode()
def capture_all(pool: GraphPool) -> None:
    """Capture all planned shapes, cut to the lanes, largest activations first."""
    keys = dict.fromkeys(map(pool._in_lanes, pool.plan.keys))
    for key in sorted(keys, key=lambda key: -pool.plan.cost(key).activation_bytes):
        if key not in pool._captured:
            pool._capture(key)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Callable, tuple, dict, list[Tensor]]] = []

    def __torch_dispatch__(
        self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        assert name not in _FORBIDDEN, f"{name} in a captured pass"
        given = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **kwargs)
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor) and _storage(t) not in given]
        if made or func._schema.is_mutable:  # else a view
            self._calls.append((func, args, kwargs, made))
        return out

    def replay(self) -> None:
        """What the recorded calls made is overwritten."""
        for func, args, kwargs, made in self._calls:
            out = func(*args, **kwargs)
            if made:
                new = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
                for target, source in zip(made, new, strict=True):
                    target.copy_(source)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingDevice(Device):
    """The CPU, with graphs."""

    graphs: list[weakref.ref] = field(default_factory=list)  # all that were captured

    @property
    def num_alive(self) -> int:
        """Graphs that somebody still holds."""
        return sum(graph() is not None for graph in self.graphs)

    def graph_memory(self) -> RecordedGraphs:
        """See `Device`."""
        return RecordedGraphs(self.graphs)


def recording_device() -> RecordingDevice:
    """A CPU on which passes are captured and replayed."""
    return RecordingDevice(torch_device=torch.device("cpu"), backend="gloo")


@dataclass(frozen=True, slots=True, kw_only=True)
class LanePasses:
    """A target, its drafter behind it in the same KV pool, and rows for both."""

    model: Transformer
    draft: DraftInference
    cache: KvCache

    def steps(self) -> LaneSteps:
        params = SamplingParams(num_samples=1, max_new_tokens=9)
        return LaneSteps(self.model, self.cache, LANE, self.draft, params)

    def pool(self, new_memory: Callable[[], GraphMemory | None]) -> GraphPool:
        """A pool whose steps are bound."""
        plan = GraphPlan(
            self.model.config,
            STRATEGIES,
            max_batch_size=MAX_BATCH_SIZE,
            max_length=LANE,
            item_bytes=self.model.dtype.itemsize,
        )
        pool = GraphPool(plan, new_memory)
        pool.bind(self.steps())
        return pool

    def state(self, batch_size: int, seed: int = 0) -> Tensor:
        """Random roots behind the committed positions, with room for 1 to 5 tokens."""
        generator = torch.Generator().manual_seed(seed)

        def draw(low: int, high: int) -> Tensor:
            return torch.randint(low, high, (batch_size,), generator=generator)

        count, place = draw(0, 9), torch.full((batch_size,), PROMPT)
        state = Rows(
            token=draw(0, VOCAB_SIZE),
            seed=draw(-(1 << 60), 1 << 60),
            last=count + draw(1, 6),
            position=place,
            count=count,
            out=place,
            slot=place + torch.arange(batch_size) * LANE,
        )
        return torch.stack(state).to(self.cache.device)

    def run(
        self, steps: GraphPool, strategy: SpeculationStrategy, batch_size: int, seed: int = 0
    ) -> tuple[Tensor, ...]:
        """Draft and verify in a pool. Return copies of what is read afterwards of at most depth + 1
        tokens: what was proposed, what was committed, and what the KV holds at the root of each
        row.
        """
        state_FB = self.state(batch_size, seed)
        view = LaneView(self.cache, num_rows=batch_size, lane=LANE)
        batch = LaneBatch(view, state_FB, Rows(*state_FB))
        tree = chain_tree(state_FB.new_empty(batch_size, 0))
        if not strategy.is_off:
            tree = steps.draft(batch, strategy, NUM_UNSEEN, LANE)
            tree = DraftTree(
                *(t.clone() for t in tree.tensors), depth=tree.depth, is_chain=tree.is_chain
            )
        done, roots_B = steps.target(batch, tree, PROMPT + 1 + tree.num_rows), state_FB[-1]
        seen = slice(strategy.depth + 1)
        kv = self.cache.kv_LKTH[: -1 if strategy.is_off else None]
        found = (
            *tree.tensors,
            done.tokens_BS[:, seen],
            done.report_BX[:, :3],
            done.logprobs_BS.masked_fill(done.tokens_BS < 0, 0.0)[:, seen],
            kv.index_select(2, roots_B),
            self.cache.features_TD.index_select(0, roots_B),
        )
        return tuple(tensor.clone() for tensor in found)

    def reset(self, num_lanes: int = MAX_BATCH_SIZE) -> None:
        """Commit the same random keys, features and tokens as in the beginning."""
        generator = torch.Generator().manual_seed(4)
        cache = self.cache
        for tensor in (cache.kv_LKTH, cache.features_TD):
            drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            tensor.copy_(drawn)
        tokens = torch.randint(VOCAB_SIZE, cache.token_ids_T.shape, generator=generator)
        cache.token_ids_T.copy_(tokens)
        cache.bias_T.fill_(-torch.inf)
        for row in range(num_lanes):
            cache.mark_written(torch.arange(PROMPT, device=cache.device) + row * LANE)


def make_lane_passes(device: torch.device, dtype: torch.dtype, *, num_lanes: int) -> LanePasses:
    """The same weights and committed keys for the same sizes, on any device."""
    model = Transformer(TARGET, dtype, device)
    for name, tensor in random_weights(TARGET, dtype):
        model.load_hf(name, tensor)
    drafter = make_draft_model("eagle", dtype=dtype)
    drafter.embedding_VD, drafter.lm_head_VD = model.embedding, model.lm_head
    draft = DraftInference(drafter.to(device))
    cache = KvCache(
        TARGET,
        num_pages=num_lanes * LANE // PAGE,
        page_size=PAGE,
        dtype=dtype,
        device=device,
        num_draft_layers=1,
        tap_layers=(),
        has_scratch=True,
    )
    for rotary in (model.rotary, draft.rotary):
        rotary.reserve(LANE)
    passes = LanePasses(model=model, draft=draft, cache=cache)
    passes.reset(num_lanes)
    return passes
