"""What the checks before launch let pass, and what the run is warned of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.model_files import write_drafter, write_model
from tlt_megatron.config import preflight
from tlt_megatron.config.load import load_config
from tlt_megatron.config.preflight import check_code, check_files
from tlt_megatron.config.weight_files import INDEX_NAME


def check(folder: Path, *overrides: str) -> None:
    (folder / "train.jsonl").write_text("{}\n")
    base = [f"model.path={folder}/model", f"data.train={folder}/train.jsonl"]
    config = load_config(None, [*base, f"run.dir={folder}/runs/first", *overrides])
    check_code(config)
    check_files(config)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"tie_word_embeddings": True},
        {"model_type": "qwen2"},
        {"model_type": "qwen3", "head_dim": 8},
        {"eos_token_id": [1, 31]},
        {"rope_parameters": None, "rope_theta": 5e5},
        {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2}},
    ],
    ids=str,
)
def test_a_supported_model_passes_and_nothing_is_left_behind(
    tmp_path: Path, config: dict[str, object]
) -> None:
    write_model(tmp_path / "model", **config)
    check(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model", "train.jsonl"]


def test_stale_files_beside_an_index_do_not_count(tmp_path: Path) -> None:
    tensors = write_model(tmp_path / "model")
    shard = "model-00001-of-00001.safetensors"
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / shard)
    (tmp_path / "model" / INDEX_NAME).write_text(
        json.dumps({"weight_map": dict.fromkeys(tensors, shard)})
    )
    quantized = torch.zeros(1, dtype=torch.float8_e4m3fn)
    stale = {"model.norm.weight": torch.zeros(3), "other": quantized}
    save_file(stale, tmp_path / "model" / "consolidated.safetensors")
    check(tmp_path)


def test_shards_without_an_index_and_an_equal_tied_head_pass(tmp_path: Path) -> None:
    tensors = write_model(tmp_path / "model", tie_word_embeddings=True)
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    derived = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    save_file(head | derived, tmp_path / "model" / "model-2.safetensors")
    check(tmp_path)


def test_the_layer_of_glm_that_predicts_a_further_token_is_left_out(tmp_path: Path) -> None:
    sizes = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    write_model(tmp_path / "model", model_type="glm4_moe", **sizes)
    further = {"model.layers.2.eh_proj.weight": torch.zeros(16, 32)}
    save_file(further, tmp_path / "model" / "model-2.safetensors")
    check(tmp_path)


def test_a_drafter_counts_only_where_it_is_used(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    write_drafter(tmp_path / "drafter", hidden_size=24)
    named = f"speculation.drafter={tmp_path}/drafter"
    check(tmp_path, named)
    check(tmp_path, named, "speculation.enabled=true", "speculation.strategies=[ngram_4]")
    with pytest.raises(ValueError, match="must be the policy's, 16"):
        check(tmp_path, named, "speculation.enabled=true")
    write_drafter(tmp_path / "drafter")
    check(tmp_path, named, "speculation.enabled=true")


def test_a_policy_without_three_layers_to_read_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "model", num_hidden_layers=3)
    check(tmp_path, "drafter.algorithm=eagle3")
    message = "drafter.algorithm='eagle3': must be eagle or hass for a policy of 3 layers"
    used = ("speculation.enabled=true", "spot.enabled=true")
    with pytest.raises(ValueError, match=message):
        check(tmp_path, "drafter.algorithm=eagle3", *used)


def test_a_critic_counts_only_where_it_is_used(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    write_model(tmp_path / "critic", vocab_size=16)
    named = f"critic.path={tmp_path}/critic"
    check(tmp_path, named)
    with pytest.raises(ValueError, match=r"critic\.path='.*': vocab_size=16 must be >= 32, the"):
        check(tmp_path, named, "algorithm.advantage=gae")
    with pytest.raises(ValueError, match=r"critic\.path='absent': must be a folder with config"):
        check(tmp_path, "critic.path=absent", "algorithm.advantage=gae")
    write_model(tmp_path / "critic", hidden_size=32, tie_word_embeddings=True)
    check(tmp_path, named, "algorithm.advantage=gae")


def test_a_merged_yaml_mapping_is_no_duplicate(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "run: &base {seed: 1, num_steps: 2}\ndata: {<<: {max_prompt_tokens: 4}, max_prompt_tokens: 5}\n"
    )
    assert load_config(path).data.max_prompt_tokens == 5


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_trackers_package_that_is_absent_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    write_model(tmp_path / "model")
    monkeypatch.setattr(preflight, "find_spec", lambda package: None if package == name else 1)
    with pytest.raises(ValueError, match=f"logging.trackers={name}: the package {name} is not"):
        check(tmp_path, f"logging.trackers=[{name}]")
