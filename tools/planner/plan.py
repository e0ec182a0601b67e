"""Prints what configurations would take per step without speculation, with a frozen drafter and
with TLT, and which of them to take.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tlt_megatron.config.model_shape import load_model_config
from tlt_megatron.config.schema import RunConfig
from tlt_megatron.saved_files import parse_object
from tools.planner.fit import Candidate
from tools.planner.plan_figure import draw
from tools.planner.recorded_machine import RecordedMachine, Recording, read_recording
from tools.planner.simulation import PHASES, Machine, Prediction, Variant, simulate
from tools.planner.steps import Batch, limits_of, lognormal, resampled, steps_of, whole
from tools.print_tables import print_table
from tools.run_report.files import read_text

_OFTEN = 0.05  # share of passes that brings a strategy into the advice
_MOST_RESPONSES = 1 << 20  # of a simulated step, which takes memory and time for each
_ERROR = 0.1  # relative error of a prediction; see docs/planner.md
_PLAIN = Variant(name="plain")
_CONFIG = "config.json"
Bars = dict[str, dict[str, float]]  # seconds of a step by phase, by the name of a bar


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The predictions of a candidate."""

    candidate: Candidate
    found: Mapping[str, Prediction]  # by variant; of the fixed strategies only the fastest

    @property
    def best(self) -> str:
        """Return the fastest variant."""
        return min(self.found, key=lambda name: self.found[name].step_s)

    @property
    def responses_per_rank_s(self) -> float:
        """Return the responses that a rank brings to the update per second, with the best variant.

        It compares configurations with different batches and ranks.
        """
        rollout = self.candidate.config.rollout
        responses = rollout.num_prompts * rollout.num_samples
        return responses / self.found[self.best].step_s / self.candidate.ranks


def variants(config: RunConfig, machine: Machine) -> list[Variant]:
    """Return the ways that are compared. "TLT" begins without a drafter if none is configured, and
    is left out if nothing is known about drafter training.
    """
    section, end = config.speculation, machine.max_updates
    strategies = section.parsed_strategies
    frozen = Variant(name="frozen", strategies=strategies, selector=section.selector, updates=end)
    begin = end if section.drafter else 0.0
    tlt = replace(frozen, name="TLT", trains_drafter=True, updates=begin)
    return [
        _PLAIN,
        *(Variant(name=f"always {s}", strategies=[s], updates=end) for s in strategies),
        frozen,
        *([tlt] if machine.updates_per_idle_s else []),
    ]


def predict(candidate: Candidate, machine: Machine, batches: Sequence[Batch]) -> Plan:
    """Predict the steps in which a candidate generates these batches."""
    config = candidate.config
    steps, limits = steps_of(config.rollout, batches), limits_of(config.rollout)
    found = {
        each.name: simulate(machine, each, steps, num_replicas=candidate.replicas, limits=limits)
        for each in variants(config, machine)
    }
    fixed = sorted((n for n in found if n.startswith("always")), key=lambda n: found[n].step_s)
    shown = {name: each for name, each in found.items() if name not in fixed[1:]}
    return Plan(candidate=candidate, found=shown)


