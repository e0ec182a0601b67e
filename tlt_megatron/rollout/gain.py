"""Measures the speedup of speculation: generates the rollouts of the next steps with and without.

Sampling noise depends only on request and position, so both ways draw the same tokens, and the
ratio compares the same work.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tlt_megatron.engines.base import GenerationStopped
from tlt_megatron.rollout.rollout_worker import RolloutWorker
from tlt_megatron.runtime.collectives import barrier, gather_objects
from tlt_megatron.types import Prompt, RolloutGroup, SamplingParams

_ROUNDS = 2


class SpeculationGain(NamedTuple):
    """What speculation changes in the rollouts of the same prompts."""

    rollout_speedup: float  # the ratio of wall seconds until the last rank is done
    num_differing: int  # responses that differ between both ways: by rounding, unless in float64


def measure_gain(
    worker: RolloutWorker,
    sizes: Sequence[int],
    draw: Callable[[int], Sequence[Prompt]],
    params: SamplingParams,
    *,
    policy_version: int,
) -> SpeculationGain | None:
    """Time generation rounds of `sizes` prompts with and without speculation. A collective.

    `draw` returns the next prompts of the run, the same on every rank. A response of an earlier
    step would be known to n-grams, so no prompt of the run comes again. A switch drops captured
    graphs, so the first generation after it is not timed. Returns None if the engine cannot decode
    without speculation, or if any rank was told to stop.
    """
    engine, replicas = worker.engine, worker.replicas
    seconds = {True: 0.0, False: 0.0}
    tokens: dict[bool, list[list[int]]] = {True: [], False: []}

    def generate(prompts: Sequence[Prompt]) -> tuple[float, list[RolloutGroup]]:
        """Return the seconds until the last rank is done, inf if one is told to stop, and this
        rank's responses.
        """
        barrier(replicas)
        started = time.perf_counter()
        groups, own_s = [], math.inf
        with contextlib.suppress(GenerationStopped):
            groups = engine.generate(
                prompts[replicas.rank :: replicas.size],
                params,
                policy_version=policy_version,
                should_stop=worker.should_stop,
            )
            own_s = time.perf_counter() - started
        return max(gather_objects(own_s, replicas)), groups

    for _ in range(_ROUNDS):
        first, *batches = [draw(size) for size in (sizes[0], *sizes)]
        for is_on in (True, False):
            if not engine.pause_speculation(not is_on):
                return None
            generate(first)
            for prompts in batches:
                batch_s, groups = generate(prompts)
                if math.isinf(batch_s):
                    return None
                seconds[is_on] += batch_s
                tokens[is_on] += [r.token_ids.tolist() for g in groups for r in g.rollouts]
    engine.pause_speculation(False)
    engine.take_passes()
    differing = sum(on != off for on, off in zip(tokens[True], tokens[False], strict=True))
    return SpeculationGain(
        rollout_speedup=seconds[False] / seconds[True],
        num_differing=sum(gather_objects(differing, replicas)),
    )
