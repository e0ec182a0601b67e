"""Measures what TLT gains in an RL step, and checks that it changes nothing else: the same run and seeds, four variants.

    python -m tools.bench step                       # speed, exactness
    python -m tools.bench step --parts drift         # a policy that changes fast
    python -m tools.bench step --quick               # all of it small

Variants: `off` (no speculation), `frozen` (a warmed-up drafter without training), `tlt` (the same drafter, trained on idle
ranks), `cold_start` (tlt from random weights).

- Speed: training runs cannot alternate step by step in one process, so they alternate in rounds. In each round every variant
  continues from its checkpoint for a few steps. The order rotates, and the first step of a round is not timed. Step k of one
  variant is compared with step k of another.
- Exactness: all tokens and rewards of a shorter run with float64 rollouts are compared.
- Drift: a large learning rate and one fixed strategy, so that accept lengths show the quality of the drafter.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from tools.bench.measure import made
from tools.bench.step_measures import (
    HOLDOUT_ACCEPT_LENGTH,
    LIVE_ACCEPT_LENGTH,
    REWARD,
    ROLLOUT_SECONDS,
    Run,
    first_step_at,
    idle_figures,
    is_identical,
    num_same_steps,
    phase_seconds,
    read_run,
    rollout_share,
    series,
    speedups,
    timed_steps,
    with_a_tail,
)
from tools.bench.step_tables import (
    print_by_step,
    print_idle,
    print_phases,
    print_speedups,
)
from tools.expand_layers import expand_policy

ROOT = Path(__file__).resolve().parents[2]
OFF, FROZEN, TLT, COLD = "off", "frozen", "tlt", "cold_start"
QUICK = {"rounds": 1, "steps": 4, "exact_steps": 1, "drift_steps": 4}
RECOVERED_SHARE = 0.9  # of the warmed-up drafter's accept length


def variant_overrides(drafter: str) -> dict[str, tuple[str, ...]]:
    """Return settings by variant. The first is off, which all others are compared with."""
    speculate = ("speculation.enabled=true",)
    warm = (*speculate, f"speculation.drafter={drafter}")
    return {
        OFF: ("speculation.enabled=false", "spot.enabled=false"),
        FROZEN: (*warm, "spot.enabled=false"),
        TLT: (*warm, "spot.enabled=true"),
        COLD: (*speculate, "speculation.drafter=", "spot.enabled=true"),
    }


def turned(names: Sequence[str], round_index: int) -> list[str]:
    """Return the order of a round: each variant is first, second, ... equally often."""
    start = round_index % len(names)
    return [*names[start:], *names[:start]]


def own_words(output: str, num_lines: int = 30) -> str:
    """Return the end of the ranks' own output of a failed run, without torchrun's report."""
    lines = output.splitlines()
    ends = (i for i, line in enumerate(lines) if "torch/distributed/elastic" in line)
    return "\n".join(lines[: next(ends, len(lines))][-num_lines:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """Runs the trainer in folders below `root`, with settings that all runs share."""

    root: Path
    config: str
    ranks: int
    overrides: Sequence[str]
    console: Console

    def run(self, name: str, num_steps: int, *overrides: str) -> Run:
        """Run `name` up to step `num_steps`, from its checkpoint if it has one. RuntimeError if it fails."""
        folder = self.root / name
        folder.mkdir(parents=True, exist_ok=True)
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(self.ranks), "launch/pretrain_rl.py"),
            *("--config", self.config, f"run.dir={folder}", f"run.num_steps={num_steps}"),
            *("checkpoint.resume=auto", *self.overrides, *overrides),
        ]
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = os.environ | {"PYTHONPATH": path}
        said = folder / "output.log"
        started = time.perf_counter()
        with said.open("a", encoding="utf-8") as output:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
            )
        if done.returncode:
            quoted = own_words(said.read_text(encoding="utf-8"))
            raise RuntimeError(f"run {name} ended with {done.returncode}:\n{quoted}")
        seconds, load = time.perf_counter() - started, os.getloadavg()[0]
        self.console.print(f"{name}: at step {num_steps}, {seconds:.0f} s, load {load:.1f}")
        return read_run(folder)

    def run_variants(
        self, part: str, num_steps: int, variants: Mapping[str, Sequence[str]], *shared: str
    ) -> dict[str, Run]:
        """Run `variants`, each with its own and the `shared` settings."""
        return {
            name: self.run(f"{part}{name}", num_steps, *shared, *overrides)
            for name, overrides in variants.items()
        }


# ---- parts: each runs, prints, and returns its keys of the result


def bench_speed(launcher: Launcher, options: argparse.Namespace) -> dict[str, object]:
    """Run rounds of all variants over the same steps."""
    variants = variant_overrides(options.drafter)
    runs: dict[str, Run] = {}
    for round_index in range(options.rounds):
        for name in turned(list(variants), round_index):
            num_steps = (round_index + 1) * options.steps
            runs[name] = launcher.run(f"speed/{name}", num_steps, *variants[name])
    console = launcher.console
    num_steps = options.rounds * options.steps
    timed = timed_steps(num_steps, options.steps)
    later = range(2, num_steps + 1)  # the first step has no data of a step before it
    base = runs[OFF]
    accepted = {name: series(run, LIVE_ACCEPT_LENGTH) for name, run in runs.items() if name != OFF}
    same = {name: num_same_steps(base, run, later) for name, run in runs.items()}
    idle = {name: idle_figures(runs[name], later) for name in (TLT, COLD)}
    settings = launcher.root / "speed" / TLT / "config.yaml"
    result: dict[str, Any] = {
        "step_speedup": {name: speedups(base, run, timed) for name, run in runs.items()},
        "rollout_speedup": {
            name: speedups(base, run, timed, ROLLOUT_SECONDS) for name, run in runs.items()
        },
        "rollout_share": rollout_share(base, timed),
        "phases_s": {name: phase_seconds(runs[name], timed) for name in variants},
        "steps_with_equal_tokens": {"of": len(later), **same},
        **{key: idle[TLT][key] for key in ("stall_fraction", "idle_used_fraction", "preempt_ms")},
        "idle": idle,
        "accept_length_by_step": accepted,
        "holdout_accept_length_by_step": {
            name: series(runs[name], HOLDOUT_ACCEPT_LENGTH) for name in (TLT, COLD)
        },
        "cold_start_recovered_at_step": first_step_at(
            accepted[COLD], accepted[TLT], RECOVERED_SHARE
        ),
        "num_steps": num_steps,
        "num_timed_steps": len(timed),
        "config": yaml.safe_load(settings.read_text(encoding="utf-8")),
    }
    print_phases(console, result["phases_s"], result["rollout_share"], num_timed=len(timed))
    print_speedups(console, result)
    print_idle(console, idle)
    print_by_step(console, "accept length", accepted)
    recovered = result["cold_start_recovered_at_step"]
    console.print(
        f"cold start: {RECOVERED_SHARE:.0%} of the warmed-up accept length at step {recovered}"
    )
    return result


def bench_exact(launcher: Launcher, options: argparse.Namespace) -> dict[str, object]:
    """Run all variants with float64 rollouts, and compare every token and every reward."""
    runs = launcher.run_variants(
        "exact/",
        options.exact_steps,
        variant_overrides(options.drafter),
        "rollout.dtype=float64",
        f"rollout.max_new_tokens={options.exact_tokens}",
    )
    identical = is_identical(runs.values())
    num_tokens = sum(record.num_tokens for record in runs[OFF].values())
    accepted = [v for v in series(runs[TLT], LIVE_ACCEPT_LENGTH) if v is not None]
    verdict = "identical" if identical else "NOT identical"
    launcher.console.print(
        f"float64: tokens and rewards of {len(runs)} variants are {verdict} "
        f"({options.exact_steps} steps, {num_tokens:,} tokens, accept length {max(accepted, default=1.0):.1f})"
    )
    return {"identical_tokens": identical, "identical_tokens_compared": num_tokens}


def bench_drift(launcher: Launcher, options: argparse.Namespace) -> dict[str, object]:
    """Compare a drafter that follows a fast-changing policy with one that does not, from the same weights."""
    variants = variant_overrides(options.drafter)
    runs = launcher.run_variants(
        "drift/",
        options.drift_steps,
        {name: variants[name] for name in (FROZEN, TLT)},
        f"optimizer.lr={options.drift_lr}",
        f"speculation.strategies=['{options.drift_strategy}']",
        "speculation.selector=fixed",
    )
    steps = range(1, options.drift_steps + 1)
    accepted = {name: series(run, LIVE_ACCEPT_LENGTH) for name, run in runs.items()}
    rewards = {name: series(run, REWARD) for name, run in runs.items()}
    columns = {f"accept length, {name}": values for name, values in accepted.items()}
    columns |= {f"reward, {name}": values for name, values in rewards.items()}
    moves = f"learning rate {options.drift_lr:g}, strategy {options.drift_strategy}"
    print_by_step(launcher.console, f"a policy that moves fast ({moves})", columns)
    return {
        "drift": {
            "accept_length_by_step": accepted,
            "rewards_by_step": rewards,
            "lr": options.drift_lr,
            "strategy": options.drift_strategy,
            "steps_with_equal_tokens": num_same_steps(runs[FROZEN], runs[TLT], steps),
        }
    }


PARTS: dict[str, Callable[[Launcher, argparse.Namespace], dict[str, object]]] = {
    "speed": bench_speed,
    "exact": bench_exact,
    "drift": bench_drift,
}


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this benchmark."""
    add("--config", default="examples/bench_step.yaml")
    add("--drafter", default="build/tiny_drafter", type=made, help="warmed up")
    add("--parts", nargs="+", choices=PARTS, default=["speed", "exact"])
    add("--ranks", type=int, default=2)
    add("--rounds", type=int, default=4, help="of speed")
    add("--steps", type=int, default=6, help="of a round; the first is not timed")
    add("--exact-steps", type=int, default=3)
    add("--exact-tokens", type=int, default=200, help="longest response")
    add("--drift-steps", type=int, default=20)
    add("--drift-lr", type=float, default=4e-4)
    add("--drift-strategy", default="6_1_6")
    add("--extra-layers", type=int, default=20, help="of a policy made here")
    add("--tail-share", type=float, default=0.1, help="of prompts called long")
    add("--seed", type=int, default=0)
    add("--keep", help="empty folder for the runs; default: a temporary one")
    add("overrides", nargs="*", metavar="section.key=value")


