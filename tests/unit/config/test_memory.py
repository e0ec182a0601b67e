"""The memory estimate against sums by hand, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tlt_megatron.config.load import load_config
from tlt_megatron.config.memory import MemoryEstimate, ModelSizes, check_memory, estimate_memory
from tlt_megatron.config.schema import RunConfig

MIB = 1 << 20
QWEN_7B = {
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "num_hidden_layers": 28,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}


def make_config(tmp_path: Path, overrides: str = "") -> RunConfig:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B), encoding="utf-8")
    base = "model.dtype=bfloat16 rollout.dtype=bfloat16 rollout.kv_cache_tokens=100000"
    return load_config(None, [f"model.path={tmp_path}", *base.split(), *overrides.split()])


def test_parameters_are_those_of_the_model_card(tmp_path: Path) -> None:
    make_config(tmp_path)
    assert ModelSizes.read(str(tmp_path)).total == pytest.approx(7.615e9, rel=1e-3)


def test_an_unsharded_rank_holds_everything(tmp_path: Path) -> None:
    estimate = estimate_memory(make_config(tmp_path), 1, is_cuda=False)
    total = ModelSizes.read(str(tmp_path)).total
    assert estimate.rollout_weights == total * 2
    assert estimate.kv == 100000 * 2 * 4 * 128 * 28 * 2  # 5.7 GB
    assert estimate.policy == pytest.approx(total * 2, rel=1e-3)
    assert estimate.optimizer == pytest.approx(total * 12, rel=1e-3)
    assert estimate.drafter == estimate.graphs == 0
    resident = estimate.policy + estimate.gradients + estimate.optimizer
    assert estimate.rollout_phase == resident + estimate.rollout_weights + estimate.kv
    assert estimate.update_phase == resident + estimate.activations


@pytest.mark.parametrize(
    "overrides, world_size, part, factor",
    [
        ("parallel.tensor=2", 2, "policy", 1 / 2),
        ("parallel.tensor=2", 2, "rollout_weights", 1),
        ("", 8, "optimizer", 1 / 8),
        ("", 8, "gradients", 1),
        ("mcore.use_distributed_optimizer=false", 8, "optimizer", 1),
        ("algorithm.kl_coef=0.1", 1, "policy", 2),
        ("rollout.kv_cache_tokens=50000", 1, "kv", 1 / 2),
        ('rollout.engine=sglang sglang.engine_args={"tp_size":4}', 4, "kv", 1 / 4),
        ('rollout.engine=sglang sglang.engine_args={"tp_size":4}', 4, "rollout_weights", 1 / 4),
    ],
)
def test_what_is_shared_out_shrinks(
    tmp_path: Path, overrides: str, world_size: int, part: str, factor: float
) -> None:
    base = estimate_memory(make_config(tmp_path), 1, is_cuda=False)
    shared = estimate_memory(make_config(tmp_path, overrides), world_size, is_cuda=False)
    assert getattr(shared, part) == pytest.approx(getattr(base, part) * factor, rel=1e-6)


def test_recomputation_and_sequence_parallelism_save_activations(tmp_path: Path) -> None:
    plain, selective, full = (
        estimate_memory(make_config(tmp_path, f"parallel.tensor=2 {setting}"), 2, is_cuda=True)
        for setting in ("", "parallel.sequence=true", "mcore.recompute=full")
    )
    assert full.activations < selective.activations < plain.activations


def test_a_drafter_and_its_training_are_counted(tmp_path: Path) -> None:
    drafting = "speculation.enabled=true speculation.drafter=x"
    fixed = estimate_memory(make_config(tmp_path, drafting), 1, is_cuda=True)
    trained = estimate_memory(
        make_config(tmp_path, f"{drafting} spot.enabled=true"), 1, is_cuda=True
    )
    sizes = ModelSizes.read(str(tmp_path))
    own = sizes.layer + 3 * sizes.hidden**2
    assert fixed.drafter == (own + 100000 * sizes.kv) * 2
    assert trained.drafter == fixed.drafter + own * 16 + 2 * sizes.embedding * 2
    assert fixed.graphs > 0


@pytest.mark.parametrize(
    "overrides, world_size, num_bytes",
    [
        ("", 1, 16 * 1000 * 3584 * 4),
        ("parallel.tensor=2", 4, 4 * 1000 * 3584 * 4),
        ("parallel.pipeline=2", 2, 16 * 1000 * 3584 * 4),
        ("drafter.algorithm=eagle3", 1, 4 * 16 * 1000 * 3584 * 4),
        ("spot.data_bytes=1000000", 1, 1000000),
        ("algorithm.recompute_log_probs=always", 1, 0),  # before there are activations
        ("algorithm.num_minibatches=2", 1, 0),
        ("spot.enabled=false speculation.drafter=x", 1, 0),
    ],
)
def test_states_taken_for_the_drafter_lie_beside_the_activations(
    tmp_path: Path, overrides: str, world_size: int, num_bytes: int
) -> None:
    base = (
        "speculation.enabled=true spot.enabled=true spot.data_bytes=10000000000"
        " rollout.num_prompts=2 rollout.num_samples=8 data.max_prompt_tokens=400"
        " rollout.max_new_tokens=600"
    )
    config = make_config(tmp_path, f"{base} {overrides}")
    estimate = estimate_memory(config, world_size, is_cuda=False)
    resident = estimate.policy + estimate.gradients + estimate.optimizer + estimate.drafter
    assert estimate.update_phase == resident + estimate.activations + num_bytes


def test_a_run_that_cannot_fit_is_refused_with_what_would_help() -> None:
    parts = dict.fromkeys(
        ("policy", "gradients", "optimizer", "drafter", "graphs", "rollout_weights"), 100 * MIB
    )
    tight = MemoryEstimate(**parts, kv=400 * MIB, activations=10 * MIB, tap=0)
    check_memory(tight, RunConfig(), 1060 * MIB)
    with pytest.raises(ValueError, match=r"1,000.*lower rollout.max_batch_size=64"):
        check_memory(tight, RunConfig(), 1040 * MIB)
    busy = MemoryEstimate(**parts, kv=0, activations=500 * MIB, tap=100 * MIB)
    with pytest.raises(ValueError, match=r"lower spot.data_bytes=268435456 or mcore.micro"):
        check_memory(busy, RunConfig(), 1040 * MIB)
