"""Renews docs/report.png and the numbers of the quickstart in README and docs, all
from one run: `make figures`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.commands.report import main as report
from tools.run_report.data import read_metrics

REPO = Path(__file__).resolve().parent.parent
_SIZE = "1400,1630"  # pixels: the numbers and the first five figures
BROWSER_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
_SENTENCE = (
    "The picture is the step with the longest tail of the last 25 of `make quickstart` at commit {commit} ([its report](docs/report.md)),\n50 RL steps in {minutes} on {cores} cores. The drafter starts"
    " from random weights.\nAt the end rollouts are {rollout}x and RL steps {step}x as fast as without speculation."
)
_TABLE = """`make quickstart` at commit {commit} ran 50 RL steps in {minutes}; [its report](report.md) is of the same run.

| | |
|---|---|
| held-out accuracy at temperature 1 | {first} before, {last} after |
| accept length of the drafter | {accept_first} at the start (random weights), {accept_last} at the end |
| idle rank-seconds used for drafter training | {used} % |
| time that steps wait for drafter work | {stall} % |
| longest over median response, median over steps | {tail} |
| update, share of the last ten steps | {update} % |
| rollouts at the end, with speculation against without | {rollout}x |
| whole steps, the same | {step}x |"""
# file, what stands before the numbers, the numbers, their replacement
_PLACES = (
    ("README.md", r"<!-- quickstart -->\n", r".*?(?=\n<!-- end -->)", _SENTENCE),
    ("README.md", r"trains in idle time \| ", r"\d+ %", "{used} %"),
    ("README.md", r"policy learns \| accuracy ", r"[\d.]+ to [\d.]+", "{first} to {last}"),
    ("docs/performance.md", r"<!-- quickstart -->\n", r".*?(?=\n<!-- end -->)", _TABLE),
    ("docs/memory.md", r"`make quickstart`, all 50 steps \| ", r"[\d,]+ \| [\d,]+", "{planned:,.0f} | {taken:,.0f}"),
)  # fmt: skip


def main() -> None:
    """Draw the picture and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--browser", required=True)
    options = parser.parse_args()
    rows = read_metrics(options.run_dir / "metrics.jsonl")
    summary = json.loads((options.run_dir / "summary.json").read_text(encoding="utf-8"))
    values = numbers(summary, rows)
    draw(options.run_dir, options.browser, busiest_steps(rows))
    for name, before, old, new in _PLACES:
        path = REPO / name
        text, count = re.subn(
            f"({before}){old}",
            lambda match, new=new: match[1] + new.format(**values),
            path.read_text(encoding="utf-8"),
            flags=re.DOTALL,
        )
        if count != 1:
            raise ValueError(f"{name}: {before!r} must be there once, not {count} times")
        path.write_text(text, encoding="utf-8")
    print("figures: docs/report.png, README.md, docs/performance.md, docs/memory.md")


def draw(run_dir: Path, browser: str, steps: tuple[int, int]) -> None:
    """Write docs/report.png: the first figures of the report, with the timeline of `steps`."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "quickstart.html"
        report([str(run_dir), "--out", str(page), "--steps", "-".join(map(str, steps))])
        command = [
            *(browser, *BROWSER_OPTIONS, f"--user-data-dir={folder}/profile"),
            *(f"--window-size={_SIZE}", f"--screenshot={REPO / 'docs' / 'report.png'}"),
            *("--virtual-time-budget=5000", page.as_uri()),
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=300)


def busiest_steps(rows: list[dict[str, float | None]]) -> tuple[int, int]:
    """Return the two steps of the run's second half in which idle ranks trained the drafter
    longest.
    """
    used = {int(row["step"] or 0): row.get("bubble/used_s") or 0.0 for row in rows}
    later = [step for step in used if step > max(used) / 2 and step - 1 in used]
    last = max(later, key=lambda step: used[step - 1] + used[step])
    return last - 1, last


def numbers(
    summary: dict[str, float], rows: list[dict[str, float | None]]
) -> dict[str, float | str]:
    """Return what the pages quote, as text with the digits that they show."""

    def series(name: str) -> list[float]:
        return [row[name] or 0.0 for row in rows if name in row]

    seconds, update = series("timing_s/step"), series("timing_s/update_actor")
    lengths = zip(series("response_length/max"), series("response_length/median"), strict=True)
    minutes, rest = divmod(round(summary["seconds_total"]), 60)
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=REPO, check=True, capture_output=True
    )
    return {
        "commit": commit.stdout.decode().strip(),
        "cores": f"{os.cpu_count()}",
        "minutes": f"{minutes} minutes {rest} seconds",
        "first": f"{summary['eval_accuracy_first']:.2f}",
        "last": f"{summary['eval_accuracy_last']:.2f}",
        "accept_first": f"{summary['accept_length_first']:.1f}",
        "accept_last": f"{summary['accept_length_last']:.1f}",
        "used": f"{100 * summary['idle_used_s'] / summary['idle_s']:.0f}",
        "stall": f"{100 * summary['stall_s'] / sum(seconds):.1f}",
        "tail": f"{median(longest / middle for longest, middle in lengths):.0f}",
        "update": f"{100 * sum(update[-10:]) / sum(seconds[-10:]):.0f}",
        "rollout": f"{summary['rollout_speedup']:.1f}",
        "step": f"{summary['step_speedup']:.1f}",
        "planned": summary["memory_planned_gb"] * 1e9 / 2**20,
        "taken": summary["memory_peak_gb"] * 1e9 / 2**20,
    }


if __name__ == "__main__":
    main()
