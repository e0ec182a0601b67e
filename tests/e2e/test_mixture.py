"""A whole run of a mixture of experts on two ranks that share its experts, with speculation and
spot training.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_task import (
    TLT,
    check_same_run,
    make_tiny_task,
    metric_rows,
    patient_engine,
    run,
    weights,
)
from tlt_megatron.models.hf_io import HfReader

pytestmark = pytest.mark.e2e

EXPERTS = (
    "parallel.expert=2",
    "run.num_steps=3",
    "data.eval=",
    "logging.trackers=[]",
    "rollout.num_prompts=3",
    "rollout.max_batch_size=4",
    "rollout.max_new_tokens=40",
)
REPLAY = "rollout.routing_replay=true"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_task(tmp_path_factory.mktemp("mixture"), kind="qwen3_moe")


@pytest.fixture(scope="module")
def straight(mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("straight")
    engine = patient_engine(tmp_path_factory.mktemp("engine"), "embedded")
    run(2, mixture, run_dir, *EXPERTS, REPLAY, *TLT, engine)
    return run_dir


def test_speculation_and_spot_training_change_no_token_and_no_weight(
    mixture: Path, straight: Path, tmp_path: Path
) -> None:
    run(2, mixture, tmp_path, *EXPERTS, REPLAY)
    check_same_run(straight, tmp_path)
    rows = metric_rows(straight)
    assert sum(row["spot/updates"] for row in rows) > 0
    assert any("rollout/spec_accept_length" in row for row in rows)
    assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-4 for row in rows)
    assert all(row["rollout/routes_missing_share"] == 0 for row in rows)


def test_training_changed_the_experts_and_transformers_loads_them(
    mixture: Path, straight: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    before, after = dict(HfReader(mixture.parent / "model").items()), weights(straight)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any(".mlp.experts." in name for name in changed)
    assert any(".mlp.gate.weight" in name for name in changed)
    AutoModelForCausalLM.from_pretrained(straight / "hf").save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == after.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in after.items())


def test_glm_in_bfloat16_keeps_the_bias_of_its_router_and_the_layer_for_a_further_token(
    tmp_path: Path,
) -> None:
    from transformers import AutoModelForCausalLM

    config = make_tiny_task(tmp_path, kind="glm4_moe")
    further = {"model.layers.2.eh_proj.weight": torch.zeros(64, 128)}
    save_file(further, tmp_path / "model" / "model-2.safetensors")
    halved = ("model.dtype=bfloat16", "rollout.dtype=bfloat16", "run.num_steps=1")
    run(2, config, tmp_path / "run", *EXPERTS, *TLT, *halved)
    before, after = (dict(HfReader(tmp_path / f).items()) for f in ("model", "run/hf"))
    assert after.keys() == before.keys()
    biases = [name for name in after if name.endswith("correction_bias")]
    assert biases
    assert all(torch.equal(after[name], before[name]) for name in biases)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "hf").state_dict()
    assert all(torch.equal(loaded[name], after[name]) for name in biases)
