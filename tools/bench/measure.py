"""Shared by the benchmarks: clocks, interleaved rounds, spread over rounds, the JSON file."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

Clock = Callable[[Callable[[], object]], float]
Spread = dict[str, float]  # median, min, max


def made(folder: str) -> str:
    """Return `folder` if a model is there. It is the type of an option.

    ArgumentTypeError says how the default folders are made.
    """
    if not (Path(folder) / "config.json").is_file():
        raise argparse.ArgumentTypeError(
            f"{folder}: no model there; `make drafter` makes build/tiny_policy and build/tiny_drafter"
        )
    return folder


def add_policy_options(add: Callable[..., object], split: str) -> None:
    """Add the options that name a policy, its drafter, and prompts of the split "train" or
    "eval".
    """
    add("--model", default="build/tiny_policy", type=made, help="folder of a Hugging Face model")
    add("--drafter", default="build/tiny_drafter", type=made)
    add("--prompts", default=f"build/tiny_policy/{split}.jsonl")


def cpu_seconds(run: Callable[[], object]) -> float:
    """Return the CPU seconds of this process, so that other load on the machine does not count."""
    started = time.process_time()
    run()
    return time.process_time() - started


def wall_seconds(run: Callable[[], object]) -> float:
    """Return the wall seconds that the caller waits, disk included."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def interleave(
    variants: Mapping[str, Callable[[], object]], rounds: int, clock: Clock
) -> dict[str, list[float]]:
    """Run every variant in every round.

    Return its seconds by round, without those of a first round that warms up.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds + 1):
        for name, run in variants.items():
            seconds[name].append(clock(run))
    return {name: values[1:] for name, values in seconds.items()}


def spread(values: Sequence[float]) -> Spread:
    """Return median, min and max over rounds."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def told(values: Spread) -> str:
    """Return "median (min-max)"."""
    return f"{values['median']:.2f} ({values['min']:.2f}-{values['max']:.2f})"


def ratios(slow: Sequence[float], fast: Sequence[float]) -> Spread:
    """Return the spread of slow / fast, taken within each round."""
    return spread([s / f for s, f in zip(slow, fast, strict=True)])


def first_differences(pairs: Iterable[tuple[Sequence[int], Sequence[int]]]) -> tuple[int, int]:
    """Return (responses that differ, tokens compared).

    Two candidates closer than the rounding error may swap. Tokens after the first difference of a
    response belong to another text and are not compared.
    """
    num_differing = num_compared = 0
    for one, other in pairs:
        at = next((i for i, (a, b) in enumerate(zip_longest(one, other)) if a != b), None)
        num_differing += at is not None
        num_compared += len(one) if at is None else min(at + 1, len(one), len(other))
    return num_differing, num_compared


def write_json(path: str | Path, result: Mapping[str, object]) -> None:
    """Write `result` with the machine and the command that produced it. NaN becomes null."""
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    command = " ".join(["python -m tools.bench", *sys.argv[1:]])
    whole = {**result, "machine": machine, "command": command}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_without_nan(whole), indent=2, allow_nan=False)
    Path(path).write_text(text + "\n", encoding="utf-8")


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nan(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and math.isnan(value) else value
