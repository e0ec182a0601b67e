"""The forward pass equals transformers' for every family, rope kind and head layout; weights go in
and out by name.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from tests.model_files import write_model
from tests.tiny_models import KINDS, LLAMA3, make_tiny_hf
from tlt_megatron.config.model_shape import tensor_shapes
from tlt_megatron.models.attention.paged import PrefillAttention, PrefillSegment
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.hf_io import HfReader
from tlt_megatron.models.kv_cache import KvCache
from tlt_megatron.models.transformer import Transformer

CPU = torch.device("cpu")
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 48,
    "rope_theta": 10000.0,
}


def load(path: Path, dtype: torch.dtype) -> Transformer:
    model = Transformer(load_model_config(path), dtype, CPU)
    for name, tensor in HfReader(path).items():
        model.load_hf(name, tensor)
    return model


def logits_of(model: Transformer, token_ids_T: Tensor) -> Tensor:
    length = token_ids_T.numel()
    cache = KvCache(model.config, num_pages=2, page_size=length, dtype=model.dtype, device=CPU)
    slots = torch.arange(length)
    segment = PrefillSegment(new_slots_C=slots, context_slots_S=slots)
    model.rotary.reserve(length)
    hidden_TD, _ = model.forward(token_ids_T, slots, PrefillAttention(cache, [segment]))
    return model.logits(hidden_TD)


@pytest.mark.parametrize(
    "kind, options",
    [
        ("llama", {}),
        ("llama", {"rope_parameters": LINEAR}),
        ("llama", {"rope_parameters": LLAMA3}),
        ("llama", {"num_key_value_heads": 4}),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen2", {"rope_parameters": YARN}),
        ("qwen2", {"rope_parameters": YARN | {"truncate": False, "attention_factor": 1.4}}),
        ("qwen3", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.1}}),
        ("qwen2", {"tied": True}),
        ("qwen3", {}),
        ("qwen3", {"tied": True, "rope_parameters": LINEAR}),
        ("qwen3_moe", {"mlp_only_layers": [0]}),
        ("glm4_moe", {}),
        ("glm4_moe", {"use_qk_norm": True, "attention_bias": False, "n_shared_experts": 2}),
        ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 3}),
    ],
)
def test_logits_equal_transformers(kind: str, options: dict, tmp_path: Path) -> None:
    path = make_tiny_hf(tmp_path / "m", kind, num_layers=2, vocab_size=96, **options)
    tokens = torch.randint(96, (150,), generator=torch.Generator().manual_seed(1))
    reference = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(tokens.unsqueeze(0)).logits[0]
        logits = logits_of(load(path, torch.float32), tokens)
    assert expected.std() > 0.5
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


LENGTH = "original_max_position_embeddings"
SCALED = {name: value for name, value in LLAMA3.items() if name not in (LENGTH, "rope_theta")}
Change = dict[str, object]


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("llama", {"rope_scaling": SCALED, LENGTH: 64, "rope_parameters": None}),
        ("llama", {"rope_parameters": SCALED | {"rope_theta": 1e4}, LENGTH: 64}),
        ("llama", {"rope_scaling": SCALED | {LENGTH: 64}, LENGTH: 64, "rope_parameters": None}),
        ("qwen3", {"rope_scaling": {"type": "yarn", "factor": 4.0}, LENGTH: 48}),
        ("qwen2", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "rope_theta": 5e5}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 512}),
    ],
)
def test_a_config_as_others_write_it_gives_the_logits_of_transformers(
    kind: str, change: Change, tmp_path: Path
) -> None:
    path = make_tiny_hf(tmp_path / "m", kind, num_layers=2, vocab_size=96)
    settings = json.loads((path / "config.json").read_text()) | change
    if change.get("sliding_window", 0) is None:  # the key is absent, and the context shorter
        del settings["sliding_window"]
    (path / "config.json").write_text(json.dumps(settings))
    tokens = torch.randint(96, (150,), generator=torch.Generator().manual_seed(1))
    reference = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(tokens.unsqueeze(0)).logits[0].log_softmax(-1)
        logprobs = logits_of(load(path, torch.float32), tokens).log_softmax(-1)
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0.0)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("llama", {"rope_scaling": SCALED | {LENGTH: 32}, LENGTH: 64}, f"{LENGTH}=64: must be 32,"),
        ("mistral", {"max_position_embeddings": 8192}, "sliding_window=4096: must be null, without the key it is 4096"),
        ("mistral", {"max_position_embeddings": 8192, "sliding_window": 4096}, "sliding_window=4096: must be null"),
    ],
)  # fmt: skip
def test_a_config_that_transformers_computes_in_another_way_is_refused(
    kind: str, change: Change, message: str, tmp_path: Path
) -> None:
    write_model(tmp_path, model_type=kind, **change)
    with pytest.raises(ValueError, match=re.escape(message)):
        load_model_config(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
def test_named_tensors_give_back_what_was_loaded(kind: str, tied: bool, tmp_path: Path) -> None:
    """Their shapes follow from the config."""
    path = make_tiny_hf(tmp_path / "m", kind, num_layers=2, vocab_size=40, tied=tied)
    saved = dict(HfReader(path).items())
    model = load(path, torch.float32)
    given = dict(model.named_hf_tensors())
    assert set(given) == set(saved) == model.hf_names()
    shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    assert shapes == tensor_shapes(model.config)
    assert ("lm_head.weight" in given) is not tied
    for name, tensor in given.items():
        torch.testing.assert_close(tensor, saved[name], atol=0, rtol=0)


def test_unknown_name_and_wrong_shape_are_refused(tmp_path: Path) -> None:
    path = make_tiny_hf(tmp_path / "m", "llama", num_layers=1, vocab_size=40, tied=True)
    model = load(path, torch.float32)
    with pytest.raises(ValueError, match=r"'model\.layers\.1\.x' is unknown"):
        model.load_hf("model.layers.1.x", torch.zeros(1))
    with pytest.raises(ValueError, match="tied to"):
        model.load_hf("lm_head.weight", torch.zeros(40, 64))
    with pytest.raises(ValueError, match=r"model.norm.weight has shape \(3,\): must be \(64,\)"):
        model.load_hf("model.norm.weight", torch.zeros(3))