def run(options: argparse.Namespace, console: Console) -> dict[str, object]:
    """Make what is missing, run the parts and print their tables. Return the values of the JSON."""
    if options.steps < 2:
        raise SystemExit(f"--steps {options.steps}: must be >= 2")
    with tempfile.TemporaryDirectory(prefix="bench-step-") as temporary:
        root = Path(options.keep or temporary).resolve()
        if root.is_dir() and any(root.iterdir()):
            raise SystemExit(f"--keep {root}: must be empty, runs in it would be resumed")
        launcher = Launcher(
            root=root,
            config=options.config,
            ranks=options.ranks,
            overrides=prepare(options, root),
            console=console,
        )
        result: dict[str, object] = {"ranks": options.ranks}
        for name in options.parts:
            result |= PARTS[name](launcher, options)
    return result


def prepare(options: argparse.Namespace, root: Path) -> list[str]:
    """Make the deep policy and the order of its prompts; return the settings of all runs."""
    settings = yaml.safe_load(Path(options.config).read_text(encoding="utf-8"))
    policy = Path(settings["model"]["path"])
    if not (ROOT / policy).is_dir():
        expand_policy(ROOT / "build/tiny_policy", options.extra_layers, ROOT / policy)
    lines = (ROOT / settings["data"]["train"]).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    ordered = with_a_tail(
        rows,
        [row["metadata"]["right_tokens"] for row in rows],
        num_prompts=settings["rollout"]["num_prompts"],
        tail_share=options.tail_share,
        seed=options.seed,
    )
    prompts = root / "prompts.jsonl"
    root.mkdir(parents=True, exist_ok=True)
    prompts.write_text("".join(json.dumps(row) + "\n" for row in ordered), encoding="utf-8")
    order = (f"data.train={prompts}", "data.shuffle=false", f"run.seed={options.seed}")
    return [*order, *options.overrides]