def print_plan(
    candidates: Sequence[Candidate],
    runs: Sequence[str],
    *,
    lengths: str = "",
    computed: Callable[[Candidate], Machine] | None = None,
    against: Sequence[str] = (),
    memory_bytes: float = 0.0,
    figure: str = "",
) -> None:
    """Print the predictions from recorded `runs`. ValueError names what a run or an option lacks.

    The first candidate is shown by phase. `lengths`, "median,p99", assumes a lognormal
    distribution; the default is that of the recorded runs. `computed` makes the machine of a
    candidate where there are no runs. Of each finished run of `against`, its own configuration is
    predicted for its own lengths, and its seconds are printed beside the predicted ones. A
    candidate fits if a rank has `memory_bytes`; 0.0: not known. `figure` is the SVG to write, with
    the seconds by phase in a JSON beside it.
    """
    finished = {run: read_recording(Path(run)) for run in against}
    recordings = [read_recording(Path(run)) for run in runs]
    recorded = [batch for recording in recordings for batch in recording.batches]
    if computed:
        machines = list(map(computed, candidates))
    else:
        for run, recording in zip(runs, recordings, strict=True):
            check_recording(candidates, run, recording.config)
        machines: list[Machine] = [RecordedMachine(recordings)] * len(candidates)
    plans = []
    for each, machine in zip(candidates, machines, strict=True):
        rollout = each.config.rollout
        rollout.require(
            rollout.num_prompts * rollout.num_samples <= _MOST_RESPONSES,
            "num_prompts",
            f"such that a simulated step has at most {_MOST_RESPONSES} responses",
        )
        if lengths:
            batches = lognormal(rollout, lengths, machine.prompt_tokens)
        else:
            batches = resampled(rollout, recorded)
        plans.append(predict(each, machine, batches))
    _print_phases(plans[0], machines[0].source)
    _print_strategies(*list(plans[0].found.items())[-1])
    _print_choice(plans, memory_bytes)
    bars: Bars = {name: each.phases for name, each in plans[0].found.items()}
    for run, recording in finished.items():
        bars |= _print_errors(run, recording, machines[0])
    if figure:
        found = plans[0].found
        shown = {name: each for name, each in found.items() if not name.startswith("always")}
        title = f"The last of {found['plain'].num_steps} predicted steps, {machines[0].source}, {plans[0].candidate.replicas} replicas"
        Path(figure).write_text(draw(title, shown, bars), encoding="utf-8")
        Path(figure).with_suffix(".json").write_text(json.dumps(bars, indent=1) + "\n", "utf-8")


def check_recording(candidates: Sequence[Candidate], run: str, recorded: RunConfig) -> None:
    """Raise ValueError if the run is of another model, device or layout than a candidate."""
    folder, device = Path(run) / "hf", _device_of(Path(run), recorded)
    if not (folder / _CONFIG).is_file():
        folder = Path(recorded.model.path)
    for each in candidates:
        planned = each.config
        unlike = ""
        if planned.parallel != recorded.parallel:
            unlike = f"has {recorded.parallel}"
        elif "auto" not in (device, planned.run.device) and (
            (device == "cpu") != (planned.run.device == "cpu")
        ):
            unlike = f"ran on {device}, the plan is for run.device={planned.run.device}"
        elif planned.rollout.dtype != recorded.rollout.dtype:
            unlike = f"has rollout.dtype={recorded.rollout.dtype}"
        elif planned.ranks_per_engine != recorded.ranks_per_engine:
            unlike = f"has engines of {recorded.ranks_per_engine} ranks"
        elif not _is_same_model(folder, Path(planned.model.path)):
            unlike = f"has another model, {recorded.model.path}"
        if unlike:
            raise ValueError(
                f"--simulate {run}: {unlike}, unlike {each.name}; record a run of each"
            )


def _device_of(run: Path, recorded: RunConfig) -> str:
    """Return the device that a run names in its status, or else in its settings."""
    status = read_text(run / "status" / "rank_00000.json")
    known = parse_object(run, status).get("device") if status else None
    return str(known or recorded.run.device)


def _is_same_model(one: Path, other: Path) -> bool:
    """Return whether two folders have models of one shape; without files, whether they are one."""
    if not (one / _CONFIG).is_file():
        return one == other
    shapes = [replace(load_model_config(each), max_position_embeddings=0) for each in (one, other)]
    return shapes[0] == shapes[1]


def _print_phases(plan: Plan, source: str) -> None:
    plain, predictions = plan.found["plain"], plan.found.values()
    shown = [phase for phase in PHASES if any(each.phases[phase] for each in predictions)]
    rows = [[phase, *(each.phases[phase] for each in predictions)] for phase in ("gen", *shown)]
    rows.append(["step", *(each.step_s for each in predictions)])
    rows.append(["times as fast as plain", *(plain.step_s / each.step_s for each in predictions)])
    rows.append(["idle rank-seconds", *(each.idle_s for each in predictions)])
    title = f"seconds of a step, {source}, mean of {plain.num_steps}, {plan.candidate.replicas} replicas"
    print_table(title, ["", *plan.found], rows)


