"""The alarms at the top of a report: what the metrics of a run say is going wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from tlt_megatron.config.policy_sections import EXACT_DTYPES, MAX_DIFF_EXACT, MEAN_DIFF_ROUNDED
from tlt_megatron.rollout.slow_rank import describe

_NUM_STEPS = 5  # a state must last for so many steps
_MIN_FALL = 0.1  # how far the reward fell, as a share of the range of rewards
_MIN_ENTROPY = 0.001  # nats per token
_MAX_STALL = 0.05  # share of the step time
_DIFF = "train/train_rollout_logprob_abs_diff"

Row = Mapping[str, float | None]
Sections = Mapping[str, Mapping[str, object]]


def find_alarms(rows: Sequence[Row], config: Sections) -> list[str]:
    """Return a sentence for each alarm.

    `rows` are metrics by step, ascending; None is a value that was not finite.
    """
    found = [
        _not_finite(rows),
        _reward_fell(rows),
        _no_spread(rows),
        _low_entropy(rows),
        _engines_differ(rows, config),
        _stall(rows),
        _slow_rank(rows),
    ]
    return [sentence for sentence in found if sentence]


def _slow_rank(rows: Sequence[Row]) -> str:
    """Say which rank slows the last steps down, if in each of them it is the same."""
    last = [row for row in rows if "perf/slowest_rank/rank" in row][-_NUM_STEPS:]
    found = [describe(row, row.get("timing_s/step") or 0.0) for row in last]
    ranks = {row["perf/slowest_rank/rank"] for row in last}
    return (
        f"In the last {_NUM_STEPS} steps {found[-1]}."
        if all(found) and len(found) == _NUM_STEPS and len(ranks) == 1
        else ""
    )


def _last(rows: Sequence[Row], name: str, num_steps: int = _NUM_STEPS) -> list[float]:
    """Return the finite values among the last `num_steps` of a metric; [] if it has fewer."""
    values = [row[name] for row in rows if name in row][-num_steps:]
    return [v for v in values if v is not None] if len(values) == num_steps else []


def _not_finite(rows: Sequence[Row]) -> str:
    bad = [(row["step"], [n for n, v in row.items() if v is None]) for row in rows]
    bad = [(step, names) for step, names in bad if names]
    if not bad:
        return ""
    step, names = bad[-1]
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    before = f" Before it {len(bad) - 1} steps had such values." if len(bad) > 1 else ""
    return f"Step {step:.0f} has values that are not finite: {', '.join(names[:4])}{more}.{before}"


def _reward_fell(rows: Sequence[Row]) -> str:
    """Compare the last steps with the best ones before them, on the scale of the rewards seen so
    far.
    """
    names = (f"critic/rewards/{name}" for name in ("mean", "min", "max"))
    means, lows, highs = (
        [value for row in rows if (value := row.get(n)) is not None] for n in names
    )
    parts = [fmean(means[i : i + _NUM_STEPS]) for i in range(len(means) - _NUM_STEPS + 1)]
    if len(parts) <= _NUM_STEPS or not lows or not highs:
        return ""
    low, best, now = min(lows), max(parts[:-_NUM_STEPS]), parts[-1]
    if now - low >= (best - low) / 2 or best - now < _MIN_FALL * (max(highs) - low):
        return ""
    return f"The mean reward of the last {_NUM_STEPS} steps is {now:.3g}. It was {best:.3g} before."


def _no_spread(rows: Sequence[Row]) -> str:
    lowest, highest = (_last(rows, f"critic/rewards/{name}") for name in ("min", "max"))
    if not lowest or lowest != highest or _last(rows, "actor/reverse_kl"):  # or it is distilled
        return ""
    return (
        f"All responses of a step have had the same reward for {_NUM_STEPS} steps "
        f"(now {lowest[-1]:g}), so there is no advantage to learn from."
    )


def _low_entropy(rows: Sequence[Row]) -> str:
    values = _last(rows, "rollout/entropy") or _last(rows, "actor/entropy")
    if not values or max(values) >= _MIN_ENTROPY or _last(rows, "sft/loss"):
        return ""
    return (
        f"The entropy has been below {_MIN_ENTROPY:g} nats per token for {_NUM_STEPS} steps "
        f"(now {values[-1]:.2g}): the policy does not explore."
    )


def _engines_differ(rows: Sequence[Row], config: Sections) -> str:
    """Compare with the bound that a run checks at its first batch."""
    dtypes = [config.get(section, {}).get("dtype") for section in ("model", "rollout")]
    is_exact = all(dtype in EXACT_DTYPES for dtype in dtypes)
    bound = config.get("algorithm", {}).get("max_logprob_diff")
    if not isinstance(bound, int | float):
        bound = MAX_DIFF_EXACT if is_exact else MEAN_DIFF_ROUNDED
    name = f"{_DIFF}_max" if is_exact else _DIFF
    values = _last(rows, name, 1)
    if not values or values[0] <= bound:
        return ""
    return f"Log-probs of rollout and training differ by {values[0]:.3g} nats ({name}); allowed is {bound:g}."


def _stall(rows: Sequence[Row]) -> str:
    stall, steps = _last(rows, "bubble/stall_s"), _last(rows, "timing_s/step")
    if not stall or not steps or sum(stall) <= _MAX_STALL * sum(steps):
        return ""
    return (
        f"Drafter work held up the last {_NUM_STEPS} steps for {sum(stall) / sum(steps):.0%} of "
        f"their time (bubble/stall_s); {_MAX_STALL:.0%} is high."
    )
