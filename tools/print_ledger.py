"""Print the memory of one rank by phase, for a configuration and a number of GPUs. Needs no GPU and reads only config.json:

python -m tools.print_ledger --config examples/qwen2_5_7b_8gpu.yaml --ranks 8 model.path=/models/Qwen2.5-7B-Instruct
"""

from __future__ import annotations

import argparse

import torch

from tlt_megatron.config.layout import check_layout
from tlt_megatron.config.load import load_config
from tlt_megatron.runtime.device import Device
from tlt_megatron.trainer.memory_ledger import make_ledger


def main(arguments: list[str] | None = None) -> None:
    """Print the table. ValueError for settings or a layout that a run would refuse."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--config",
        required=True,
        action="append",
        help="YAML file of a run, may be given several times",
    )
    parser.add_argument("--ranks", type=int, required=True, help="GPUs of the run")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parser.parse_args(arguments)
    config = load_config(given.config, given.overrides)
    check_layout(config, given.ranks)
    gpu = Device(torch_device=torch.device("cuda", 0), backend="cpu:gloo,cuda:nccl")
    print("\n".join(make_ledger(config, given.ranks, gpu).lines()))


if __name__ == "__main__":
    main()
