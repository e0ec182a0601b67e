"""Measures what TLT gains in an RL step, and counts the steps in which it drew the same tokens.

    python -m tools.bench step

Variants: `off` (no speculation), `frozen` (a warmed-up drafter without training), `tlt` (the same
drafter, trained on idle ranks), `cold_start` (tlt from random weights).

Training runs cannot alternate step by step in one process, so they alternate in rounds. In each
round every variant continues from its checkpoint for a few steps. The order rotates, and the first
step of a round is not timed. Speculation changes no token, so step k of two variants does the same
work.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tlt_megatron.types import RolloutKey
from tools.bench.measure import made, spread, told
from tools.commands.compare_runs import STEP_SECONDS, Run, read_run
from tools.print_tables import print_table
from tools.tiny_models.expand_layers import expand_policy

ROOT = Path(__file__).resolve().parents[2]
OFF, FROZEN, TLT, COLD = "off", "frozen", "tlt", "cold_start"
ROLLOUT_SECONDS = "timing_s/gen"
_ACCEPT_LENGTH = "drafter/live_accept_length"
_NUM_LONG = 0.1  # share of the prompts that are called long
Launch = Callable[..., Path]


def variant_overrides(drafter: str) -> dict[str, tuple[str, ...]]:
    """Return settings by variant. All others are compared with the first, `off`."""
    warm = ("speculation.enabled=true", f"speculation.drafter={drafter}")
    return {
        OFF: ("speculation.enabled=false", "spot.enabled=false"),
        FROZEN: (*warm, "spot.enabled=false"),
        TLT: (*warm, "spot.enabled=true"),
        COLD: ("speculation.enabled=true", "speculation.drafter=", "spot.enabled=true"),
    }


def turned(names: Sequence[str], round_index: int) -> list[str]:
    """Return the order of a round: each variant is first, second, ... equally often."""
    start = round_index % len(names)
    return [*names[start:], *names[:start]]


@contextmanager
def launching(
    options: argparse.Namespace, *shared: str, root: Path | None = None
) -> Iterator[Launch]:
    """Yield a function that runs the trainer in a folder of its own, below `root` or a temporary
    one.

    It takes the name of a run, the step at which to end, and settings. A run continues from its
    checkpoint if it has one. All runs have the settings `shared`, which the options override. The
    function returns the folder of the run; RuntimeError if the run fails.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:

        def launch(name: str, num_steps: int, *settings: str) -> Path:
            folder = (root or Path(temporary)).absolute() / name
            folder.mkdir(parents=True, exist_ok=True)
            command = [
                *(sys.executable, "launch/torchrun.py", "--standalone"),
                *("--nproc-per-node", str(options.ranks), "launch/pretrain_rl.py"),
                *("--config", options.config, f"run.dir={folder}", f"run.num_steps={num_steps}"),
                *("checkpoint.resume=auto", *shared, *options.overrides, *settings),
            ]
            said = folder / "output.log"
            started = time.perf_counter()
            with said.open("a", encoding="utf-8") as output:
                done = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
            if done.returncode:
                quoted = "\n".join(said.read_text(encoding="utf-8").splitlines()[-30:])
                raise RuntimeError(f"run {name} ended with {done.returncode}:\n{quoted}")
            seconds, load = time.perf_counter() - started, os.getloadavg()[0]
            print(f"{name}: at step {num_steps}, {seconds:.0f} s, load {load:.1f}", flush=True)
            return folder

        yield launch


