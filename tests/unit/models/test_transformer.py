"""The forward pass equals transformers' for every family, rope kind and head layout; weights go in
and out by name.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

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
