"""config.json is read as transformers reads it, and weights come from the files that the index
names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.model_files import CONFIG, write_model
from tests.ranks import run_ranks
from tests.tiny_models import KINDS, LLAMA3
from tlt_megatron.config.model_folder import check_model
from tlt_megatron.config.weight_files import INDEX_NAME
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.hf_io import HfReader, save_hf_model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"rope_parameters": None},
        {"rope_parameters": None, "rope_theta": 12345.0},
        {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 4}},
        {"rope_parameters": LLAMA3},
        {"rope_parameters": None, "rope_scaling": {"type": "yarn", "factor": 4}},
        {"tie_word_embeddings": True},
        {"tie_word_embeddings": None, "rms_norm_eps": None},
        {"head_dim": 8},
        {"num_attention_heads": 32, "hidden_size": 128, "num_key_value_heads": None},
    ],
    ids=str,
)
def test_config_is_read_as_transformers_reads_it(
    tmp_path: Path, kind: str, change: dict[str, Any]
) -> None:
    from transformers import AutoConfig

    settings = {k: v for k, v in (CONFIG | {"model_type": kind} | change).items() if v is not None}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    hf, own = AutoConfig.from_pretrained(tmp_path), load_model_config(tmp_path)
    default_dim = hf.hidden_size // hf.num_attention_heads
    assert own.head_dim == (getattr(hf, "head_dim", None) or default_dim)
    assert own.num_kv_heads == hf.num_key_value_heads
    assert own.rms_norm_eps == hf.rms_norm_eps
    assert own.tie_word_embeddings == hf.tie_word_embeddings
    rope = hf.rope_parameters
    assert (own.rope.kind, own.rope.theta) == (rope["rope_type"], rope["rope_theta"])
    for name in ("factor", "low_freq_factor", "original_max_position_embeddings"):
        assert getattr(own.rope, name) == rope.get(name, getattr(own.rope, name))


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_stop_tokens_are_not_lost_with_a_file_that_cannot_be_read(
    tmp_path: Path, kind: str
) -> None:
    """A link of the Hub's cache may point to a file that was deleted."""
    write_model(tmp_path)
    file = tmp_path / "generation_config.json"
    makers = {"link": lambda: file.symlink_to("gone"), "pipe": lambda: os.mkfifo(file)}
    makers.get(kind, file.mkdir)()
    with pytest.raises(
        ValueError, match=r"^model\.path=.*generation_config\.json: (cannot be|is not)"
    ):
        check_model("model.path", tmp_path)


def test_the_index_says_which_file_a_tensor_comes_from(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "one.safetensors")
    save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, tmp_path / "two.safetensors")
    save_file({"a": torch.full((1,), 7.0)}, tmp_path / "zz_stale.safetensors")
    with pytest.raises(ValueError, match=r"a stands in one\.safetensors and in two\.safetensors"):
        HfReader(tmp_path)
    weight_map = {"a": "one.safetensors", "b": "two.safetensors"}
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"one\.safetensors holds b, which .* in two\.safetensors"):
        HfReader(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(1)}, tmp_path / "two.safetensors")
    reader = HfReader(tmp_path)
    assert (reader["a"].item(), reader["b"].item()) == (1.0, 0.0)
    assert reader.names() == ["a", "b"]


def test_an_export_replaces_an_older_one_as_a_whole(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    write_model(source)
    tensors = [("a", torch.ones(4)), ("b", torch.zeros(4))]
    save_hf_model(target, tensors, source, dtype=torch.float32, max_shard_bytes=16)
    assert (target / INDEX_NAME).is_file()

    def killed() -> Iterator[tuple[str, torch.Tensor]]:
        yield from tensors
        os._exit(9)

    def export() -> None:
        save_hf_model(target, killed(), source, dtype=torch.float32, max_shard_bytes=16)

    before = {file.name: file.stat().st_mtime_ns for file in target.iterdir()}
    run_ranks(1, export, killed=(0,), has_world=False)
    assert {file.name: file.stat().st_mtime_ns for file in target.iterdir()} == before
    save_hf_model(target, [("a", torch.full((4,), 2.0))], source, dtype=torch.float32)
    assert [file.name for file in target.glob("*model*")] == ["model.safetensors"]
    assert HfReader(target)["a"].tolist() == [2.0] * 4
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["source", "target"]