def bench_speed(launch: Launch, options: argparse.Namespace) -> dict[str, object]:
    """Run rounds of all variants over the same steps."""
    variants = variant_overrides(options.drafter)
    runs: dict[str, Run] = {}
    for round_index in range(options.rounds):
        for name in turned(list(variants), round_index):
            num_steps = (round_index + 1) * options.steps
            runs[name] = read_run(launch(f"speed/{name}", num_steps, *variants[name]))
    num_steps = options.rounds * options.steps
    timed, later = timed_steps(num_steps, options.steps), range(2, num_steps + 1)
    base = runs[OFF]
    found = {
        name: {
            "step_speedup": speedups(base, run, timed),
            "rollout_speedup": speedups(base, run, timed, ROLLOUT_SECONDS),
            "phases_s": phase_seconds(run, timed),
            "steps_with_equal_tokens": num_same_steps(base, run, later),
            "idle": idle_figures(run, later),
            "accept_length_by_step": [r.metrics.get(_ACCEPT_LENGTH) for r in run.values()],
        }
        for name, run in runs.items()
    }
    share = _sum(base, timed, ROLLOUT_SECONDS) / _sum(base, timed, STEP_SECONDS)
    print_speed(found, f"median (min-max), {len(timed)} timed steps")
    print(
        f"equal tokens: out of {len(later)} steps; without speculation rollouts take {share:.0%} of a step"
    )
    return {"variants": found, "rollout_share": share, "num_timed_steps": len(timed)}


def print_speed(found: Mapping[str, Mapping[str, Any]], measure: str) -> None:
    """Print seconds and speed-ups by variant, the use of idle time, and accept lengths by step."""
    columns = ("variant", "rollout s", "update s", "step s", "step speed-up", "all steps")
    columns += ("rollout speed-up", "all rollouts", "equal tokens")
    rows = []
    for name, each in found.items():
        step, rollout = each["step_speedup"], each["rollout_speedup"]
        seconds = (each["phases_s"].get(phase) for phase in ("gen", "update_actor", "step"))
        speeds = (told(step), step["total"], told(rollout), rollout["total"])
        rows.append([name, *seconds, *speeds, each["steps_with_equal_tokens"]])
    print_table(f"speed-ups over off, {measure}", columns, rows)
    rows = []
    for name, idle in ((name, found[name]["idle"]) for name in (TLT, COLD)):
        shares = (f"{idle['idle_used_fraction']:.0%}", f"{idle['stall_fraction']:.2%}")
        rows.append(
            [name, idle["idle_s"], *shares, told(idle["preempt_ms"]), idle["updates_per_step"]]
        )
    columns = ("variant", "idle rank-s", "used", "stall", "stop takes ms", "updates/step")
    print_table("spot training, from the second step on", columns, rows)
    drafting = (FROZEN, TLT, COLD)
    print_by_step("accept length", {n: found[n]["accept_length_by_step"] for n in drafting})


def print_by_step(title: str, columns: Mapping[str, Sequence[float | None]]) -> None:
    """Print values by RL step; "-" for a step without one, such as an accept length if nothing was
    drafted.
    """
    rows = ([str(step), *row] for step, row in enumerate(zip(*columns.values(), strict=True), 1))
    print_table(title, ("step", *columns), rows)


# ---- measures of runs


def timed_steps(num_steps: int, steps_per_round: int) -> list[int]:
    """Return all steps except the first of each round, which warms its process up."""
    return [step for step in range(1, num_steps + 1) if (step - 1) % steps_per_round > 0]


def speedups(
    base: Run, other: Run, steps: Sequence[int], metric: str = STEP_SECONDS
) -> dict[str, float]:
    """Return the spread over steps of base / other seconds, and `total`, the ratio of the sums."""
    pairs = [(base[step].metrics[metric], other[step].metrics[metric]) for step in steps]
    total = sum(slow for slow, _ in pairs) / sum(fast for _, fast in pairs)
    return spread([slow / fast for slow, fast in pairs]) | {"total": total}


def phase_seconds(run: Run, steps: Sequence[int]) -> dict[str, float]:
    """Return mean seconds of a step by phase, largest over ranks.

    Phases that a run lacks are left out.
    """
    names = {name for step in steps for name in run[step].metrics if name.startswith("timing_s/")}
    means = {name: _sum(run, steps, name) / len(steps) for name in sorted(names)}
    return {name.removeprefix("timing_s/"): mean for name, mean in means.items()}


