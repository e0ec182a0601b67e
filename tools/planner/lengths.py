"""The steps that a plan simulates: lengths of a run, drawn again from it, or assumed."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from tlt_megatron.config.schema import RolloutSection, RunConfig
from tools.planner.steps import Batch, Group, Step, partial_steps, whole

_NUM_STEPS = 10  # of lengths that are assumed
_P99 = 2.326  # standard deviations


def steps_of(config: RunConfig, batches: Sequence[Batch]) -> list[Step]:
    """Return the steps in which `config` generates these batches."""
    rollout = config.rollout
    if not rollout.partial_rollout_tokens:
        return list(map(whole, batches))
    return partial_steps(
        batches,
        num_prompts=rollout.num_prompts,
        round_tokens=rollout.partial_rollout_tokens,
        num_drawn=rollout.over_sampling_prompts or rollout.num_prompts,
    )


def resampled(rollout: RolloutSection, batches: Sequence[Batch]) -> list[Batch]:
    """Return as many batches of the configured size: prompts and responses are drawn again if it
    differs.
    """
    draw, found = random.Random(0), []
    for batch in batches:
        taken = batch
        if len(batch) != rollout.num_prompts:
            taken = draw.choices(batch, k=rollout.num_prompts)
        found.append([_resized(group, rollout, draw) for group in taken])
    return found


def _resized(group: Group, rollout: RolloutSection, draw: random.Random) -> Group:
    taken = group.lengths
    if len(taken) != rollout.num_samples:
        taken = draw.choices(taken, k=rollout.num_samples)
    return group._replace(lengths=[min(length, rollout.max_new_tokens) for length in taken])


def lognormal(rollout: RolloutSection, text: str) -> list[Batch]:
    """Return batches of lognormal lengths. `text` is "median,p99"; ValueError if it is not."""
    try:
        median, p99 = (float(word) for word in text.split(","))
    except ValueError:
        median = p99 = 0.0
    if not 1.0 <= median < p99:
        raise ValueError(f"--lengths {text}: must be MEDIAN,P99 in tokens, as in 1200,18000")
    draw, sigma = random.Random(0), math.log(p99 / median) / _P99

    def length() -> int:
        tokens = round(draw.lognormvariate(math.log(median), sigma))
        return min(max(tokens, 1), rollout.max_new_tokens)

    return [
        [Group([length() for _ in range(rollout.num_samples)]) for _ in range(rollout.num_prompts)]
        for _ in range(_NUM_STEPS)
    ]
