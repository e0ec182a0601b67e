"""Prints the memory of one rank by phase, for a configuration and a number of GPUs.

    tlt plan examples/qwen2_5_7b_8gpu.yaml --ranks 8 model.path=Qwen/Qwen2.5-7B-Instruct

It needs no GPU, and of the model a folder with config.json alone; of an id of the Hub it fetches
that file. `run.device=cpu` gives the memory of a CPU rank.

    tlt plan my.yaml --ranks 8 --simulate runs/mine

With recorded runs of the same policy and machine it also predicts the seconds of a step by phase,
without speculation, with a frozen drafter and with TLT: see docs/planner.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from tlt_megatron.config.hub import CONFIG, load_fetched_config
from tlt_megatron.config.layout import check_layout
from tlt_megatron.runtime.device import Device
from tlt_megatron.trainer.memory_ledger import describe_checkpoint, make_ledger
from tools.planner.plan import print_plan


def main(arguments: list[str] | None = None) -> None:
    """Print the table. ValueError for settings or a layout that a run would refuse."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    add = parser.add_argument
    add("--ranks", type=int, required=True, help="GPUs (or CPU ranks) of the run")
    add("--simulate", action="append", default=[], metavar="RUN", help="folder; may be repeated")
    add("--lengths", default="", metavar="MEDIAN,P99", help="assumed, in tokens")
    add("--against", action="append", default=[], metavar="RUN", help="finished; may be repeated")
    add(
        "words",
        nargs="+",
        metavar="CONFIG.yaml | key=value",
        help="model.path: config.json will do",
    )
    given = parser.parse_intermixed_args(arguments)
    if given.ranks < 1:
        parser.error(f"--ranks {given.ranks}: must be >= 1")
    files = [word for word in given.words if "=" not in word]
    if not files:
        parser.error("CONFIG.yaml is missing")
    overrides = [word for word in given.words if "=" in word]
    config, _ = load_fetched_config(files, overrides, patterns=CONFIG)
    if not (Path(config.model.path) / "config.json").is_file():
        raise ValueError(
            f"model.path={config.model.path!r}: must be a folder with config.json, which is enough for a plan"
        )
    check_layout(config, given.ranks)
    kind = "cpu" if config.run.device == "cpu" else "cuda"
    device = Device(torch_device=torch.device(kind, 0), backend="gloo")  # nothing communicates
    print("\n".join(make_ledger(config, given.ranks, device).lines()))
    print(describe_checkpoint(config, given.ranks))
    if given.simulate:
        print_plan(
            config, given.ranks, given.simulate, lengths=given.lengths, against=given.against
        )
    elif given.lengths or given.against:
        parser.error("--lengths and --against need --simulate RUN")


if __name__ == "__main__":
    raise SystemExit("run it as: tlt plan")
