"""Examples for clusters fit into GPUs of 80 GB, and the quickstart shows the whole system."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.qwen_shapes import QWEN_1_7B, QWEN_7B, QWEN_30B_A3B, QWEN_32B, QWEN_235B_A22B
from tlt_megatron.config.layout import check_layout
from tlt_megatron.config.load import load_config
from tlt_megatron.config.schema import RunConfig
from tlt_megatron.runtime.device import Device
from tlt_megatron.trainer.before.memory_ledger import make_ledger

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def write_example(
    folder: Path, example: Path, sizes: dict[str, Any], *overrides: str
) -> tuple[RunConfig, Device]:
    """Return the settings of an example with a model of `sizes` in `folder`, and a GPU."""
    (folder / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
    for file in ("train.parquet", "eval.parquet"):
        (folder / file).touch()
    paths = [f"model.path={folder}", f"data.train={folder}/train.parquet"]
    paths += [f"data.eval={folder}/eval.parquet", *overrides]
    config = load_config(example, paths)
    return config, Device(torch_device=torch.device("cuda", 0), backend="cpu:gloo,cuda:nccl")


@pytest.mark.parametrize(
    "name, sizes, world_size, free_gib, overrides",
    [
        ("qwen2_5_7b_8gpu", QWEN_7B, 8, 79, ()),
        ("qwen2_5_7b_lora_1gpu", QWEN_7B, 1, 79, ()),
        ("qwen3_1_7b_1gpu", QWEN_1_7B, 1, 79, ()),
        ("qwen2_5_32b_slurm", QWEN_32B, 32, 79, ()),
        ("qwen3_30b_a3b_slurm", QWEN_30B_A3B, 16, 79, ()),
        ("qwen3_30b_a3b_slurm", QWEN_30B_A3B, 8, 79, ("model.lora_rank=32",)),
        ("qwen3_235b_a22b_slurm", QWEN_235B_A22B, 64, 140, ()),
    ],
)
def test_a_cluster_example_fits(
    tmp_path: Path,
    name: str,
    sizes: dict[str, Any],
    world_size: int,
    free_gib: int,
    overrides: tuple[str, ...],
) -> None:
    config, gpu = write_example(tmp_path, EXAMPLES / f"{name}.yaml", sizes, *overrides)
    check_layout(config, world_size)
    ledger = make_ledger(config, world_size, gpu)
    ledger.check(free_gib << 30)
    ledger.of_host().check((1 << 40) // 8)  # a host of 1 TiB with eight GPUs
    # Not by a wide margin: a third of it is not enough, so the ledger counts what there is.
    with pytest.raises(ValueError, match="usable"):
        ledger.check((free_gib << 30) // 3)


def test_the_quickstart_speculates_and_trains_its_drafter_and_says_what_that_gained(
    tmp_path: Path,
) -> None:
    config, _ = write_example(tmp_path, EXAMPLES / "quickstart.yaml", {})
    assert config.speculation.enabled
    assert config.speculation.selector == "cost_model"
    assert config.speculation.drafter == ""  # from random weights
    assert config.spot.enabled
    assert config.speculation.measure_gain
