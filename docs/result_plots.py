"""Draws the plots of docs/performance.md from a quickstart and two benchmarks: `make figures`.

All numbers that are drawn are in docs/figures/results.json, with the commit.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.run_report.data import read_metrics
from tools.run_report.palette import BLUE, GREEN, GREY, ORANGE, VERMILLION

FOLDER = Path(__file__).resolve().parent / "figures"
_VARIANTS = {"tlt": "full TLT", "frozen": "frozen drafter", "off": "without"}  # from below
_PHASES = {"gen": BLUE, "old_log_prob": ORANGE, "update_actor": GREEN, "update_weights": VERMILLION}


def main() -> None:
    """Write the JSON and the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=Path, help="folder of a quickstart")
    parser.add_argument("--speculation", type=Path, required=True, help="JSON of that benchmark")
    parser.add_argument("--step", type=Path, required=True, help="JSON of that benchmark")
    parser.add_argument("--commit", required=True)
    options = parser.parse_args()
    speculation = json.loads(options.speculation.read_text(encoding="utf-8"))
    variants = json.loads(options.step.read_text(encoding="utf-8"))["variants"]
    measured = {
        "commit": options.commit,
        "accept_length": accept_lengths(options.run),
        "accepted_by_depth": accepted_by_depth(options.run),
        "seconds": {
            label: seconds(variants[name]["phases_s"]) for name, label in _VARIANTS.items()
        },
        "speed_up": speculation["speedup_by_batch"],
    }
    text = json.dumps(measured, indent=1) + "\n"
    (FOLDER / "results.json").write_text(text, encoding="utf-8")
    draw(measured, FOLDER / "results.svg")
    print("figures: docs/figures/results.svg")


def accept_lengths(run: Path) -> list[float | None]:
    """Return the accept length of each RL step; None where nothing was drafted."""
    rows = read_metrics(run / "metrics.jsonl")
    return [row.get("rollout/spec_accept_length") for row in rows if row["step"]]


def accepted_by_depth(run: Path) -> list[float]:
    """Return the share of passes that accept the drafted token of each depth.

    They are the deepest strategy's, in the last ten steps.
    """
    rows = [
        json.loads(line)
        for file in sorted((run / "speculation").glob("rank_*.jsonl"))
        for line in file.read_text(encoding="utf-8").splitlines()
    ]
    last = max(row["step"] for row in rows)
    deepest = max(rows, key=lambda row: len(row["accepted_by_depth"]))["strategy"]
    rows = [row for row in rows if row["step"] > last - 10 and row["strategy"] == deepest]
    num_requests = sum(row["passes"] * row["batch_size"] for row in rows)
    columns = zip(*(row["accepted_by_depth"] for row in rows), strict=True)
    return [sum(column) / num_requests for column in columns]


def seconds(phases: dict[str, float]) -> dict[str, float]:
    """Return the seconds of each phase that is drawn, and of what is left of a step."""
    found = {name: phases.get(name, 0.0) for name in _PHASES}
    return found | {"other": phases["step"] - sum(found.values())}


def draw(measured: dict[str, Any], path: Path) -> None:
    """Write the four plots as one SVG."""
    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    with plt.rc_context({**style, "svg.hashsalt": "results", "svg.fonttype": "none"}):
        figure, axes = plt.subplots(2, 2, figsize=(9, 6), layout="constrained")
        for plot, place in zip((_speed_up, _phases, _accept, _depth), axes.flat, strict=True):
            plot(place, measured)
        figure.savefig(path, metadata={"Date": None})


def _speed_up(place: Axes, measured: dict[str, Any]) -> None:
    rows: dict[str, Any] = measured["speed_up"]
    shown = {
        "cost_model": "chosen by cost",
        "beg_mab": "BEG-MAB",
        "cost_model/random": "useless drafter",
    }
    for (name, label), colour in zip(shown.items(), (BLUE, ORANGE, GREY), strict=True):
        middle, low, high = (
            [row[name][key] for row in rows.values()] for key in ("median", "min", "max")
        )
        place.fill_between(range(len(rows)), low, high, color=colour, alpha=0.2)
        place.plot(middle, color=colour, marker="o", label=label)
    place.axhline(1, color=GREY, linewidth=0.8)
    place.set(title="speed-up over plain decoding", xlabel="requests in the batch", ylim=(0, None))
    place.set_xticks(range(len(rows)), list(rows))
    place.legend(frameon=False)


def _phases(place: Axes, measured: dict[str, Any]) -> None:
    rows: dict[str, dict[str, float]] = measured["seconds"]
    left = [0.0] * len(rows)
    for phase, colour in {**_PHASES, "other": GREY}.items():
        values = [row[phase] for row in rows.values()]
        place.barh(list(rows), values, left=left, color=colour, label=phase)
        left = [a + b for a, b in zip(left, values, strict=True)]
    place.set(title="a step by phase", xlabel="seconds")
    place.legend(frameon=False, ncols=2, loc="upper right", fontsize=7)
    place.set_ylim(-0.5, 3.6)


def _accept(place: Axes, measured: dict[str, Any]) -> None:
    values = measured["accept_length"]
    place.plot(range(1, len(values) + 1), values, color=BLUE)
    place.set(title="accept length of the quickstart", xlabel="RL step", ylim=(0, None))


def _depth(place: Axes, measured: dict[str, Any]) -> None:
    values = measured["accepted_by_depth"]
    place.bar(range(1, len(values) + 1), values, color=BLUE)
    place.set(title="share of passes that accept it", xlabel="drafted token", ylim=(0, 1))


if __name__ == "__main__":
    main()