def _print_strategies(name: str, found: Prediction) -> None:
    by_octave: dict[int, Counter[str]] = {}
    for (strategy, batch_size), count in found.passes.items():
        by_octave.setdefault(int(math.log2(batch_size)), Counter())[strategy] += count
    rows = []
    for octave, counts in sorted(by_octave.items()):
        shares = (f"{name} {n / counts.total():.0%}" for name, n in counts.most_common(3))
        rows.append([f"{2**octave}-{2 ** (octave + 1) - 1}", ", ".join(shares)])
    title = f"strategies of {name} by running requests"
    print_table(title, ["requests", "passes"], rows, num_names=2)


def _print_choice(plans: Sequence[Plan], memory_bytes: float) -> None:
    """Print all candidates and which of them to take: of those that fit, the one with most
    responses per rank and second.
    """
    problems = [plan.candidate.problem(memory_bytes) for plan in plans]
    rows = []
    for plan, problem in zip(plans, problems, strict=True):
        tlt_s = plan.found["TLT"].step_s if "TLT" in plan.found else None
        steps = [plan.found["plain"].step_s, plan.found["frozen"].step_s, tlt_s]
        gib = plan.candidate.ledger.peak_bytes / 2**30
        fits = ("no" if problem else "yes") if memory_bytes else "-"
        rows.append([plan.candidate.name, *steps, plan.best, plan.responses_per_rank_s, gib, fits])
    names = ("configuration", "plain s", "frozen s", "TLT s", "fastest")
    columns = (*names, "responses per rank and s", "GiB of a rank", "fits")
    print_table("what to take", columns, rows)
    fitting = [plan for plan, problem in zip(plans, problems, strict=True) if not problem]
    if not fitting:
        print(f"None fits. {plans[0].candidate.name}: {problems[0]}")
        return
    plan = max(fitting, key=lambda each: each.responses_per_rank_s)
    found, gain = plan.found[plan.best], plan.found["plain"].step_s / plan.found[plan.best].step_s
    counts = Counter[str]()
    for (strategy, _), count in found.passes.items():
        counts[strategy] += count
    often = ", ".join(name for name, n in counts.most_common() if n >= _OFTEN * counts.total())
    print(
        f"Take {plan.candidate.name}: {plan.best}, {gain:.2f} times as fast as plain, strategies {often}."
    )
    if 1.0 < gain < 1.0 + _ERROR:
        print("That gain is less than the error of a prediction (10 %).")
    if plan.candidate.config.rollout.partial_rollout_tokens:
        print("Partial rollouts are not lossless: they train on tokens of older policies.")


def _print_errors(run: str, finished: Recording, machine: Machine) -> Bars:
    """Print a prediction beside its measured seconds, and return the bars of both."""
    config = finished.config
    variant = _PLAIN
    if config.speculation.enabled:
        known = {each.name: each for each in variants(config, machine)}
        name = "TLT" if config.spot.enabled else "frozen"
        if name not in known:
            raise ValueError(f"--against {run}: trained its drafter, but no run of --simulate did")
        variant = known[name]
    found = simulate(
        machine,
        variant,
        list(map(whole, finished.batches)),
        num_replicas=finished.num_replicas,
        limits=limits_of(config.rollout),
    )
    rows = []
    for phase in ("gen", *(p for p in PHASES if found.phases[p]), "step"):
        predicted = found.step_s if phase == "step" else found.phases[phase]
        measured = finished.seconds(phase)
        ratio = predicted / measured if measured else None
        rows.append([phase, f"{predicted:.3f}", f"{measured:.3f}", ratio])
    print_table(f"{run}: {variant.name}", ["", "predicted", "measured", "ratio"], rows)
    measured = {phase: finished.seconds(phase) for phase in ("gen", *PHASES)}
    return {
        f"{Path(run).name}, predicted": found.phases,
        f"{Path(run).name}, measured": measured,
    }
