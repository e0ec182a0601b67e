"""Drafters on disk: what is written, what loads, what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.slow_draft import HIDDEN_SIZE, VOCAB_SIZE, make_draft_model
from tlt_megatron.drafter.eagle_folder import (
    load_draft_config,
    load_drafter,
    load_trainer_state,
    save_drafter,
)
from tlt_megatron.models.config import RopeConfig, load_model_config
from tlt_megatron.models.draft_model import DraftModel

ARCHITECTURES = ("eagle", "eagle3")


def load_beside(path: Path, model: DraftModel, **changes: object) -> DraftModel:
    settings: dict = {
        "embedding_VD": model.embedding_VD,
        "lm_head_VD": model.lm_head_VD,
        "dtype": model.fc.weight.dtype,
    }
    return load_drafter(path, **settings | changes)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_loaded_drafter_is_the_saved_one(architecture: str, tmp_path: Path) -> None:
    model = make_draft_model(architecture)
    save_drafter(tmp_path / "d", model)
    loaded = load_beside(tmp_path / "d", model)
    assert loaded.config == model.config
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    assert load_trainer_state(tmp_path / "d") is None


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(theta=1e6),
        RopeConfig(theta=1e4, kind="linear", factor=4.0),
        RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_max_position_embeddings=32),
    ],
    ids=lambda rope: rope.kind,
)
def test_transformers_reads_the_same_sizes_and_rope(rope: RopeConfig, tmp_path: Path) -> None:
    model = make_draft_model("eagle")
    model.config = dataclasses.replace(model.config, rope=rope)
    save_drafter(tmp_path, model)
    seen = load_model_config(tmp_path)
    assert seen.rope == rope
    for name in ("hidden_size", "ffn_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size"):
        assert getattr(seen, name) == getattr(model.config, name)
    assert seen.rms_norm_eps == model.config.rms_norm_eps
    assert load_draft_config(tmp_path) == model.config


def test_drafter_of_another_target_is_refused_and_a_later_self_is_not(tmp_path: Path) -> None:
    model = make_draft_model("eagle")
    save_drafter(tmp_path, model)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator, dtype=torch.float64)
    load_beside(tmp_path, model, embedding_VD=model.embedding_VD + 0.05 * noise)
    for change, message in (
        ({"embedding_VD": noise}, "belongs to another target"),
        ({"embedding_VD": noise[1:]}, "vocab_size=32 is not the target's 31"),
        ({"embedding_VD": noise[:, 1:]}, "hidden_size=16 is not the target's 15"),
        ({"lm_head_VD": noise[1:]}, "lm_head"),
    ):
        with pytest.raises(ValueError, match=message):
            load_beside(tmp_path, model, **change)


def test_saved_fingerprint_is_that_of_the_embedding_in_use(tmp_path: Path) -> None:
    model = make_draft_model("eagle")
    model.embedding_VD.copy_(torch.randn(VOCAB_SIZE, HIDDEN_SIZE))
    save_drafter(tmp_path, model)
    assert load_draft_config(tmp_path).target != model.config.target
    load_beside(tmp_path, model)


def test_wrong_tensors_are_refused_by_name(tmp_path: Path) -> None:
    model = make_draft_model("eagle3")
    save_drafter(tmp_path, model)
    file = tmp_path / "model.safetensors"
    good = load_file(file)
    changes = (
        (
            {"midlayer.self_attn.q.weight": torch.zeros(2)},
            r"Unexpected key.*midlayer\.self_attn\.q\.weight",
        ),
        ({"fc.weight": torch.zeros(2, 2)}, r"size mismatch for fc\.weight: .*\[2, 2\]"),
    )
    for change, message in changes:
        save_file(good | change, file)
        with pytest.raises(ValueError, match=message):
            load_beside(tmp_path, model)
    save_file({name: t for name, t in good.items() if name != "norm.weight"}, file)
    with pytest.raises(ValueError, match=r"Missing key.*norm\.weight"):
        load_beside(tmp_path, model)


def test_the_layers_that_a_drafter_reads_must_be_known(tmp_path: Path) -> None:
    """test_drafter_forms.py has what else is refused."""
    save_drafter(tmp_path, make_draft_model("eagle3"))
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eagle_config": {}}))
    with pytest.raises(ValueError, match="lacks eagle_config"):
        load_draft_config(tmp_path)


@pytest.mark.parametrize("is_null", [False, True])
def test_a_drafter_made_elsewhere_is_checked_by_its_sizes(tmp_path: Path, is_null: bool) -> None:
    """It has no fingerprint, names rope in the old way, and leaves head_dim to be worked out."""
    model = make_draft_model("eagle")
    save_drafter(tmp_path, model)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    del config["tlt_megatron"], config["rope_parameters"], config["head_dim"]
    config |= {"rope_theta": 100.0, "num_attention_heads": 4}
    config |= {"head_dim": None} if is_null else {}
    file.write_text(json.dumps(config))
    seen = load_draft_config(tmp_path)
    assert seen.target is None
    assert seen.rope == RopeConfig(theta=100.0)
    assert seen.head_dim == HIDDEN_SIZE // 4
