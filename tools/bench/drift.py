"""Measures when training the drafter pays: accept length and speed as the policy moves from its
start.

    python -m tools.bench drift --steps 300 --seeds 0 1 2
    python -m tools.bench drift --task quickstart --steps 88 --variants frozen tlt optimizer.lr=4e-4

The task `drift` rewards short right answers first, and long responses from the middle on. The task
`quickstart` is that of the config. Tokens do not depend on the drafter, so all variants of a seed
have the same policy at every step; "equal" counts the steps in which they drew the same tokens.
`serial` trains the drafter every --serial-every steps, while all ranks wait; its steps count
the seconds of training alone. `own` starts from
the MTP layer of the policy, which must have one. Runs are kept in
--folder and continued, so more steps or variants can be added. To compare seconds, let the variants
take turns: --turn 11. Beside the JSON there is a figure.

A last table has the first block and all blocks over the seeds, which then are repetitions. This
shows a cold start:

    python -m tools.bench drift --task quickstart --steps 5 --block 1 --variants off tlt own ...
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from tlt_megatron.config.own_layer import OWN
from tools.bench.measure import made, ratios, spread, told
from tools.bench.step import (
    COLD,
    FROZEN,
    OFF,
    ROLLOUT_SECONDS,
    ROOT,
    TLT,
    Launch,
    launching,
    num_same_steps,
    turned,
    variant_overrides,
)
from tools.commands.compare_runs import STEP_SECONDS, Run, read_run
from tools.print_tables import print_table
from tools.run_report.figure import Panel, make_curve, make_layout
from tools.run_report.page import render_panels
from tools.run_report.palette import BLUE, GREEN, INK, ORANGE, PURPLE, SKY, VERMILLION

SERIAL, NGRAM = "serial", "ngram"
_COLOURS = {
    OFF: INK,
    FROZEN: BLUE,
    TLT: ORANGE,
    COLD: SKY,
    SERIAL: GREEN,
    NGRAM: PURPLE,
    OWN: VERMILLION,
}
_LEARNED, _ANY, _KL = "drafter/live_accept_length", "rollout/spec_accept_length", "actor/kl_loss"
_SERIAL_PROMPTS = 64  # a serial training gets their responses; a run would reuse its own


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this benchmark."""
    add("--config", default="examples/quickstart.yaml")
    add("--drafter", default="build/tiny_drafter", type=made, help="warmed up")
    add("--task", choices=("drift", "quickstart"), default="drift")
    add("--variants", nargs="+", choices=[*_COLOURS], default=[*_COLOURS][:-1])
    add("--steps", type=int, default=300)
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--serial-every", type=int, default=25, help="RL steps between two trainings of `serial`")
    add("--serial-updates", type=int, default=100, help="optimizer steps of one of them")
    add("--block", type=int, default=10, help="RL steps of a row and of a point")
    add("--turn", type=int, default=1000, help="RL steps after which the next variant goes on")
    add("--ranks", type=int, default=2)
    add("--folder", type=Path, default=Path("build/drift"))
    add("overrides", nargs="*", metavar="section.key=value")


def run(options: argparse.Namespace) -> dict[str, object]:
    """Run what is missing, print a table for each seed, draw the figure. Return the JSON."""
    found = {}
    for index, seed in enumerate(options.seeds):
        shared = [f"run.seed={seed}", "eval.num_prompts=8", "eval.num_samples=1"]
        shared += ["logging.rollouts=true", "speculation.measure_gain=false"]
        if options.task == "drift":  # the reference is measured, and its weight is nothing
            shared += ["algorithm.kl_coef=1.0e-12"]
        folder = options.folder / options.task / str(seed)
        with launching(options, *shared, root=folder) as launch:
            order = turned(options.variants, index)
            serial_s: dict[int, float] = {}
            runs = [_run(launch, name, options, folder, serial_s) for name in order]
            for _ in itertools.zip_longest(*runs):
                pass  # each variant goes on by a turn
        ran = {name: read_run(folder / name) for name in order}
        for end, seconds in serial_s.items():
            ran[SERIAL][end].metrics[STEP_SECONDS] += seconds
        found[seed] = summarize({name: ran[name] for name in options.variants}, options.block)
        _print(seed, found[seed])
    _print_over_seeds([*found.values()], options.variants)
    figure = options.folder / f"{options.task}.html"
    figure.write_text(draw(found), encoding="utf-8")
    print(figure)
    return {"task": options.task, "steps": options.steps, "block": options.block, "seeds": found}


