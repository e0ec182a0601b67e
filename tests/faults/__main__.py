"""`python -m tests.faults --schedules 500`: faults against real runs, two at a time, and the table of what held.

Everything is imported here once; each schedule is a forked process, and forks the ranks of its run in turn.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tests.faults.case import Case, Verdict, judge
from tests.faults.catalogue import FAULTS, draw
from tests.faults.lab import Lab
from tests.faults.processes import adopt_orphans, descendants, kill_all
from tests.faults.table import as_text, summarize

_SCHEDULE_LIMIT_S = 1200.0  # whatever a schedule waits for, it has given up on by then


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 if every schedule held, 1 otherwise."""
    options = _parse(arguments)
    schedules = draw(options.schedules, options.seed, options.fault)
    root = Path(tempfile.mkdtemp(prefix="faults-", dir=options.folder))
    adopt_orphans()
    _import_once()
    lab = Lab(root / "lab")
    started = time.monotonic()
    verdicts = _run_all(schedules, lab, root, options)
    seconds = time.monotonic() - started
    for verdict in verdicts:
        if not verdict.is_good or options.verbose:
            print(_describe(verdict), flush=True)
    rows = summarize(verdicts)
    report = {
        "seed": options.seed,
        "seconds": seconds,
        "table": rows,
        "schedules": [dataclasses.asdict(verdict) for verdict in verdicts],
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(as_text(rows))
    print(f"{len(verdicts)} of {len(schedules)} schedules in {seconds:.0f} s; {options.json}")
    is_good = len(verdicts) == len(schedules) and all(v.is_good for v in verdicts)
    if is_good and not options.keep:
        shutil.rmtree(root, ignore_errors=True)
    else:
        print(f"run folders: {root}")
    return 0 if is_good else 1


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.faults", description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="schedules at a time")
    parser.add_argument("--fault", action="append", choices=sorted(FAULTS), help="only this one")
    parser.add_argument("--number", type=int, help="only the schedule with this seed of its own")
    parser.add_argument("--limit-s", type=float, default=3000.0, help="start none after this")
    parser.add_argument("--json", type=Path, default=Path("build/faults.json"))
    parser.add_argument("--folder", type=Path, help="for run folders; default: a temporary one")
    parser.add_argument("--keep", action="store_true", help="keep the run folders")
    parser.add_argument("--verbose", action="store_true")
    return parser.parse_args(arguments)


def _import_once() -> None:
    import torch

    import tlt_megatron.trainer.build
    import tlt_megatron.trainer.finish  # noqa: F401

    torch.set_num_threads(1)


def _run_all(
    schedules: list[tuple[str, int]], lab: Lab, root: Path, options: argparse.Namespace
) -> list[Verdict]:
    if options.number is not None:
        schedules = [s for s in schedules if s[1] == options.number]
    waiting = list(enumerate(schedules))[::-1]
    running: dict[int, tuple[int, float]] = {}
    verdicts: dict[int, Verdict] = {}
    deadline = time.monotonic() + options.limit_s
    while running or (waiting and time.monotonic() < deadline):
        while waiting and len(running) < options.jobs and time.monotonic() < deadline:
            index, (fault, seed) = waiting.pop()
            running[_start(fault, seed, lab, root / f"{index:04d}")] = (index, time.monotonic())
        pid, _ = os.waitpid(-1, os.WNOHANG)
        for supervisor, (index, since) in list(running.items()):
            if pid != supervisor and time.monotonic() - since < _SCHEDULE_LIMIT_S:
                continue
            if pid != supervisor:
                kill_all([*descendants(supervisor), supervisor])
            del running[supervisor]
            fault, seed = schedules[index]
            verdicts[index] = _read(root / f"{index:04d}", fault, seed)
            if verdicts[index].is_good and not options.keep:
                shutil.rmtree(root / f"{index:04d}", ignore_errors=True)
            _tell(verdicts[index], len(verdicts), len(schedules))
        if not pid:
            time.sleep(0.02)
    return [verdicts[index] for index in sorted(verdicts)]


def _start(fault: str, seed: int, lab: Lab, folder: Path) -> int:
    """Fork the process of one schedule; its pid."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        folder.mkdir()
        verdict = judge(FAULTS[fault].run, Case(fault, seed, lab, folder))
        (folder / "verdict.part").write_text(json.dumps(dataclasses.asdict(verdict)))
        (folder / "verdict.part").rename(folder / "verdict.json")
    except BaseException:
        traceback.print_exc()
    os._exit(0)


def _read(folder: Path, fault: str, seed: int) -> Verdict:
    path = folder / "verdict.json"
    if path.is_file():
        return Verdict(**json.loads(path.read_text()))
    return Verdict(fault=fault, seed=seed, door="?", broken="the schedule's process died")


def _tell(verdict: Verdict, number: int, count: int) -> None:
    result = "missed" if verdict.missed else "ok" if verdict.is_good else "FAILED"
    print(
        f"{number}/{count} {verdict.fault} #{verdict.seed}: {result} "
        f"({verdict.seconds:.1f} s, {verdict.cpu_seconds:.1f} s of CPU)",
        flush=True,
    )


def _describe(verdict: Verdict) -> str:
    lines = [f"=== {verdict.fault} #{verdict.seed} ({verdict.door}): {verdict.where}"]
    for name in ("hang", "missed", "broken"):
        if getattr(verdict, name):
            lines.append(f"  {name}: {getattr(verdict, name)}")
    for name in ("lost", "orphans", "unclear"):
        lines += [f"  {name}: {text}" for text in getattr(verdict, name)]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
