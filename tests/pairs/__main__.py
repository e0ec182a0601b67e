"""`python -m tests.pairs`: every two features in one run, and the table of docs/reliability.md."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import contextlib
import io
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import tests.mcore_policy  # noqa: F401  # imports Megatron once, before ranks are forked
from tests.pairs.features import EXCLUSIVE, all_pairs, check, make_tasks
from tests.tiny_task import FEATURES


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 if every pair equals its references or is refused by name, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="tests.pairs", description=__doc__)
    names = ", ".join(FEATURES)
    parser.add_argument("--only", default="", help=f"pairs of this feature alone: {names}")
    parser.add_argument("--json", type=Path, default=Path("build/pairs.json"))
    options = parser.parse_args(arguments)
    pairs = [pair for pair in all_pairs() if not options.only or options.only in pair]
    root = Path(tempfile.mkdtemp(prefix="pairs-"))
    tasks = make_tasks(root / "tasks")
    results: dict[tuple[str, str], str] = dict.fromkeys(EXCLUSIVE, "two values of one setting")
    failed = 0
    for number, pair in enumerate(pairs):
        started, folder = time.monotonic(), root / f"{number:02d}"
        with contextlib.redirect_stdout(io.StringIO()):  # the progress of the runs
            line, differing = check(pair, tasks, folder)
        results[pair] = "differs" if differing else f"refused: `{line}`" if line else "equal"
        print(f"{number + 1}/{len(pairs)} {' + '.join(pair)}: {results[pair]}", end=" ")
        print(f"({time.monotonic() - started:.1f} s)", *differing, sep="\n", flush=True)
        failed += bool(differing)
        if not differing:
            shutil.rmtree(folder, ignore_errors=True)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    found = [[*pair, result] for pair, result in results.items()]
    options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print("\n".join(table(results)))
    print(f"{len(pairs)} pairs, {failed} of them neither equal nor refused; {options.json}")
    if failed:
        print(f"run folders: {root}")
    else:
        shutil.rmtree(root, ignore_errors=True)
    return 1 if failed else 0


def table(results: dict[tuple[str, str], str]) -> list[str]:
    """Return the lines of the table: each pair once, at the first of the two, by result."""
    lines = ["| feature | equal | otherwise |", "|---|---|---|"]
    for number, name in enumerate(FEATURES):
        equal, other = [], []
        for later in list(FEATURES)[number + 1 :]:
            result = results.get((name, later), "")
            if result == "equal":
                equal.append(later)
            elif result:
                other.append(f"{later}: {result}")
        if equal or other:
            lines.append(f"| {name} | {', '.join(equal)} | {'. '.join(other)} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
