"""The metrics that rank 0 adds to a step: the utilization of known GPUs, and the peak of their
memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.tiny_models import make_tiny_hf, tiny_config
from tests.unit.rollout.test_rollout_metrics import scored
from tlt_megatron.config.load import load_config
from tlt_megatron.rollout.phases import Phases
from tlt_megatron.rollout.rollout_worker import Collected
from tlt_megatron.runtime.metrics import MetricsWriter
from tlt_megatron.runtime.process_groups import SINGLE
from tlt_megatron.runtime.progress import Progress
from tlt_megatron.runtime.timeline import Timeline
from tlt_megatron.trainer.flops import Utilization, forward_flops, make_utilization, peak_flops
from tlt_megatron.trainer.loop import TrainedStep
from tlt_megatron.trainer.step_report import RunReport

MODEL = tiny_config(
    vocab_size=10, hidden_size=4, ffn_size=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=2
)
# a layer: 4 x 8 x 3 of the MLP; queries and output 4 x 4 each, keys and values 4 x 2 each
NUM_WEIGHTS = 2 * (96 + 48) + 2 * 10 * 4


def test_flops_by_hand() -> None:
    attention = 2 * 2 * 4 * (3 * 3 + 5 * 5)  # 2 FLOPs x layers x width of all heads x squares
    assert forward_flops(MODEL, [3, 5]) == 2 * NUM_WEIGHTS * 8 + attention


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA RTX A1000", None),
        ("", None),
    ],
)
def test_the_peak_of_a_gpu_by_its_name(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak


def test_utilization_is_left_out_where_the_peak_is_not_known(tmp_path: Path) -> None:
    make_tiny_hf(tmp_path, "qwen3")
    config = load_config(None, [f"model.path={tmp_path}", "model.dtype=bfloat16"])
    known = make_utilization(config, "NVIDIA H100 80GB HBM3", num_ranks=8)
    assert known.peak == 8 * 989e12
    assert make_utilization(config, "", num_ranks=8) is None
    in_float32 = load_config(None, [f"model.path={tmp_path}"])
    assert make_utilization(in_float32, "NVIDIA H100 80GB HBM3", num_ranks=8) is None


def test_a_step_on_known_gpus(tmp_path: Path) -> None:
    peaks = iter([5_000_000_000, 9_000_000_000, 7_000_000_000])
    gpu = SimpleNamespace(reset_peak=lambda: None, peak_bytes=lambda: next(peaks))
    phases = Phases(Timeline(None, 0), Progress("none", 1), gpu, on_phase=str)
    report = RunReport(
        phases=phases,
        world=SINGLE,
        metrics=MetricsWriter(tmp_path, {}, resume_step=None),
        utilization=Utilization(model=MODEL, reference=MODEL, num_epochs=2, peak=1e6),
    )
    group = scored((3, 5, 4), (1.0, 0.0, 0.0), 8)  # each behind a prompt of two tokens
    inference = SimpleNamespace(
        plan=SimpleNamespace(scored=(group,), skipped={(0, 2)}),
        old_logprobs={},
        ref_logprobs={},
        metrics={"critic/advantages/mean": 0.5},
    )
    collected = Collected(
        groups=(group,),
        metrics={"rollout/num_tokens": 18.0, "perf/rollout_tokens_per_s": 1.0},
        passes=[],
    )
    report.begin_step(1)
    timings = {"ROLLOUT": "gen", "LOGPROB": "old_log_prob", "UPDATE": "update_actor"}
    for name, timing in timings.items():
        with phases(name, timing):
            pass
    report.end_step(1, TrainedStep(collected, inference, {"actor/num_updates": 2.0}, {}))
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    # three times a forward pass over 5 and 7 tokens, twice; forward passes of policy and reference
    # over all
    updated, inferred = 6 * forward_flops(MODEL, [5, 7]), 2 * forward_flops(MODEL, [5, 7, 6])
    updated_share = updated / row["timing_s/update_actor"] / 1e6
    inferred_share = inferred / row["timing_s/old_log_prob"] / 1e6
    assert row["perf/mfu/actor"] == pytest.approx(updated_share)
    assert row["perf/mfu/actor_infer"] == pytest.approx(inferred_share)
    assert (row["memory/peak_gb/rollout"], row["memory/peak_gb/update"]) == (5.0, 9.0)
    assert row["critic/advantages/mean"] == 0.5
