"""Whole runs with LoRA: PEFT loads the adapters, and a resumed run equals a straight one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.mcore_policy import check_same_bits, load_hf
from tests.tiny_models import make_tiny_hf
from tests.tiny_task import TLT, answers, metric_rows, run, run_ending, weights
from tlt_megatron.models.hf_io import read_tensors
from tools.commands.convert_checkpoint import megatron_to_hf

pytestmark = pytest.mark.e2e

LORA = ("model.lora_rank=4", "optimizer.lr=1e-3", "algorithm.kl_coef=0.01", "data.eval=")
QUICK = (*LORA, "logging.trackers=[]", "rollout.max_new_tokens=8")


def test_peft_loads_the_adapters_of_a_run_with_spot_training(config: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    run(2, config, tmp_path, *LORA, *TLT, "parallel.tensor=2", "run.num_steps=2")
    assert all(row["actor/grad_norm"] > 0 for row in metric_rows(tmp_path))
    assert metric_rows(tmp_path)[0]["actor/kl_loss"] == pytest.approx(0, abs=1e-6)
    merged = load_hf(tmp_path / "hf")
    base: Any = load_hf(config.parent / "model")
    token_ids = torch.arange(20)[None]
    with torch.no_grad():
        before = base(token_ids).logits
        adapted: Any = PeftModel.from_pretrained(base, tmp_path / "hf_adapter")
        found, expected = adapted(token_ids).logits, merged(token_ids).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(before, expected, atol=1e-4)


def test_a_resumed_run_equals_a_straight_one(config: Path, tmp_path: Path) -> None:
    """Also the adapters, and one that continues with all weights is refused."""
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    run(1, config, straight, *QUICK, "run.num_steps=3")
    run(1, config, resumed, *QUICK, "run.num_steps=2")
    said = run_ending(2, 1, config, resumed, *QUICK, "--resume=auto", "model.lora_rank=0")
    assert "belongs to another run: LoRA.alpha 32.0 -> None" in said
    assert "LoRA.rank 4 -> None" in said
    run(1, config, resumed, *QUICK, "--resume=auto", "run.num_steps=3")
    check_same_bits(weights(resumed), weights(straight))
    adapters = [
        read_tensors(folder / "hf_adapter" / "adapter_model.safetensors")
        for folder in (resumed, straight)
    ]
    check_same_bits(*adapters)
    assert "| LoRA, merged | rank 4, alpha 32 |" in (straight / "hf" / "README.md").read_text()
    policy = straight / "checkpoints" / "iter_0000003" / "policy"
    with pytest.raises(ValueError, match=r"policy: holds LoRA adapters alone: must hold all"):
        megatron_to_hf(policy, tmp_path / "converted", config.parent / "model")


def test_an_engine_draws_the_tokens_of_the_merged_model(config: Path, tmp_path: Path) -> None:
    """In step 2, from the adapters of step 1. A run of their merged export hardly learns."""
    lora = (*QUICK, "optimizer.lr=0.02", "algorithm.kl_coef=0")
    run(1, config, tmp_path / "lora", *lora, "run.num_steps=2")
    run(1, config, tmp_path / "first", *lora, "run.num_steps=1")
    still = (*QUICK, "model.lora_rank=0", "optimizer.lr=1e-30", "run.num_steps=2")
    run(1, config, tmp_path / "merged", *still, f"model.path={tmp_path / 'first' / 'hf'}")
    run(1, config, tmp_path / "base", *still)
    second = {n: answers(tmp_path / n)[16:] for n in ("lora", "merged", "base")}
    assert second["lora"] == second["merged"] != second["base"]


def test_peft_loads_the_adapters_of_experts(config: Path, tmp_path: Path) -> None:
    """Under the names of each expert, which PEFT joins as transformers joins their weights."""
    from peft import PeftModel

    task = tmp_path / "task"
    shutil.copytree(config.parent, task)
    make_tiny_hf(task / "model", "qwen3_moe", vocab_size=48, eos_token_id=1, pad_token_id=0)
    layout = ("parallel.tensor=2", "parallel.expert=2", f"model.path={task / 'model'}")
    run(2, config, tmp_path / "run", *QUICK, *layout, "run.num_steps=2")
    merged = load_hf(tmp_path / "run" / "hf")
    adapted: Any = PeftModel.from_pretrained(
        load_hf(task / "model"), tmp_path / "run" / "hf_adapter"
    )
    token_ids = torch.arange(20)[None]
    with torch.no_grad():
        found, expected = adapted(token_ids).logits, merged(token_ids).logits
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=1e-4)
