"""Warms up a random drafter before the first RL step, for `speculation.warmup_minutes`.

The policy answers the run's own prompts for half of that time, and then all ranks train the drafter
together. The number of updates depends on the machine's speed, so the drafter does too. Tokens,
rewards and the policy do not: see speculation/sampling.py.
"""

from __future__ import annotations

import dataclasses
import time

from tlt_megatron.data.prompts import PromptSampler
from tlt_megatron.engines.base import GenerationStopped
from tlt_megatron.runtime.collectives import gather_objects
from tlt_megatron.spot.lifecycle import DrafterLifecycle
from tlt_megatron.trainer.rollout_worker import RolloutWorker
from tlt_megatron.types import SamplingParams

_GENERATION_SHARE = 0.5  # of the time, at most; then the prompts at hand are finished
_SEED_OFFSET = 0x3A93  # the first step's responses are not those of the warm-up


def warm_up_drafter(
    drafter: DrafterLifecycle,
    worker: RolloutWorker,
    sampler: PromptSampler,
    params: SamplingParams,
    *,
    num_prompts: int,
    seconds: float,
) -> None:
    """Generate, train, publish. A collective of all ranks.

    Draws `num_prompts` prompts at a time and restores the sampler. With an environment, only first
    turns are generated. The drafter gets at least one update. If a rank is told to stop while it
    generates, all raise GenerationStopped; a stop while the drafter trains ends the warm-up early.
    """
    started = time.monotonic()
    params = dataclasses.replace(params, seed=params.seed + _SEED_OFFSET)
    before, is_time_over = sampler.state_dict(), False
    with worker.phases("WARM-UP", "warm_up_drafter"):
        while not is_time_over:
            mine = worker.share_of(sampler.next_batch(num_prompts))
            is_stopped = False
            try:
                worker.engine.generate(
                    mine,
                    params,
                    policy_version=0,
                    on_features=drafter.add_features,
                    should_stop=worker.should_stop,
                )
            except GenerationStopped:
                is_stopped = True
            is_time_over = time.monotonic() - started > seconds * _GENERATION_SHARE
            everyones = gather_objects((is_stopped, is_time_over), worker.replicas)
            if any(stopped for stopped, _ in everyones):
                sampler.load_state_dict(before)
                raise GenerationStopped("the drafter's warm-up is stopped")
            is_time_over = any(over for _, over in everyones)
        worker.engine.free_kv()
        sampler.load_state_dict(before)
        accept_length = drafter.warm_up(
            lambda: worker.should_stop() or time.monotonic() - started > seconds
        )
    worker.phases.progress.message(
        f"drafter warmed up: {drafter.trainer.num_updates} updates in "
        f"{time.monotonic() - started:.0f} s, hold-out accept length {accept_length:.2f}"
    )
