"""What a rank really takes against what the ledger says before it takes anything."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.tiny_models import make_tiny_hf
from tests.tiny_task import launch

pytestmark = pytest.mark.e2e

# 36 million parameters and a vocabulary of a real size: what is planned is several times what the
# libraries take.
SIZES = {"hidden_size": 384, "intermediate_size": 1024, "num_layers": 6, "vocab_size": 32768}
BATCH = "rollout.num_prompts=4 rollout.num_samples=4 rollout.max_new_tokens=120 rollout.max_batch_size=16"


def test_the_peak_is_within_15_percent_of_the_plan(config: Path, tmp_path: Path) -> None:
    model = make_tiny_hf(tmp_path / "model", "llama", eos_token_id=None, **SIZES)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(config.parent / "model" / file, model / file)
    run_dir = tmp_path / "run"
    result = launch(
        1,
        *("--config", config, f"run.dir={run_dir}", f"model.path={model}", *BATCH.split()),
        *(
            "data.eval=",
            "rollout.dtype=float32",
            "mcore.micro_batch_tokens=1000",
            "run.num_steps=2",
        ),
    )
    assert result.returncode == 0, result.stderr[-3000:]
    (line,) = [line for line in result.stdout.splitlines() if "MiB" in line]
    assert line.startswith("memory of a rank: ")
    assert "\ncheckpoint buffers" in (run_dir / "logs" / "node_0000" / "rank_00000.log").read_text()
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["memory_planned_gb"] == pytest.approx(summary["memory_peak_gb"], rel=0.15)
    assert summary["memory_planned_gb"] > 1.2  # not the libraries alone
