"""What is said of the rollout engine's graphs before launch."""

from __future__ import annotations

import re

from tests.tiny_models import tiny_config
from tlt_megatron.engines.embedded.graph_plan import GraphPlan
from tlt_megatron.speculation.strategy import SpeculationStrategy
from tlt_megatron.trainer.graph_log import graph_lines

PLAN = GraphPlan(
    tiny_config(),
    [SpeculationStrategy.parse(text) for text in ("4_2_8", "6_4_16", "ngram_8")],
    max_batch_size=64,
    max_length=1600,
    item_bytes=2,
)


def test_the_table_has_every_capture_once() -> None:
    first, header, *rows = graph_lines(PLAN, is_used=True)
    assert f"{len(PLAN.keys)} captures" in first
    assert header.split()[:2] == ["pass", "rows"]
    shape = re.compile(r"(target|draft) +(\d+)  ((?:\d+, )*\d+) +(\d+) +[\d,]+ MiB  (.+)")
    parts = [shape.fullmatch(row).groups() for row in rows]
    assert sum(int(count) for *_, count, _ in parts) == len(PLAN.keys)
    assert {(role, int(num_rows)) for role, num_rows, *_ in parts} == {
        (key.role, key.num_rows) for key in PLAN.keys
    }
    assert [
        users for role, num_rows, *_, users in parts if (role, num_rows) == ("target", "1")
    ] == ["off"]


def test_where_graphs_are_not_used_one_line_says_so() -> None:
    (line,) = graph_lines(PLAN, is_used=False)
    assert "not used" in line
    assert re.search(r"[\d,]+ MiB", line)
