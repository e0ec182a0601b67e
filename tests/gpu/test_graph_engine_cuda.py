"""The embedded engine on a GPU: the same tokens with captured graphs, and their memory comes back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tiny_models import make_tiny_hf
from tests.unit.engines.conftest import engine_over
from tlt_megatron.engines.base import EngineStats
from tlt_megatron.engines.embedded.engine import EmbeddedEngine
from tlt_megatron.engines.embedded.speculate import Speculation
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.draft_inference import DraftInference
from tlt_megatron.models.draft_model import DraftModel, make_draft_config
from tlt_megatron.runtime.device import select_device
from tlt_megatron.speculation.selector import FixedSelector
from tlt_megatron.speculation.strategy import SpeculationStrategy
from tlt_megatron.types import Prompt, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STRATEGIES = ("off", "4_1_4", "3_2_6", "ngram_4", "3_2_6+ngram_5")
PARAMS = SamplingParams(num_samples=3, max_new_tokens=60, stop_token_ids=(5,), seed=5)
PROMPTS = [
    Prompt(prompt_id=str(i), draw_index=i, token_ids=tuple((3 * j + i) % 40 + 8 for j in range(n)))
    for i, n in enumerate((4, 9, 31, 70))
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_hf(tmp_path_factory.mktemp("model"), "qwen3", num_layers=2, vocab_size=48)


def make_engine(path: Path, strategy: str, **settings: int) -> EmbeddedEngine:
    sizes = {"max_batch_size": 8, "max_new_tokens": 64, "num_samples": 3}
    engine = engine_over(path, device=select_device("cuda"), **(sizes | settings))
    chosen = SpeculationStrategy.parse(strategy)
    if not chosen.is_off:
        embedding, head = engine.target_tensors()
        config = make_draft_config(load_model_config(path), "eagle", embedding)
        model = DraftModel(config, embedding_VD=embedding, lm_head_VD=head)
        draft = DraftInference(model, embedding.dtype)
        engine.set_speculation(Speculation(draft, FixedSelector(chosen), [chosen]))
    return engine


def run(engine: EmbeddedEngine) -> tuple[list[list[int]], EngineStats]:
    groups = engine.generate(PROMPTS, PARAMS, policy_version=1)
    return [r.token_ids.tolist() for g in groups for r in g.rollouts], engine.stats()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_graphs_change_no_token(path: Path, strategy: str) -> None:
    expected, eager = run(make_engine(path, "off", cuda_graphs=False))
    assert eager.num_graph_replays == 0
    engine = make_engine(path, strategy)
    for _ in range(2):  # captures, then replays what was captured
        tokens, stats = run(engine)
        assert tokens == expected
        assert stats.num_graph_replays > 10 * stats.num_eager_passes
        assert all(reason.startswith("draft: ") for reason in stats.eager_passes)


def test_a_sleeping_engine_holds_no_graphs(path: Path) -> None:
    engine = make_engine(path, "3_2_6")
    expected = run(engine)[0]
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    engine.sleep()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() < held
    engine.wake()
    tokens, stats = run(engine)
    assert tokens == expected
    assert stats.num_graph_replays > 0
