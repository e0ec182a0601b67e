"""Draws the curve of drift from JSON files of `python -m tools.bench drift`.

All numbers that are drawn are in docs/figures/drift.json, with the commit.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.run_report.palette import BLUE, GREY, ORANGE

FOLDER = Path(__file__).resolve().parent / "figures"
_COLOURS = {"frozen": BLUE, "tlt": ORANGE}
_LABELS = {"frozen": "frozen drafter", "tlt": "trained in idle time"}


def main() -> None:
    """Write the JSON and the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("measured", type=Path, nargs="+", help="JSON of the benchmark")
    parser.add_argument("--commit", required=True)
    options = parser.parse_args()
    seeds = {}
    for path in options.measured:
        seeds |= json.loads(path.read_text(encoding="utf-8"))["seeds"]
    text = json.dumps({"commit": options.commit, "seeds": seeds}, indent=1) + "\n"
    (FOLDER / "drift.json").write_text(text, encoding="utf-8")
    style = {"font.size": 9, "svg.hashsalt": "drift", "svg.fonttype": "none"}
    with plt.rc_context(style):
        draw(seeds)
    print("figures: docs/figures/drift.svg")


def draw(seeds: dict[str, Any]) -> None:
    """Write the picture."""
    figure, (length, seconds) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
    drift = length.twinx()
    for number, of_seed in enumerate(seeds.values()):
        steps = of_seed["last_steps"]
        for name, colour in _COLOURS.items():
            label = _LABELS[name] if not number else None
            length.plot(steps, of_seed["accept_length"][name], color=colour, label=label)
            seconds.plot(steps, of_seed["step_s"][name], color=colour)
        drift.plot(steps, of_seed["kl"], color=GREY, linestyle=":")
    length.set(xlabel="RL step", ylabel="tokens per verify pass", ylim=0)
    drift.set(ylabel="KL from the start, nats per token (dotted)", ylim=0)
    seconds.set(xlabel="RL step", ylabel="seconds per RL step", ylim=0)
    length.legend(frameon=False, loc="lower left")
    figure.savefig(FOLDER / "drift.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