def _run(
    launch: Launch,
    name: str,
    options: argparse.Namespace,
    folder: Path,
    serial_s: dict[int, float],
) -> Iterator[int]:
    """Run a variant to its last step, with the rewards of its task. Yield the last step of each
    turn. `serial_s` gets the seconds of serial trainings, by the step after which they ran.
    """
    settings = variant_overrides(options.drafter).get(name)
    if name == OWN:
        settings = variant_overrides(OWN)[TLT]
    if name == NGRAM:
        settings = ("speculation.enabled=true", 'speculation.strategies=["ngram_8"]')
        settings += ("spot.enabled=false",)
    middle = options.steps // 2 if options.task == "drift" else 0
    ends = {middle, *range(options.turn, options.steps, options.turn), options.steps} - {0}
    if settings is None:  # serial
        ends |= {*range(options.serial_every, options.steps, options.serial_every)}
    drafter, done = options.drafter, folder / name
    saved = done / "checkpoints" / "latest_checkpointed_iteration.txt"
    reached = int(saved.read_text(encoding="utf-8")) if saved.is_file() else 0
    for end in sorted(ends):
        rewards = () if not middle else (f"reward.function=tools/bench/drift_rewards.py:{_reward(end <= middle)}",)  # fmt: skip
        of_drafter = settings or (*variant_overrides(drafter)[FROZEN],)
        if end > reached:
            launch(name, end, *of_drafter, *rewards)
        if settings is None and end % options.serial_every == 0 and end < options.steps:
            trained = folder / f"serial_drafter_{end}"
            if end > reached:
                _train(done / "hf", drafter, trained, options)
            measured = json.loads((trained / "warm_up.json").read_text(encoding="utf-8"))
            drafter, serial_s[end] = str(trained), measured[-1]["training_s"]
        yield end


def _reward(is_first: bool) -> str:
    return "terse" if is_first else "wordy"


def _train(model: Path, start: str, out: Path, options: argparse.Namespace) -> None:
    command = [sys.executable, "-m", "tlt_megatron.cli", "train-drafter", "--model", str(model)]
    command += ["--start", start, "--out", str(out), "--steps", str(options.serial_updates)]
    command += ["--num-prompts", str(_SERIAL_PROMPTS), "--num-eval-prompts", "8"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def summarize(runs: Mapping[str, Run], block: int) -> dict[str, Any]:
    """Return means over blocks of steps by variant, the KL of the policy, and equal steps. They are
    of the steps that every variant has reached.
    """
    first = next(iter(runs.values()))
    steps = [step for step in first if all(step in run for run in runs.values())]
    blocks = [steps[i : i + block] for i in range(0, len(steps), block)]

    def means(run: Run, *names: str) -> list[float]:
        """The first of these metrics that a step has; nan for a block without any."""
        rows = ([run[step].metrics for step in steps] for steps in blocks)
        values = ([next((m[n] for n in names if n in m), math.nan) for m in row] for row in rows)
        known = ([x for x in row if not math.isnan(x)] for row in values)
        return [fmean(row) if row else math.nan for row in known]

    return {
        "last_steps": [steps[-1] for steps in blocks],
        "kl": means(first, _KL),
        "accept_length": {name: means(run, _LEARNED, _ANY) for name, run in runs.items()},
        "rollout_s": {name: means(run, ROLLOUT_SECONDS) for name, run in runs.items()},
        "step_s": {name: means(run, STEP_SECONDS) for name, run in runs.items()},
        "equal": {name: num_same_steps(first, run, steps) for name, run in runs.items()},
    }


def _print(seed: int, found: Mapping[str, Any]) -> None:
    names = [*found["accept_length"]]
    columns = ["to step", "KL", *names, *(f"{name} s/step" for name in names)]
    by_block = [found["last_steps"], found["kl"]]
    by_block += [found[kind][name] for kind in ("accept_length", "step_s") for name in names]
    print_table(f"accept length, seed {seed}", columns, [*zip(*by_block, strict=True)])
    print("steps with equal tokens:", found["equal"])


def _print_over_seeds(found: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Print accept lengths, and the seconds of the first variant over those of each other one."""

    def means(kind: str, name: str, num_blocks: int | None) -> list[float]:
        return [fmean(each[kind][name][:num_blocks]) for each in found]

    base, *others = names
    rows = []
    for name, (blocks, count) in itertools.product(others, (("first", 1), ("all", None))):
        lengths = spread(means("accept_length", name, count))
        speeds = [
            ratios(means(k, base, count), means(k, name, count)) for k in ("rollout_s", "step_s")
        ]
        rows.append([name, blocks, *map(told, (lengths, *speeds))])
    columns = ["variant", "blocks", "accept length", "rollout speed-up", "step speed-up"]
    title = f"over {base}, median (min-max) of {len(found)} seeds"
    print_table(title, columns, rows, num_names=2)


def draw(found: Mapping[int, Mapping[str, Any]]) -> str:
    """Return a page: the accept length of each variant and seed over RL steps and over the KL."""
    panels = []
    for axis, label in (("last_steps", "RL step"), ("kl", "KL from the start")):
        curves = [
            make_curve(f"{name}, seed {seed}", _COLOURS[name], _known(of_seed[axis], values))
            for seed, of_seed in found.items()
            for name, values in of_seed["accept_length"].items()
        ]
        layout = make_layout(label, "accept length")
        panels.append(Panel(title=f"Over the {label}", key=axis, data=curves, layout=layout))
    return render_panels("drift", panels)


def _known(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the points, by x, without those that are not known."""
    points = sorted(p for p in zip(x, y, strict=True) if not math.isnan(sum(p)))
    return [x for x, _ in points], [y for _, y in points]