def idle_figures(run: Run, steps: Sequence[int]) -> dict[str, Any]:
    """Return idle rank-seconds, the share that the drafter used, and what the RL step paid for
    it.
    """
    idle_s, used_s = _sum(run, steps, "bubble/idle_s"), _sum(run, steps, "bubble/used_s")
    preempt_ms = [run[step].metrics.get("spot/preempt_ms", 0.0) for step in steps]
    preempted = [value for value in preempt_ms if value > 0]  # steps that ended in a session
    return {
        "idle_s": idle_s,
        "idle_used_fraction": used_s / idle_s if idle_s else math.nan,
        "stall_fraction": _sum(run, steps, "bubble/stall_s") / _sum(run, steps, STEP_SECONDS),
        "preempt_ms": spread(preempted or [math.nan]),
        "updates_per_step": _sum(run, steps, "spot/updates") / len(steps),
    }


def num_same_steps(one: Run, other: Run, steps: Sequence[int]) -> int:
    """Return the number of steps in which both runs drew the same tokens."""
    return sum(_tokens(one, step) == _tokens(other, step) for step in steps)


def _tokens(run: Run, step: int) -> dict[RolloutKey, tuple[int, ...]]:
    return {key: token_ids for key, (token_ids, _) in run[step].responses.items()}


def _sum(run: Run, steps: Sequence[int], metric: str) -> float:
    return sum(run[step].metrics.get(metric, 0.0) for step in steps)


# ---- the entry


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this benchmark."""
    add("--config", default="examples/bench_step.yaml")
    add("--drafter", default="build/tiny_drafter", type=made, help="warmed up")
    add("--ranks", type=int, default=2)
    add("--rounds", type=int, default=4)
    add("--steps", type=int, default=6, help="of a round; the first is not timed")
    add("--extra-layers", type=int, default=20, help="of a policy made here")
    add("--seed", type=int, default=0)
    add("overrides", nargs="*", metavar="section.key=value")


def run(options: argparse.Namespace) -> dict[str, object]:
    """Make what is missing, run the rounds and print the tables. Return the values of the JSON."""
    if options.steps < 2:
        raise SystemExit(f"--steps {options.steps}: must be >= 2")
    with (
        tempfile.TemporaryDirectory() as folder,
        launching(options, *_prepare(options, Path(folder))) as launch,
    ):
        return {"ranks": options.ranks, **bench_speed(launch, options)}


def _prepare(options: argparse.Namespace, folder: Path) -> list[str]:
    """Make the deep policy, and the order of its prompts in `folder`; return their settings."""
    settings = yaml.safe_load(Path(options.config).read_text(encoding="utf-8"))
    policy = Path(settings["model"]["path"])
    if not (ROOT / policy).is_dir():
        expand_policy(ROOT / "build/tiny_policy", options.extra_layers, ROOT / policy)
    lines = (ROOT / settings["data"]["train"]).read_text(encoding="utf-8").splitlines()
    rows = sorted(map(json.loads, lines), key=lambda row: row["metadata"]["right_tokens"])
    ordered = with_a_tail(rows, settings["rollout"]["num_prompts"], options.seed)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in ordered), encoding="utf-8")
    return [f"data.train={prompts}", "data.shuffle=false", f"run.seed={options.seed}"]


def with_a_tail(by_length: Sequence[Any], num_prompts: int, seed: int) -> list[Any]:
    """Order prompts, given by length, so that every `num_prompts` of them hold one of the longest.

    A step of a few prompts then has the tail that a step of hundreds always has. Prompts that do
    not fill a step are left out.
    """
    shuffle = random.Random(seed)
    num_tail = max(1, round(_NUM_LONG * len(by_length)))
    body, tail = [*by_length[:-num_tail]], [*by_length[-num_tail:]]
    shuffle.shuffle(body)
    shuffle.shuffle(tail)
    ordered = []
    num_body = num_prompts - 1
    for number in range(min(len(tail), len(body) // num_body)):
        step = [tail[number], *body[number * num_body : (number + 1) * num_body]]
        shuffle.shuffle(step)
        ordered += step
    return ordered
