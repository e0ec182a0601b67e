"""Random Hugging Face models of a few hundred kilobytes, on disk as transformers writes them, and
configs without one.

Used by the tests of every engine, of the drafter and of the Megatron policy. Weights are scaled up
and biases and norms are random, so that logits are far from flat and a wrong name, order or layout
shows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tlt_megatron.config.model_shape import tensor_shapes
from tlt_megatron.models.config import ModelConfig, RopeConfig

KINDS = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "glm4_moe",
)  # and mimo, which transformers lacks
_THETA = {"llama": 500000.0, "mistral": 10000.0}

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}


def tiny_config(**changes: Any) -> ModelConfig:
    """A qwen3 whose heads do not add up to its hidden size, with `changes`."""
    fields: dict[str, Any] = {
        "model_type": "qwen3",
        "vocab_size": 32,
        "hidden_size": 16,
        "ffn_size": 24,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 6,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(theta=100.0),
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "has_qkv_bias": False,
        "has_qk_norm": True,
    }
    return ModelConfig(**fields | changes)


def random_weights(config: ModelConfig, dtype: torch.dtype) -> list[tuple[str, Tensor]]:
    """A policy's tensors by name: 0.3 x normal, norms around 1; the same at every call."""
    generator = torch.Generator().manual_seed(3)
    weights = []
    for name, shape in tensor_shapes(config).items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        weights.append((name, (noise * 0.3 + name.endswith("norm.weight")).to(dtype)))
    return weights


def make_tiny_hf(
    path: Path,
    kind: str,
    *,
    tied: bool = False,
    vocab_size: int = 512,
    num_layers: int = 4,
    seed: int = 0,
    has_mtp: bool = False,
    **config: Any,
) -> Path:
    """Write a random float32 model of a `kind` of KINDS (config.json + model.safetensors) to the
    folder `path` and return it. With `has_mtp` it has a layer that predicts a further token.

    The same arguments always give the same weights. `config` goes to the transformers config
    verbatim: `make_tiny_hf(tmp_path / "m", "llama", rope_parameters={"rope_type": "linear",
    "factor": 2.0, "rope_theta": 1e4})`.
    """
    import transformers

    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": _THETA.get(kind, 1000000.0)},
    }
    if kind.startswith("qwen3"):
        settings["head_dim"] = 32  # not hidden_size / heads, as in the real family
    if kind == "qwen3_moe":
        settings |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        settings["norm_topk_prob"] = True
    if kind == "glm4_moe":
        settings |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        settings |= {"attention_bias": True, "head_dim": 32, "routed_scaling_factor": 1.5}
        settings["rope_parameters"] |= {"partial_rotary_factor": 0.5}
    if kind == "mistral":
        settings["sliding_window"] = None
    settings |= config
    name = "Qwen2" if kind == "mimo" else kind.title().replace("_", "")
    model_class = getattr(transformers, f"{name}ForCausalLM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(getattr(transformers, f"{name}Config")(**settings)).float()
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):  # large enough to choose other experts
                    buffer.add_(torch.randn_like(buffer) * 0.3)
            for parameter_name, parameter in model.named_parameters():
                if parameter.ndim == 1:  # norms around 1, biases around 0
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                elif "lm_head" in parameter_name or "embed_tokens" in parameter_name:
                    parameter.mul_(12.0)
                else:
                    parameter.mul_(4.0)
    model.save_pretrained(path)
    if kind == "mimo":
        change_json(path / "config.json", model_type="mimo", architectures=["MiMoForCausalLM"])
    if has_mtp:
        _add_mtp(path, num_layers, seed)
    return path


def change_json(file: Path, **changes: Any) -> None:
    """Set keys of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _add_mtp(path: Path, num_layers: int, seed: int) -> None:
    """Add a layer that predicts a further token, with the names of the family's checkpoints. GLM's
    also stores copies of embedding and LM head.
    """
    tensors = load_file(path / "model.safetensors")
    is_mimo = json.loads((path / "config.json").read_text())["model_type"] == "mimo"
    prefix = "model.mtp_layers.0." if is_mimo else f"model.layers.{num_layers}."
    names = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    if not is_mimo:
        names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    generator = torch.Generator().manual_seed(seed + 100)
    hidden = tensors["model.norm.weight"].numel()
    last = f"model.layers.{num_layers - 1}."
    shapes = {n.removeprefix(last): t.shape for n, t in tensors.items() if n.startswith(last)}
    shapes |= dict.fromkeys((f"{name}.weight" for name in names), torch.Size([hidden]))
    shapes[f"{names[2]}.weight"] = torch.Size([hidden, 2 * hidden])
    for name, shape in shapes.items():
        scale = 0.3 if len(shape) == 1 else 1.5 * shape[1] ** -0.5
        noise = scale * torch.randn(shape, generator=generator)
        tensors[prefix + name] = noise + name.endswith("norm.weight")
    if not is_mimo:
        tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    change_json(path / "config.json", num_nextn_predict_layers=1)
