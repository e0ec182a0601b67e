"""The first minutes on a GPU: what works, how fast, and why not. It installs nothing.

    python tools/gpu_check.py --first-day --out results    # the most valuable items, at most 560 s
    python tools/gpu_check.py --second-day --out results   # all others
    python tools/gpu_check.py --stage 2b 0.rates           # some, in this order
    python tools/gpu_check.py --device cpu --tiny  # shows that the items run, on a pretended GPU

Each item is a process of its own with a time limit. As it ends, a JSON line with its figures goes
to OUT/results.jsonl, and the end of its output to OUT/log.txt. Failures, crashes, hangs and missing
packages are rows; the next item runs. The last lines are a table, also in OUT/table.md. Exit code 1
if an item failed. docs/hardware.md says what each stage answers. This file imports the standard
library alone, so that it runs under any interpreter that has torch.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

REPO = Path(__file__).resolve().parent.parent
_SCRATCH = REPO / "build" / "gpu_check_scratch"  # outside --out, which may be copied back
_MARK = "TLT_GPU_CHECK_ITEM"  # names the item in the environment of all of its processes
# Seconds of the budget to start one more item. Times the limits, which are for GPUs, on a CPU.
_LEAST_S, _CPU_SLOWNESS = 5.0, 4
_LOG_CHARACTERS, _ROW_CHARACTERS, _MOST_ROWS = 20_000, 320, 56
_FAILURES = ("failed", "crashed", "hung", "interrupted")


class Item(NamedTuple):
    """One measurement or one file of tests."""

    stage: str
    name: str
    function: str  # module:function, called with a Machine and `argument`; yields figures
    limit_s: float
    argument: str = ""
    needs: tuple[str, ...] = ()  # packages

    @property
    def key(self) -> str:
        return f"{self.stage}.{self.name}"


def read_items() -> list[Item]:
    """Return the rows of tools/gpu/items.txt."""
    items = []
    for line in (REPO / "tools" / "gpu" / "items.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            stage, name, limit_s, function, argument, *needs = line.split()
            argument = "" if argument == "-" else argument
            function = f"tools.gpu.{function}"
            items.append(Item(stage, name, function, float(limit_s), argument, tuple(needs)))
    return items


ITEMS = read_items()
_FIRST_DAY_S = 560.0  # fits a lease of 15 minutes with its start, and a command of 10


def first_day() -> list[Item]:
    """Return the rows of tools/gpu/first_day.txt: items in order, with limits for a cold start."""
    by_key, items = {item.key: item for item in ITEMS}, []
    for line in (REPO / "tools" / "gpu" / "first_day.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            key, limit_s, _ = line.split()
            items.append(by_key[key]._replace(limit_s=float(limit_s)))
    return items


def choose(options: argparse.Namespace) -> list[Item]:
    """Return the items that are asked for, in the order in which they are named."""
    also = (text.rsplit(":", 1) for text in options.also)
    items = [*ITEMS, *(Item("also", f.split(":")[1], f, float(s)) for f, s in also)]
    if options.first_day:
        return first_day()
    if options.second_day:
        early = {item.key for item in first_day()}
        return [item for item in items if item.key not in early]
    words = options.stage or list(dict.fromkeys(item.stage for item in items))
    return [item for word in words for item in items if word in (item.stage, item.key)]


class Runner:
    """Runs items one after the other and keeps their rows."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._started = time.monotonic()
        self.out, self.scratch = Path(options.out).resolve(), Path(options.scratch).resolve()
        for folder in (self.out, self.scratch):
            folder.mkdir(parents=True, exist_ok=True)
        self.rows: list[dict[str, Any]] = []
        self.is_stopped = False
        self._record({"command": sys.argv, "python": sys.version, "time": time.ctime()})
        paths = [self._own_packages(), str(REPO), *self._wheels(options.wheels)]
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.getenv("PYTHONPATH")])]),
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "TRITON_CACHE_DIR": str(self.scratch / "triton"),
        }
        if options.device == "cpu":
            self._environment |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}

    def _record(self, line: Mapping[str, object]) -> None:
        with (self.out / "results.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _own_packages(self) -> str:
        """Return a folder of packages that lead to ours. Installed ones come before folders without
        __init__.py.
        """
        site = self.scratch / "site"
        for name in ("tests", "tools", "launch"):
            (site / name).mkdir(parents=True, exist_ok=True)
            (site / name / "__init__.py").write_text(f"__path__ = [{str(REPO / name)!r}]\n")
        return str(site)

    def _wheels(self, folder: str) -> list[str]:
        """Unpack the wheels in `folder`. Return the folders for PYTHONPATH."""
        paths = []
        for wheel in sorted(Path(folder).glob("*.whl")) if folder else []:
            target = self.scratch / "wheels" / wheel.stem
            row: dict[str, Any] = {"stage": "-", "item": wheel.name, "status": "ok", "seconds": 0.0}
            try:
                zipfile.ZipFile(wheel).extractall(target)
                paths.append(str(target))
            except (OSError, zipfile.BadZipFile) as error:
                row |= {"status": "failed", "error": f"{type(error).__name__}: {error}"}
            self._keep(row)
        return paths

    def _keep(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self._record(row)
        print(
            f"{row['stage']:>4} {row['item']:<26}{row['status']:<12}{row['seconds']:.1f}",
            flush=True,
        )

    def run(self, item: Item) -> None:
        """Run an item in a process of its own, and keep its row whatever happens to it."""
        options, row = self._options, {"stage": item.stage, "item": item.name}
        limit_s = item.limit_s * (_CPU_SLOWNESS if options.device == "cpu" else 1)
        if options.budget:
            left_s = options.budget - (time.monotonic() - self._started)
            if left_s < _LEAST_S:
                self._keep({**row, "status": "not started", "seconds": 0.0, "error": "budget"})
                return
            limit_s = min(limit_s, left_s)
        log, figures = self.scratch / "item.log", self.scratch / "figures.jsonl"
        figures.write_text("")
        mark = f"{os.getpid()}.{item.key}"
        given = {
            **item._asdict(),
            "limit_s": limit_s,
            "is_cpu": options.device == "cpu",
            "is_tiny": options.tiny,
            "scratch": str(self.scratch),
            "figures": str(figures),
        }
        started, code, status = time.monotonic(), None, ""
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "tools.gpu.one_item", json.dumps(given)],
                cwd=REPO,
                env=self._environment | {_MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                with _ended(mark):
                    code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                status = "hung"
            except KeyboardInterrupt:
                status, self.is_stopped = "interrupted", True
            with suppress(subprocess.TimeoutExpired):  # it may be stuck in the driver
                process.wait(5.0)
        row |= {"seconds": round(time.monotonic() - started, 1), **_outcome(figures, code)}
        if status:
            row |= {"status": status, "error": f"not ended after {row['seconds']:.0f} s"}
        with (self.out / "log.txt").open("a") as file:
            said = log.read_text(errors="replace")[-_LOG_CHARACTERS:]
            file.write(f"==== {item.key}: {row['status']}\n{said}\n")
        self._keep(row)

    def table(self) -> list[str]:
        """Return the table of all rows, in Markdown: at most 60 lines."""
        lines = ["| stage | item | status | s | figures |", "|---|---|---|---|---|"]
        for row in self.rows[:_MOST_ROWS]:
            figures = row.get("figures", {})
            text = f"{row.get('error', '')} {figures.get('summary') or _flat(figures)}".strip()
            cells = (row["stage"], row["item"], row["status"], f"{row['seconds']:.0f}", text)
            line = " | ".join(cell.replace("\n", " ").replace("|", "/") for cell in cells)
            lines.append(f"| {line}"[:_ROW_CHARACTERS] + " |")
        counts = Counter(row["status"] for row in self.rows).most_common()
        return [*lines, "", ", ".join(f"{count} {status}" for status, count in counts)]


@contextmanager
def _ended(mark: str) -> Iterator[None]:
    """Kill whatever the item has started and left, also processes with a session of their own, as
    torchrun's ranks are.
    """
    try:
        yield
    finally:
        wanted, deadline = f"{_MARK}={mark}\0".encode(), time.monotonic() + 10.0
        while time.monotonic() < deadline:
            is_any = False
            for folder in Path("/proc").glob("[0-9]*"):
                with suppress(OSError):  # ended meanwhile, or another user's
                    if wanted in (folder / "environ").read_bytes() + b"\0":
                        is_any = True
                        os.kill(int(folder.name), signal.SIGKILL)
            if not is_any:
                break
            time.sleep(0.05)  # a process that ends keeps its GPU memory until it is gone


def _outcome(path: Path, code: int | None) -> dict[str, Any]:
    """Return figures, status and error from what the item has written and its exit code."""
    figures: dict[str, Any] = {}
    end: dict[str, Any] = {"status": "crashed", "error": f"exit code {code}"}
    for line in path.read_text().splitlines():
        with suppress(ValueError):  # a line that was cut short
            value = json.loads(line)
            if "end" in value:
                end = value["end"]
            else:
                _merge(figures, value)
    return {**end, "figures": figures}


def _merge(figures: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        known = figures.get(name)
        figures[name] = {**known, **value} if isinstance(known, dict) else value


def _flat(figures: Mapping[str, Any], prefix: str = "") -> str:
    return " ".join(
        _flat(value, f"{prefix}{name}.")
        if isinstance(value, Mapping)
        else f"{prefix}{name}={value:.4g}" if isinstance(value, float) else f"{prefix}{name}={value}"
        for name, value in figures.items()
    )  # fmt: skip


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0],
        epilog="items: " + " ".join(item.key for item in ITEMS),
    )
    add = parser.add_argument
    add("--stage", nargs="+", default=[], help="stages, or items such as 2b.plain_2048, in order")
    add("--first-day", action="store_true", help="the items of tools/gpu/first_day.txt, in 560 s")
    add("--second-day", action="store_true", help="all other items")
    add("--budget", type=float, default=0.0, help="seconds, after which no item starts or goes on")
    add("--out", default=str(REPO / "build" / "gpu_check"), help="folder of results.jsonl")
    add("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a pretended GPU")
    add("--tiny", action="store_true", help="sizes that only show that the items run")
    add("--wheels", default="", help="folder of wheels to use where packages are missing")
    add("--also", nargs="+", default=[], metavar="MODULE:FUNCTION:SECONDS", help="further items")
    add("--scratch", default=str(_SCRATCH), help="folder that is kept between calls")
    options = parser.parse_args(arguments)
    known = {name for item in ITEMS for name in (item.stage, item.key)} | {"also"}
    if unknown := sorted(set(options.stage) - known):
        parser.error(f"--stage {' '.join(unknown)}: must be of {' '.join(sorted(known))}")
    if options.first_day + options.second_day + bool(options.stage) > 1:
        parser.error("--first-day, --second-day and --stage: must be one of them")
    if options.first_day and not options.budget and options.device == "cuda":
        options.budget = _FIRST_DAY_S
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the items that are asked for and print the table. Return 1 if one failed, 130 after a
    signal.
    """
    options = _parse(arguments)
    chosen = choose(options)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    runner = Runner(options)
    for item in chosen:
        if not runner.is_stopped:
            runner.run(item)
    table = runner.table()
    (runner.out / "table.md").write_text("\n".join(table) + "\n")
    print("\n".join(table))
    return 130 if runner.is_stopped else int(any(row["status"] in _FAILURES for row in runner.rows))


if __name__ == "__main__":
    raise SystemExit(main())
