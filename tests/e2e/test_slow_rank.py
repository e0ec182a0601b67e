"""A rank on a slow machine is named, with what it costs the others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.tiny_task import metric_rows, run_ending
from tools.run_report.alarms import find_alarms

pytestmark = pytest.mark.e2e

SLOW_ENGINE = """
import time

from tlt_megatron.models.transformer import Transformer
from tlt_megatron.trainer.build_embedded import build_embedded_engine as build


def engine(config, device, run_dir, world):
    forward = Transformer.forward

    def slowed(*args):
        time.sleep(0.03)  # about ten passes
        return forward(*args)

    if world.rank == 1:
        Transformer.forward = slowed
    return build(config, device, run_dir, world)
"""


def test_a_rank_whose_passes_take_ten_times_as_long_is_named_with_its_cost(
    config: Path, tmp_path: Path
) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text(SLOW_ENGINE)
    settings = ("run.num_steps=6", "data.eval=", f"rollout.engine={slow}:engine")
    said = run_ending(0, 2, config, tmp_path / "run", *settings)
    assert len(re.findall(r"rank 1 decodes \d+\.\d times as slow as the others", said)) == 1
    rows = metric_rows(tmp_path / "run")
    for row in rows:
        assert row["perf/slowest_rank/rank"] == 1
        assert row["perf/slowest_rank/slowdown"] > 1.5  # other jobs slow the other rank too
        assert 0 < row["perf/slowest_rank/cost_s"] < row["timing_s/gen"]
    own = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert any("rank 1 decodes" in alarm for alarm in find_alarms(rows, own))
