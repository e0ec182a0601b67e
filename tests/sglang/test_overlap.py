"""Our plugin, SGLang's overlap scheduler and adaptive states in one engine, as on a GPU.

SGLang turns overlap off for speculation on CPUs. Its scheduler runs there too: streams of a CPU do
nothing, and Triton interprets the scheduler's kernels.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tests.sglang.rollouts import (
    GREEDY,
    SAMPLED,
    answers,
    start_embedded,
    start_sglang,
    token_lists,
)

STRATEGIES = ["2_1_2", "4_1_4", "6_1_6"]


def test_adaptive_chains_change_no_token_while_the_schedule_overlaps(
    policy_folder: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.arg_groups import speculative_hook

    asked: list[object] = []
    monkeypatch.setattr(speculative_hook, "_disable_overlap_schedule_for_cpu", asked.append)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # the schedule's own kernels, in SGLang's processes
    with closing(
        start_sglang(policy_folder, drafter=drafter, strategies=STRATEGIES, selector="cost_model")
    ) as engine:
        plain = start_embedded(policy_folder)
        for params in (GREEDY, SAMPLED):
            assert token_lists(answers(engine, params)) == token_lists(answers(plain, params))
        passes = engine.take_passes()
        assert passes
        assert {record.strategy for record in passes} <= {"off", *STRATEGIES}
        assert asked, "overlap was turned off, or never on"
