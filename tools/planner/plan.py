"""Prints what a configuration would take per step without speculation, with a frozen drafter, and
with TLT.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tlt_megatron.config.schema import RolloutSection, RunConfig
from tools.bench.measure import print_table
from tools.planner.recorded_machine import Machine
from tools.planner.recording import PHASES, Batch, Group, Recording, read_recording
from tools.planner.simulation import Prediction, Variant, simulate

_NUM_STEPS = 10  # of lengths that are assumed
_P99 = 2.326  # standard deviations


def print_plan(
    config: RunConfig, ranks: int, runs: Sequence[str], *, lengths: str = "", against: str = ""
) -> None:
    """Print the predictions from recorded `runs`. ValueError names what a run or an option lacks.

    `lengths`, "median,p99", assumes a lognormal distribution; the default is that of the recorded
    runs. `against` is a finished run of this configuration: its own lengths are taken, and its
    seconds are printed beside the predicted ones.
    """
    recordings = [read_recording(Path(run)) for run in runs]
    machine = Machine(recordings)
    strategies = config.speculation.parsed_strategies
    machine.check(strategies)
    finished = read_recording(Path(against)) if against else None
    if finished:
        steps = list(finished.batches)
    elif lengths:
        steps = _lognormal(config, lengths)
    else:
        steps = _resampled(config, recordings)
    end, begin = machine.max_updates, machine.max_updates if config.speculation.drafter else 0.0
    fixed = [
        Variant(name=f"always {each}", strategies=[each], selector="fixed", updates=end)
        for each in strategies
    ]
    variants = [
        Variant(name="plain"),
        *fixed,
        Variant(name="frozen", strategies=strategies, updates=end),
        Variant(name="TLT", strategies=strategies, trains_drafter=True, updates=begin),
    ]
    replicas, max_batch = ranks // config.ranks_per_engine, config.rollout.max_batch_size
    found = {
        variant.name: simulate(machine, variant, steps, num_replicas=replicas, max_batch=max_batch)
        for variant in variants
    }
    worse = sorted((each.name for each in fixed), key=lambda name: found[name].step_s)[1:]
    found = {name: each for name, each in found.items() if name not in worse}
    _print_variants(found, f"seconds of a step, mean of {len(steps)}, {replicas} replicas")
    _print_strategies(found["TLT"])
    if finished:
        name = "TLT" if config.spot.enabled else "frozen"
        if not config.speculation.enabled:
            name = "plain"
        _print_errors(found[name], finished)


def _resampled(config: RunConfig, recordings: Sequence[Recording]) -> list[Batch]:
    """Return the steps of the recordings with the batch of `config`: prompts and responses are
    drawn again if it differs.
    """
    rollout, draw = config.rollout, random.Random(0)
    steps = []
    for batch in (batch for recording in recordings for batch in recording.batches):
        taken = batch
        if len(batch) != rollout.num_prompts:
            taken = draw.choices(batch, k=rollout.num_prompts)
        steps.append([_resized(group, rollout, draw) for group in taken])
    return steps


def _resized(group: Group, rollout: RolloutSection, draw: random.Random) -> Group:
    taken = group.lengths
    if len(taken) != rollout.num_samples:
        taken = draw.choices(taken, k=rollout.num_samples)
    return group._replace(lengths=[min(length, rollout.max_new_tokens) for length in taken])


def _lognormal(config: RunConfig, text: str) -> list[Batch]:
    try:
        median, p99 = (float(word) for word in text.split(","))
    except ValueError:
        median = p99 = 0.0
    if not 1.0 <= median < p99:
        raise ValueError(f"--lengths {text}: must be MEDIAN,P99 in tokens, as in 1200,18000")
    rollout, draw = config.rollout, random.Random(0)
    sigma = math.log(p99 / median) / _P99

    def length() -> int:
        tokens = round(draw.lognormvariate(math.log(median), sigma))
        return min(max(tokens, 1), rollout.max_new_tokens)

    return [
        [Group([length() for _ in range(rollout.num_samples)]) for _ in range(rollout.num_prompts)]
        for _ in range(_NUM_STEPS)
    ]


def _print_variants(found: dict[str, Prediction], title: str) -> None:
    plain_s = found["plain"].step_s
    shown = [phase for phase in PHASES if any(each.phases[phase] for each in found.values())]
    rows = [
        [phase, *(each.phases[phase] / each.num_steps for each in found.values())]
        for phase in ("gen", *shown)
    ]
    rows.append(["step", *(each.step_s for each in found.values())])
    rows.append(["times as fast as plain", *(plain_s / each.step_s for each in found.values())])
    rows.append(["idle rank-seconds", *(each.idle_s / each.num_steps for each in found.values())])
    print_table(title, ["", *found], rows)


def _print_strategies(found: Prediction) -> None:
    by_octave: dict[int, Counter[str]] = {}
    for (strategy, batch_size), count in found.passes.items():
        by_octave.setdefault(int(math.log2(batch_size)), Counter())[strategy] += count
    rows = []
    for octave, counts in sorted(by_octave.items()):
        shares = (f"{name} {n / counts.total():.0%}" for name, n in counts.most_common(3))
        rows.append([f"{2**octave}-{2 ** (octave + 1) - 1}", ", ".join(shares)])
    print_table("strategies of TLT by running requests", ["requests", "passes"], rows, num_names=2)


def _print_errors(found: Prediction, finished: Recording) -> None:
    rows = []
    for phase in ("gen", *(p for p in PHASES if p != "rest" and found.phases[p]), "step"):
        predicted = found.step_s if phase == "step" else found.phases[phase] / found.num_steps
        measured = finished.seconds(phase)
        rows.append([phase, predicted, measured, predicted / measured if measured else None])
    title = f"{finished.path}: predicted and measured seconds of a step"
    print_table(title, ["", "predicted", "measured", "ratio"], rows)
