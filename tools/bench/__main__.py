"""The entry of the benchmarks.

    python -m tools.bench speculation --quick
    python -m tools.bench speculation --help

Each benchmark prints tables and writes build/bench/NAME.json.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch; ranks inherit it

_BENCHES = {
    "rollout": "tokens per second of the embedded engine and of transformers",
    "speculation": "what speculation gains, by batch size, drafter and selector",
    "step": "what TLT gains in an RL step, and that it changes no token",
    "drafter": "packed drafter training, and checkpoints in the background",
    "gpu": "captured graphs and speculation on a GPU",
    "coupling": "acceptance of noise-keyed drafts and of rejection sampling",
    "noise": "what sampling noise costs beside a decode pass on a CPU",
    "graph-bytes": "bytes of captured graphs of a 7B model, counted without a GPU",
    "roofline": "tokens per second that memory bandwidth allows on a GPU, computed",
}


def main(arguments: Sequence[str]) -> None:
    """Run the benchmark that the first argument names, with the others."""
    lines = [f"  {name:<12} {text}" for name, text in _BENCHES.items()]
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench",
        description="\n".join(["Benchmarks; NAME --help lists the options of one.", "", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=_BENCHES, metavar="NAME")
    name = parser.parse_args(arguments[:1]).name
    importlib.import_module(f"tools.bench.{name.replace('-', '_')}").main(arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
