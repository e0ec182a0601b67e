"""The entry of the benchmarks.

    python -m tools.bench speculation
    python -m tools.bench speculation --help

Each benchmark prints tables and writes build/bench/NAME.json. Its file has `run(options)`,
which returns what goes into the JSON, and optionally `add_options(add)`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch; ranks inherit it

_SETTING = re.compile(r"[a-z_]+\.[\w.]+=")
_BENCHES = (
    "rollout",
    "step",
    "speculation",
    "drafter",
    "drift",
    "llm",
    "costs",
    "clients",
    "beside",
)


def main(arguments: Sequence[str]) -> None:
    """Run the benchmark that the first argument names, with the others."""
    lines = [f"  {name:<12} {_summary_of(name)}" for name in _BENCHES]
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench",
        description="\n".join(["Benchmarks; NAME --help lists the options of one.", "", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=_BENCHES, metavar="NAME")
    name = parser.parse_args(arguments[:1]).name
    bench = importlib.import_module(f"tools.bench.{name}")
    options = _parse(name, bench, arguments[1:])

    import torch

    from tools.bench.measure import write_json

    torch.set_num_threads(1)
    write_json(options.out, bench.run(options))


def _summary_of(name: str) -> str:
    """Return the first line of a benchmark's docstring, without importing it."""
    source = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    return source.split('"""')[1].splitlines()[0]


def _parse(name: str, bench: ModuleType, arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"tools.bench {name}", description=(bench.__doc__ or "").partition("\n\n")[0]
    )
    if hasattr(bench, "add_options"):
        bench.add_options(parser.add_argument)
    parser.add_argument("--out", default=f"build/bench/{name}.json")
    # settings first: else they would be values of an option that takes several
    return parser.parse_intermixed_args(
        sorted(arguments, key=lambda word: not _SETTING.match(word))
    )


if __name__ == "__main__":
    main(sys.argv[1:])
