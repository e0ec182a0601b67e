"""Checks that two RL runs drew the same tokens and got the same rewards.

    tlt compare runs/plain runs/speculative

Both runs need logging.rollouts=true. The tool compares the steps that both have, response by
response, and what the policy learned from them. If a token or a reward differs, it names the first
such step and exits with code 1. Code 2 says that the runs cannot be compared.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from tlt_megatron.saved_files import errors_named
from tlt_megatron.types import RolloutKey
from tools.run_report.data import read_metrics
from tools.run_report.files import read_lines

LEARNED = ("critic/rewards/mean", "actor/pg_loss", "actor/grad_norm", "actor/entropy")
STEP_SECONDS = "timing_s/step"
Response = tuple[tuple[int, ...], float]  # token ids and reward


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One RL step of one run: its metrics, and the part of its responses that speculation must not
    change.
    """

    metrics: dict[str, float]  # without values that were not finite
    responses: dict[RolloutKey, Response]

    @property
    def num_tokens(self) -> int:
        """Return the tokens of all responses."""
        return sum(len(token_ids) for token_ids, _ in self.responses.values())


Run = dict[int, StepRecord]  # by step, from 1


def read_run(folder: Path) -> Run:
    """Return the steps of the run in `folder`, which needs logging.rollouts=true."""
    run: Run = {}
    for row in read_metrics(folder / "metrics.jsonl"):
        if STEP_SECONDS in row:
            known = {name: value for name, value in row.items() if value is not None}
            step = int(known["step"])
            run[step] = StepRecord(metrics=known, responses=_read_responses(folder, step))
    return run


def _read_responses(folder: Path, step: int) -> dict[RolloutKey, Response]:
    pattern = f"step_{step:07d}.*jsonl"  # one for each rank that wrote; older runs have one file
    paths = sorted((folder / "rollouts").glob(pattern))
    if not paths:
        raise ValueError(
            f"{folder}/rollouts/{pattern}: missing; logging.rollouts must be on in every step of the run"
        )
    found: dict[RolloutKey, Response] = {}
    for path in paths:
        with errors_named(path):
            for row in read_lines(path):
                token_ids = tuple(map(int, row["token_ids"]))
                place = int(row["draw_index"]), int(row["sample_index"])
                found[place] = token_ids, row["reward"]
    return found


def main() -> int:
    """Print what is the same. Return 0 if all tokens and rewards are. ValueError if the runs cannot
    be compared.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("runs", nargs=2, type=Path, metavar="RUN")
    folders = parser.parse_args().runs
    if missing := [str(folder) for folder in folders if not folder.is_dir()]:
        raise ValueError(f"{', '.join(missing)}: no such run folder")
    runs = []
    for folder in folders:
        with errors_named(folder):
            runs.append(read_run(folder))
    one, other = runs
    if not one.keys() & other.keys():
        raise ValueError(f"{folders[0]} and {folders[1]} have no step in common")
    lines, is_same = compare(one, other)
    print("\n".join(lines))
    return 0 if is_same else 1


def compare(one: Run, other: Run) -> tuple[list[str], bool]:
    """Return what to print for the steps that both have, and whether all tokens and rewards are
    equal.
    """
    steps = sorted(one.keys() & other.keys())
    differing = [step for step in steps if one[step].responses != other[step].responses]
    num_tokens = sum(one[step].num_tokens for step in steps)
    num_responses = sum(len(one[step].responses) for step in steps)
    lines = [
        f"steps compared: {len(steps)} (of {len(one)} and {len(other)})",
        f"responses: {num_responses:,}, tokens: {num_tokens:,}",
    ]
    if differing:
        first = differing[0]
        num_same = _num_same(one[first], other[first])
        lines.append(
            f"tokens or rewards differ in {len(differing)} steps, first in step {first}"
            f" ({num_same} of {len(one[first].responses)} responses are the same there)"
        )
    else:
        lines.append("tokens and rewards: identical")
    for name in LEARNED:
        known = [s for s in steps if name in one[s].metrics and name in other[s].metrics]
        if known:
            largest = max(abs(one[s].metrics[name] - other[s].metrics[name]) for s in known)
            lines.append(f"{name}: largest difference {largest:g}")
    return lines, not differing


def _num_same(one: StepRecord, other: StepRecord) -> int:
    return sum(response == other.responses.get(key) for key, response in one.responses.items())


if __name__ == "__main__":
    raise SystemExit("run it as: tlt compare")
