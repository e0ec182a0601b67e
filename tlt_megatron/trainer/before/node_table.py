"""The table of a dry run: a row per check. A finding that all nodes share stands once. Nodes that
differ or cannot run have lines of their own, with their numbers and hosts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from tlt_megatron.config.load import check_record
from tlt_megatron.config.ranges import Section
from tlt_megatron.saved_files import one_line, parse_object, printable
from tlt_megatron.trainer.before.node_checks import Check

_NUM_GROUPS = 8  # lines of a row with differences: each node may have a value of its own
_NUM_HOSTS = 4  # hosts named after the numbers of nodes
_NAME_WIDTH = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Section):
    """What one node has found."""

    host: str
    checks: list[Check]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Return what another node has sent. If that is no report, it says so as its problem."""
        try:
            return check_record(cls, parse_object("the report", text), "the report")
        except ValueError as error:
            return cls(host="", checks=[Check(name="nodes", problem=one_line(error))])


def describe_nodes(reports: Mapping[int, Report]) -> tuple[list[str], bool]:
    """Return the lines of the table and a line of the result, and whether all is well.

    `reports` are those of the nodes by number.
    """
    names = dict.fromkeys(check.name for each in reports.values() for check in each.checks)
    lines: list[str] = []
    failing: list[str] = []
    for name in names:
        checks = {
            node: check
            for node, each in reports.items()
            for check in each.checks
            if check.name == name
        }
        groups = _group(checks)
        alike = groups[0] if not checks[groups[0][0]].problem else []
        bad = sorted(checks.keys() - {*alike})
        if not bad:
            lines.append(f"ok    {name:<{_NAME_WIDTH}}{_describe([*checks.values()])}")
            continue
        failing.append(f"{name} ({_name_nodes(bad, reports)})")
        for nodes in groups[:_NUM_GROUPS]:
            start = f"FAIL  {name}" if nodes is groups[0] else ""
            found = _describe([checks[node] for node in nodes])
            lines.append(f"{start:<{_NAME_WIDTH + 6}}{_name_nodes(nodes, reports)}: {found}")
        if left := sum(map(len, groups[_NUM_GROUPS:])):
            lines.append(f"{'':<{_NAME_WIDTH + 6}}and {left} more nodes")
    if failing:
        lines.append(f"dry run: {len(failing)} of {len(names)} checks fail: {'; '.join(failing)}")
    else:
        lines.append(f"dry run: all {len(names)} checks pass; nothing was started")
    return [*map(printable, lines)], not failing


def _group(checks: Mapping[int, Check]) -> list[list[int]]:
    """Return the nodes with equal findings together: problems last, larger groups first."""
    groups: dict[tuple[bool, str], list[int]] = {}
    for node, check in checks.items():
        groups.setdefault((bool(check.problem), check.problem or check.found), []).append(node)
    return [groups[key] for key in sorted(groups, key=lambda key: (key[0], -len(groups[key])))]


def _describe(checks: Sequence[Check]) -> str:
    """Return the finding that these nodes share, with their amounts from least to most."""
    if checks[0].problem:
        return checks[0].problem
    parts = [checks[0].found] if checks[0].found else []
    for unit in checks[0].amounts:
        found = sorted(each.amounts[unit] for each in checks if unit in each.amounts)
        texts = [f"{amount:,.2f}" for amount in found]
        spread = texts[0] if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}"
        parts.append(f"{spread} {unit}")
    return ", ".join(parts)


def _name_nodes(nodes: Sequence[int], reports: Mapping[int, Report]) -> str:
    """Return for example `nodes 0-2, 5 (gpu1, gpu2, gpu3, gpu6)`."""
    starts = [nodes[0], *(b for a, b in pairwise(nodes) if b > a + 1)]
    ends = [*(a for a, b in pairwise(nodes) if b > a + 1), nodes[-1]]
    numbers = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
    hosts = [reports[node].host for node in nodes if reports[node].host]
    named = f" ({', '.join(hosts)})" if 0 < len(hosts) <= _NUM_HOSTS else ""
    return f"node{'s' * (len(nodes) > 1)} {numbers}{named}"
