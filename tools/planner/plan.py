"""Prints what a configuration would take per step without speculation, with a frozen drafter, and
with TLT.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tlt_megatron.config.load import load_config
from tlt_megatron.config.schema import RunConfig
from tools.bench.measure import print_table
from tools.planner.lengths import lognormal, resampled, steps_of
from tools.planner.machine_model import PHASES, Machine
from tools.planner.recorded_machine import RecordedMachine
from tools.planner.recording import Recording, read_recording
from tools.planner.simulation import Prediction, Variant, simulate
from tools.planner.steps import whole

_PLAIN = Variant(name="plain")


def print_plan(
    config: RunConfig,
    ranks: int,
    runs: Sequence[str],
    *,
    lengths: str = "",
    against: Sequence[str] = (),
) -> None:
    """Print the predictions from recorded `runs`. ValueError names what a run or an option lacks.

    `lengths`, "median,p99", assumes a lognormal distribution; the default is that of the recorded
    runs. Of each finished run of `against`, its own configuration is predicted for its own lengths,
    and its seconds are printed beside the predicted ones.
    """
    recordings = [read_recording(Path(run)) for run in runs]
    finished = {run: read_recording(Path(run)) for run in against}
    machine = RecordedMachine(recordings)
    if lengths:
        batches = lognormal(config.rollout, lengths)
    else:
        batches = resampled(config.rollout, [b for each in recordings for b in each.batches])
    replicas = ranks // config.ranks_per_engine
    found = {
        variant.name: simulate(
            machine,
            variant,
            steps_of(config, batches),
            num_replicas=replicas,
            max_batch=config.rollout.max_batch_size,
        )
        for variant in _variants(config, machine)
    }
    fixed = sorted((n for n in found if n.startswith("always")), key=lambda n: found[n].step_s)
    found = {name: each for name, each in found.items() if name not in fixed[1:]}
    _print_variants(found, f"seconds of a step, mean of {len(batches)}, {replicas} replicas")
    _print_strategies(found["TLT"])
    for run, recording in finished.items():
        _print_errors(run, recording, machine)


def _variants(config: RunConfig, machine: Machine) -> list[Variant]:
    """Return the ways that are compared. "TLT" begins without a drafter if none is configured."""
    section, end = config.speculation, machine.max_updates
    strategies = section.parsed_strategies
    machine.check(strategies)
    adaptive = {"strategies": strategies, "selector": section.selector}
    return [
        _PLAIN,
        *(Variant(name=f"always {s}", strategies=[s], updates=end) for s in strategies),
        Variant(name="frozen", **adaptive, updates=end),
        Variant(
            name="TLT", **adaptive, trains_drafter=True, updates=end if section.drafter else 0.0
        ),
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


def _print_errors(run: str, finished: Recording, machine: Machine) -> None:
    config = load_config(Path(run) / "config.yaml")
    name = "TLT" if config.spot.enabled else "frozen"
    variant = _PLAIN
    if config.speculation.enabled:
        (variant,) = (each for each in _variants(config, machine) if each.name == name)
    found = simulate(
        machine,
        variant,
        list(map(whole, finished.batches)),
        num_replicas=finished.num_replicas,
        max_batch=config.rollout.max_batch_size,
    )
    rows = []
    for phase in ("gen", *(p for p in PHASES if p != "rest" and found.phases[p]), "step"):
        predicted = found.step_s if phase == "step" else found.phases[phase] / found.num_steps
        measured = finished.seconds(phase)
        ratio = predicted / measured if measured else None
        rows.append([phase, f"{predicted:.3f}", f"{measured:.3f}", ratio])
    print_table(f"{run}: {variant.name}", ["", "predicted", "measured", "ratio"], rows)
