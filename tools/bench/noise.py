"""What sampling noise costs on a CPU, as a share of a decode pass: a search for the winner against noise for all tokens.

    python -m tools.bench noise

The pass has random weights in the shapes of SmolLM2-135M, or of another `--model`, and leaves out attention over the context,
so the shares are upper bounds. Logits have 2.8 nats of entropy.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable

import torch
from rich.console import Console
from torch import Tensor

from tlt_megatron.models.config import ModelConfig, RopeConfig, load_model_config
from tlt_megatron.models.transformer import Transformer
from tlt_megatron.speculation.sampling import gumbel_noise, noisy_argmax
from tools.bench.measure import cpu_seconds, interleave, print_table, ratios, spread

_ENTROPY = 2.8  # nats: SmolLM2-135M at temperature 1
SMOLLM2 = ModelConfig(
    model_type="llama",
    vocab_size=49_152,
    hidden_size=576,
    ffn_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=100_000.0),
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    has_qkv_bias=False,
    has_qk_norm=False,
)


class NoContext:
    """Attention that reads no earlier tokens."""

    def attend(self, layer: int, query_PNH: Tensor, kv_PKH: Tensor) -> Tensor:
        """Return the queries."""
        return query_PNH.flatten(1)


def random_model(config: ModelConfig, dtype: torch.dtype) -> Transformer:
    """Return a model of these shapes with random weights, ready for passes without context."""
    model = Transformer(config, dtype, torch.device("cpu"))
    for _, tensor in model.named_hf_tensors():
        tensor.normal_(std=0.02)
    model.rotary.reserve(1)
    model.pack()
    return model


def measure(model: Transformer, batch_size: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return milliseconds of a pass and of both forms, their ratio, and both as shares of the pass."""
    vocab_size = model.config.vocab_size
    positions_B = torch.arange(batch_size)
    seeds_B = positions_B * 7_919
    generator = torch.Generator().manual_seed(0)
    scale = math.sqrt(2.0 * (math.log(vocab_size) - _ENTROPY))
    logits_BV = scale * torch.randn(batch_size, vocab_size, generator=generator)
    first_B = torch.zeros(batch_size, dtype=torch.int64)

    def decode() -> Tensor:
        return model.logits(model.forward(positions_B, first_B, NoContext()))

    def plain() -> Tensor:
        return gumbel_noise(seeds_B, positions_B, vocab_size).add_(logits_BV).argmax(dim=1)

    def search() -> Tensor:
        return noisy_argmax(logits_BV, seeds_B, positions_B)

    if not torch.equal(plain(), search()):
        raise RuntimeError(f"vocab_size={vocab_size}, batch_size={batch_size}: tokens differ")
    # Each form follows a pass, as in decoding: its inputs are not in the cache.
    variants = {"pass": decode, "plain": plain, "second_pass": decode, "search": search}
    seconds = interleave(variants, rounds, cpu_seconds)
    result = {f"{name}_ms": spread([1e3 * s for s in of]) for name, of in seconds.items()}
    result["ratio"] = ratios(seconds["plain"], seconds["search"])
    for name in ("plain", "search"):
        result[f"{name}_share"] = ratios(seconds[name], seconds["pass"])
    return result


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this benchmark."""
    add("--model", help="folder with a config.json; only its shapes count")
    add("--dtype", default="float32", choices=("float32", "bfloat16"))
    add("--vocab-sizes", type=int, nargs="+", default=[1536, 49_152, 151_936])
    add("--batch-sizes", type=int, nargs="+", default=[1, 8, 64])
    add("--rounds", type=int, default=7)


@torch.no_grad()
def run(options: argparse.Namespace, console: Console) -> dict[str, object]:
    """Measure every vocabulary and batch size and print the table. Return the values of the JSON."""
    config = load_model_config(options.model) if options.model else SMOLLM2
    dtype = getattr(torch, options.dtype)
    rows = []
    found: dict[str, object] = {}
    for vocab_size in options.vocab_sizes:
        model = random_model(dataclasses.replace(config, vocab_size=vocab_size), dtype)
        for batch_size in options.batch_sizes:
            result = measure(model, batch_size, options.rounds)
            found[f"{vocab_size}/{batch_size}"] = result
            ratio = result["ratio"]
            shares = [f"{result[f'{name}_share']['median']:.1%}" for name in ("plain", "search")]
            rows.append(
                [
                    *(f"{vocab_size}", batch_size),
                    *(result[f"{name}_ms"]["median"] for name in ("pass", "plain", "search")),
                    f"{ratio['median']:.1f} ({ratio['min']:.1f}-{ratio['max']:.1f})",
                    *shares,
                ]
            )
    title = f"noise of a decode pass, {options.dtype}, {options.rounds} rounds"
    columns = ("vocabulary", "batch", "pass ms", "plain ms", "search ms", "plain / search")
    print_table(console, title, (*columns, "plain share", "search share"), rows)
    return {"dtype": options.dtype, "by_vocabulary_and_batch": found}
