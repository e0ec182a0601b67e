"""Writes a report of a run: one HTML page that needs no network.

    tlt report runs/mine --steps 40-41

Reads metrics.jsonl, summary.json, config.yaml, timeline/, speculation/ and rollouts/ of the
run folder. The page goes to <run folder>/report.html, or to `--out`. For things the run did not do,
the page has a sentence. Several runs are shown side by side: <first run folder>/comparison.html.
Needs `pip install "tlt_megatron[report]"`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from tools.run_report.data import distinct_names, read_run
from tools.run_report.page import render


def main(arguments: list[str] | None = None) -> int:
    """Write the page and return 0. ValueError if a file is broken."""
    options = _parse(arguments)
    name = "report.html" if len(options.run_dirs) == 1 else "comparison.html"
    out: Path = options.out or options.run_dirs[0] / name
    page = _render(options.run_dirs, options.steps)
    out.parent.mkdir(parents=True, exist_ok=True)
    if options.out is None:
        out.unlink(missing_ok=True)  # it may be a link to a file elsewhere
    out.write_text(page, encoding="utf-8")
    print(f"report: {out} ({out.stat().st_size / 2**20:.1f} MiB)")
    return 0


def _render(run_dirs: Sequence[Path], steps: tuple[int, int] | None) -> str:
    names = distinct_names(run_dirs)
    runs = [read_run(path, name=name) for path, name in zip(run_dirs, names, strict=True)]
    if len(runs) > 1 and steps:
        raise ValueError("--steps: only the report of one run has a timeline. This is a comparison")
    return render(runs, steps)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    add = parser.add_argument
    add("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="folders of runs")
    add("--out", type=Path, help="HTML file; default in the folder of the first run")
    add("--steps", type=_steps, metavar="A-B", help="of one run's timeline; default the last two")
    return parser.parse_args(arguments)


def _steps(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected a step such as 7, or steps such as 7-8"
        )
    return int(match[1]), int(match[2] or match[1])


if __name__ == "__main__":
    raise SystemExit("run it as: tlt report")
