"""What summary.json says."""

from __future__ import annotations

import io
import re

from rich.console import Console

from tlt_megatron.rollout.gain import SpeculationGain
from tlt_megatron.runtime.progress import Progress
from tlt_megatron.trainer.finish import TABLE_COLUMNS
from tlt_megatron.trainer.summary import summarize


def test_a_summary_by_hand() -> None:
    step = {"timing_s/step": 4.0, "timing_s/gen": 2.0, "perf/rollout_tokens_per_s": 10.0}
    rows = [
        {"step": 0, "eval/accuracy": 0.25},
        step | {"rollout/spec_accept_length": 1.0, "memory/peak_gb/update": 9.0},
        step | {"rollout/spec_accept_length": None, "memory/peak_gb/rollout": 3.0},
        step | {"timing_s/gen": 6.0, "perf/rollout_tokens_per_s": 20.0, "eval/accuracy": 0.5},
    ]
    gain = SpeculationGain(rollout_speedup=2.0, num_differing=1)
    assert summarize(rows, seconds=20.0, gain=gain) == {
        "eval_accuracy_first": 0.25,
        "eval_accuracy_last": 0.5,
        "num_steps": 3,
        "step_time_s_median": 4.0,
        "rollout_tokens_per_s": 16.0,  # 160 tokens in 10 s
        "seconds_total": 20.0,
        "memory_peak_gb": 9.0,
        "memory_planned_gb": None,
        "accept_length_first": 1.0,
        "accept_length_last": 1.0,
        "rollout_speedup": 2.0,
        "step_speedup": 1.5,  # 2 s of rollouts and 2 s of the rest against 4 s and 2 s
        "responses_differing": 1.0,
    }


def test_no_two_columns_of_the_last_table_have_one_name() -> None:
    console = Console(file=io.StringIO(), width=200)
    row = dict.fromkeys(TABLE_COLUMNS, 1.0)
    Progress("lines", 1, console=console).print_table([row], TABLE_COLUMNS)
    assert isinstance(console.file, io.StringIO)
    (head,) = [line for line in console.file.getvalue().splitlines() if "reward" in line]
    names = re.split(r"\s{2,}", head.strip())
    assert len(set(names)) == len(TABLE_COLUMNS)
