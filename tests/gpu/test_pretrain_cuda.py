"""The whole program on one GPU: two RL steps with speculation, by the embedded engine with captured
graphs, and by SGLang.

One rank is never idle, so its drafter is built and kept but not trained;
`test_spot_session_cuda.py` does that.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.gpu.cuda_ranks import needs_gpus
from tests.tiny_models import make_tiny_hf
from tests.tiny_task import TLT, launch, make_tiny_task, metric_rows

pytestmark = [*needs_gpus(), pytest.mark.e2e]
SPECULATION = (*TLT, "drafter.algorithm=hass")


def train(config: Path, run_dir: Path, *arguments: str, num_steps: int = 2) -> list[dict]:
    """Train until step `num_steps`; the metrics of each."""
    settings = [
        f"run.num_steps={num_steps}",
        "run.device=cuda",
        "data.eval=",
        "logging.trackers=[]",
    ]
    done = launch(1, "--config", config, f"run.dir={run_dir}", *settings, *arguments, timeout_s=900)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    rows = metric_rows(run_dir)
    assert len(rows) == num_steps
    for row in rows:
        assert 0 < row["actor/grad_norm"] < math.inf
    return rows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_steps_and_a_third_after_a_resume(tmp_path: Path, dtype: str) -> None:
    config, run_dir = make_tiny_task(tmp_path), tmp_path / "run"
    settings = [f"model.dtype={dtype}", f"rollout.dtype={dtype}", "checkpoint.interval=1"]
    train(config, run_dir, *settings, *SPECULATION)
    assert json.loads((run_dir / "summary.json").read_text())
    for folder in ("hf", "hf_drafter"):
        assert (run_dir / folder / "config.json").is_file()
    rows = train(config, run_dir, "--resume", "auto", *settings, *SPECULATION, num_steps=3)
    assert rows[-1]["training/policy_version"] == 3


def test_sglang_wakes_after_each_update(tmp_path: Path) -> None:
    """In bfloat16, with the attention kernels of its choice, which have heads of 64."""
    pytest.importorskip("sglang", reason="needs sglang==0.5.23")
    config = make_tiny_task(tmp_path)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 48}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_layers": 2}
    make_tiny_hf(tmp_path / "model", "qwen2", eos_token_id=1, pad_token_id=0, **sizes, **heads)
    rows = train(
        config, tmp_path / "run", "model.dtype=bfloat16", "rollout.dtype=bfloat16",
        "rollout.engine=sglang", 'sglang.engine_args={"mem_fraction_static": 0.3}',
        "speculation.enabled=true", 'speculation.strategies=["3_1_3"]',
        "speculation.selector=fixed", "spot.enabled=true", "drafter.batch_tokens=64",
    )  # fmt: skip
    assert all(row["train/train_rollout_logprob_abs_diff"] < 0.1 for row in rows)
