"""Measures the speedup of speculation: generates the rollouts of the next steps with and without.

Sampling noise depends only on request and position, so both ways draw the same tokens, and the
ratio compares the same work.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tlt_megatron.engines.base import GenerationStopped, RolloutEngine
from tlt_megatron.runtime.collectives import barrier, gather_objects
from tlt_megatron.runtime.process_groups import Group
from tlt_megatron.types import Prompt, RolloutGroup, SamplingParams

_ROUNDS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationGain:
    """Wall seconds until the last rank is done, summed over steps; medians of interleaved rounds."""

    rollout_s_on: float
    rollout_s_off: float
    num_differing: int  # responses that differ between both ways: by rounding, unless in float64

    @property
    def rollout_speedup(self) -> float:
        return self.rollout_s_off / self.rollout_s_on

    def step_speedup(self, step_s: float, gen_s: float) -> float:
        """Return the speedup of a step of `step_s` seconds, `gen_s` of them in rollouts."""
        return (step_s - gen_s + gen_s * self.rollout_speedup) / step_s


def measure_gain(
    engine: RolloutEngine,
    sizes: Sequence[int],
    draw: Callable[[int], Sequence[Prompt]],
    params: SamplingParams,
    *,
    policy_version: int,
    replicas: Group,
    should_stop: Callable[[], bool] = lambda: False,
) -> SpeculationGain | None:
    """Time generation rounds of `sizes` prompts with and without speculation. A collective.

    `draw` returns the next prompts of the run, the same on every rank. A response of an earlier step would be known to
    n-grams, so no prompt of the run comes again. A switch drops captured graphs, so the first generation after it is not timed.
    Returns None if the engine cannot decode without speculation, or if any rank was told to stop.
    """
    seconds: dict[bool, list[float]] = {True: [], False: []}
    tokens: dict[bool, list[list[int]]] = {True: [], False: []}

    def generate(prompts: Sequence[Prompt]) -> tuple[float, list[RolloutGroup]]:
        """Return the seconds until the last rank is done, inf if one is told to stop, and this rank's responses."""
        barrier(replicas)
        started = time.perf_counter()
        groups, own_s = [], math.inf
        with contextlib.suppress(GenerationStopped):
            groups = engine.generate(
                prompts[replicas.rank :: replicas.size],
                params,
                policy_version=policy_version,
                should_stop=should_stop,
            )
            own_s = time.perf_counter() - started
        return max(gather_objects(own_s, replicas)), groups

    for _ in range(_ROUNDS):
        first, *batches = [draw(size) for size in (sizes[0], *sizes)]
        for is_on in (True, False):
            if not engine.pause_speculation(not is_on):
                return None
            generate(first)
            spent = 0.0
            for prompts in batches:
                batch_s, groups = generate(prompts)
                spent += batch_s
                if math.isinf(spent):
                    return None
                tokens[is_on] += [r.token_ids.tolist() for g in groups for r in g.rollouts]
            seconds[is_on].append(spent)
    engine.pause_speculation(False)
    engine.take_passes()
    differing = sum(on != off for on, off in zip(tokens[True], tokens[False], strict=True))
    return SpeculationGain(
        rollout_s_on=statistics.median(seconds[True]),
        rollout_s_off=statistics.median(seconds[False]),
        num_differing=sum(gather_objects(differing, replicas)),
    )
