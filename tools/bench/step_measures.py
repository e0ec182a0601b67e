"""Compares RL runs of the same seeds: time by step, equal work, acceptance, idle time.

Pure functions over the files of a run (metrics.jsonl, rollouts/), called by tools/bench/step.py. Speculation changes no token,
so step k of two variants does the same work and only times may differ. If rounding swaps two tokens (float32, bfloat16), the
runs diverge; `num_same_steps` shows from which step on.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.bench.measure import spread
from tools.run_report.data import read_metrics

STEP_SECONDS = "timing_s/step"
ROLLOUT_SECONDS = "timing_s/gen"
REWARD = "critic/rewards/mean"
LIVE_ACCEPT_LENGTH = "drafter/live_accept_length"
HOLDOUT_ACCEPT_LENGTH = "drafter/holdout_accept_length/published"
ResponseKey = tuple[int, int]  # (draw_index, sample_index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """One line of rollouts/step_*.jsonl: the part that speculation must not change."""

    token_ids: tuple[int, ...]
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One RL step of one run."""

    metrics: dict[str, float]  # without values that were not finite
    responses: dict[ResponseKey, Response]

    @property
    def num_tokens(self) -> int:
        """Return the tokens of all responses."""
        return sum(len(response.token_ids) for response in self.responses.values())


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


def _read_responses(folder: Path, step: int) -> dict[ResponseKey, Response]:
    path = folder / "rollouts" / f"step_{step:07d}.jsonl"
    if not path.exists():
        raise ValueError(f"{path}: missing; logging.rollouts must be on in every step of the run")
    lines = path.read_text(encoding="utf-8")
    rows = [json.loads(line) for line in lines.splitlines()]
    return {
        (row["draw_index"], row["sample_index"]): Response(
            token_ids=tuple(row["token_ids"]), reward=row["reward"]
        )
        for row in rows
    }


# ---- time


def timed_steps(num_steps: int, steps_per_round: int) -> list[int]:
    """Return all steps except the first of each round, which warms its process up."""
    return [step for step in range(1, num_steps + 1) if (step - 1) % steps_per_round > 0]


def speedups(
    base: Run, other: Run, steps: Sequence[int], metric: str = STEP_SECONDS
) -> dict[str, float]:
    """Return the spread over steps of base / other seconds, and `total`, the ratio of the sums."""
    pairs = [(base[step].metrics[metric], other[step].metrics[metric]) for step in steps]
    each = spread([slow / fast for slow, fast in pairs])
    return each | {"total": sum(slow for slow, _ in pairs) / sum(fast for _, fast in pairs)}


def phase_seconds(run: Run, steps: Sequence[int]) -> dict[str, float]:
    """Return mean seconds of a step by phase, largest over ranks. Phases that a run does not have are left out."""
    names = {name for step in steps for name in run[step].metrics if name.startswith("timing_s/")}
    return {
        name.removeprefix("timing_s/"): _sum(run, steps, name) / len(steps)
        for name in sorted(names)
    }


def rollout_share(run: Run, steps: Sequence[int]) -> float:
    """Return the share of the time of `steps` that passes until the last response ends."""
    return _sum(run, steps, ROLLOUT_SECONDS) / _sum(run, steps, STEP_SECONDS)


# ---- spot training


def idle_figures(run: Run, steps: Sequence[int]) -> dict[str, object]:
    """Return idle rank-seconds, the part that the drafter used, and what the RL step paid for it."""
    idle_s, used_s = _sum(run, steps, "bubble/idle_s"), _sum(run, steps, "bubble/used_s")
    preempt_ms = [run[step].metrics.get("spot/preempt_ms", 0.0) for step in steps]
    preempted = [value for value in preempt_ms if value > 0]  # steps that ended in a session
    return {
        "idle_s": idle_s,
        "used_s": used_s,
        "idle_used_fraction": used_s / idle_s if idle_s else math.nan,
        "stall_fraction": _sum(run, steps, "bubble/stall_s") / _sum(run, steps, STEP_SECONDS),
        "preempt_ms": spread(preempted) if preempted else None,
        "updates_per_step": _sum(run, steps, "spot/updates") / len(steps),
    }


def series(run: Run, metric: str) -> list[float | None]:
    """Return `metric` by step; None if the step has none, e.g. an accept length without a drafted token."""
    return [record.metrics.get(metric) for record in run.values()]


def first_step_at(
    values: Sequence[float | None], levels: Sequence[float | None], share: float
) -> int | None:
    """Return the first step, from 1, whose value is at least `share` of the median of `levels`; None if there is none."""
    known = [level for level in levels if level is not None]
    bar = share * statistics.median(known) if known else math.inf
    reached = (step for step, v in enumerate(values, start=1) if v is not None and v >= bar)
    return next(reached, None)


# ---- equal work


def is_identical(runs: Iterable[Run]) -> bool:
    """Return whether steps, requests, tokens and rewards are exactly equal in all runs."""
    first, *others = [{step: record.responses for step, record in run.items()} for run in runs]
    return all(run == first for run in others)


def num_same_steps(one: Run, other: Run, steps: Sequence[int]) -> int:
    """Return the number of steps in which both runs drew the same tokens."""
    drawn = [
        [{key: r.token_ids for key, r in run[step].responses.items()} for step in steps]
        for run in (one, other)
    ]
    return sum(a == b for a, b in zip(*drawn, strict=True))


# ---- prompts


def with_a_tail(
    rows: Sequence[Mapping[str, object]],
    lengths: Sequence[int],
    *,
    num_prompts: int,
    tail_share: float,
    seed: int,
) -> list[Mapping[str, object]]:
    """Order `rows` so that every `num_prompts` of them hold one of the longest `tail_share`, at a random place.

    A step of a few prompts then has the tail that a step of hundreds always has. Rows that do not fill a step are left out.
    """
    if num_prompts < 2 or not 0 < tail_share < 1:
        raise ValueError(
            f"num_prompts={num_prompts}, tail_share={tail_share}: must be >= 2, in (0, 1)"
        )
    shuffle = random.Random(seed)
    by_length = sorted(range(len(rows)), key=lambda i: (lengths[i], i))
    num_tail = max(1, round(tail_share * len(rows)))
    body, tail = by_length[:-num_tail], by_length[-num_tail:]
    shuffle.shuffle(body)
    shuffle.shuffle(tail)
    ordered = []
    for number in range(min(len(tail), len(body) // (num_prompts - 1))):
        step = [tail[number], *body[number * (num_prompts - 1) :][: num_prompts - 1]]
        shuffle.shuffle(step)
        ordered += step
    return [rows[i] for i in ordered]


def _sum(run: Run, steps: Sequence[int], metric: str) -> float:
    return sum(run[step].metrics.get(metric, 0.0) for step in steps)
