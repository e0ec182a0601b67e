"""`python -m tests.faults --schedules 500`: faults against real runs, two at a time, and the table
of what held.

Everything is imported here once; each schedule is a forked process, and forks launcher and ranks of
its run in turn.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as launch/pretrain_rl.py does before it imports torch
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import contextlib
import dataclasses
import functools
import importlib
import json
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from tests.faults.case import COLUMNS, Case, Verdict, judge
from tests.faults.catalogue import FAULTS, FAULTS_OF_ENVIRONMENTS, draw
from tests.faults.lab import ENVIRONMENTS, VARIANTS, Lab
from tests.faults.processes import adopt_orphans, end_with

# Of launcher and rank; those of Megatron are half of a rank's CPU time.
_LAZY_IMPORTS = """
launch.torchrun torch.distributed.run tlt_megatron.trainer.finish tlt_megatron.trainer.build_embedded
megatron.core.models.gpt.gpt_layer_specs megatron.core.optimizer.distrib_optimizer megatron.core.pipeline_parallel
megatron.core.dist_checkpointing.strategies.torch megatron.core.extensions.transformer_engine
"""


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 if every fault happened and every promise held, 1 otherwise."""
    options = _parse(arguments)
    faults = FAULTS_OF_ENVIRONMENTS if options.environments else FAULTS
    schedules = draw(options.schedules, options.seed, options.fault or list(faults))
    if options.number is not None:
        schedules = [schedule for schedule in schedules if schedule[1] == options.number]
    root = Path(tempfile.mkdtemp(prefix="faults-", dir=options.folder))
    adopt_orphans()
    _import_once()
    sys.stdout.flush()
    lab = Lab(root / "lab", ENVIRONMENTS if options.environments else VARIANTS)
    started = time.monotonic()
    verdicts = _run_all(schedules, lab, root, options)
    seconds = time.monotonic() - started
    table = summarize(verdicts)
    report = {"seed": options.seed, "seconds": seconds, "table": table}
    report["schedules"] = [dataclasses.asdict(verdict) for verdict in verdicts]
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for verdict in verdicts:
        if not verdict.is_good:
            print(json.dumps(dataclasses.asdict(verdict), indent=1).replace("\\n", "\n"))
    print("| " + " | ".join(table[0]) + " |", "|" + "---|" * len(table[0]), sep="\n")
    for row in table:
        print("| " + " | ".join(map(str, row.values())) + " |")
    print(f"{len(verdicts)} schedules in {seconds:.0f} s; {options.json}")
    is_good = all(verdict.is_good for verdict in verdicts)
    if is_good and not options.keep:
        shutil.rmtree(root, ignore_errors=True)
    else:
        print(f"run folders: {root}")
    return 0 if is_good else 1


def summarize(verdicts: Sequence[Verdict]) -> list[dict[str, str | int]]:
    """One row for each fault, and the total."""
    groups = {v.fault: [w for w in verdicts if w.fault == v.fault] for v in verdicts}
    groups = dict(sorted(groups.items())) | {"total": list(verdicts)}
    return [
        {"fault": name, "schedules": len(mine)}
        | {column: sum(bool(getattr(v, column)) for v in mine) for column in COLUMNS}
        for name, mine in groups.items()
    ]


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.faults", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--schedules", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="schedules at a time")
    parser.add_argument(
        "--fault",
        action="append",
        choices=sorted(FAULTS_OF_ENVIRONMENTS | FAULTS),
        help="only this one",
    )
    parser.add_argument(
        "--environments", action="store_true", help="in runs whose turns have an environment"
    )
    parser.add_argument("--number", type=int, help="only the schedule with this seed of its own")
    parser.add_argument("--json", type=Path, default=Path("build/faults.json"))
    parser.add_argument("--folder", type=Path, help="for run folders; default: a temporary one")
    parser.add_argument("--keep", action="store_true", help="keep the run folders")
    return parser.parse_args(arguments)


def _import_once() -> None:
    import torch

    from tlt_megatron.mcore import cpu

    torch.set_num_threads(1)
    cpu.install()
    with warnings.catch_warnings(action="ignore"):
        for name in _LAZY_IMPORTS.split():
            importlib.import_module(name)


def _run_all(
    schedules: list[tuple[str, int]], lab: Lab, root: Path, options: argparse.Namespace
) -> list[Verdict]:
    waiting = list(enumerate(schedules))[::-1]
    running: dict[int, int] = {}  # pid of the schedule's process -> index
    verdicts: dict[int, Verdict] = {}
    while running or waiting:
        if waiting and len(running) < options.jobs:
            index, (fault, seed) = waiting.pop()
            play = functools.partial(_play, fault, seed, lab, root / f"{index:04d}")
            running[os.fork() or end_with(play)] = index
            continue
        pid, _ = os.wait()  # everything that a schedule waits for has a limit
        if pid not in running:
            continue
        index = running.pop(pid)
        folder, (fault, seed) = root / f"{index:04d}", schedules[index]
        verdict = Verdict(fault=fault, seed=seed, broken="the schedule's process died")
        with contextlib.suppress(FileNotFoundError):
            verdict = Verdict(**json.loads((folder / "verdict.json").read_text()))
        verdicts[index] = verdict
        if verdict.is_good and not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
        result = "missed" if verdict.missed else "ok" if verdict.is_good else "FAILED"
        times = f"{verdict.seconds:.1f} s, {verdict.cpu_seconds:.1f} s of CPU"
        head = f"{len(verdicts)}/{len(schedules)} {fault} #{seed}"
        print(f"{head}: {result} ({times}) {verdict.where}", flush=True)
    return [verdicts[index] for index in sorted(verdicts)]


def _play(fault: str, seed: int, lab: Lab, folder: Path) -> None:
    os.setsid()
    folder.mkdir()
    verdict = judge((FAULTS_OF_ENVIRONMENTS | FAULTS)[fault][0], Case(fault, seed, lab, folder))
    (folder / "verdict.json").write_text(json.dumps(dataclasses.asdict(verdict)))


if __name__ == "__main__":
    sys.exit(main())
