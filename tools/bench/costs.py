"""What sampling noise and a draft step cost on a CPU, as shares of a decode pass of the target.

    python -m tools.bench costs

Noise: a search for the winner against noise for all tokens, by vocabulary. Draft step: the drafter's layer and head, the noise
and the choice of a token, by the number of token ids that are drafted. Target and drafter have random weights in the shapes of
SmolLM2-135M, or of another `--model`, and leave out attention over the context, so the shares are upper bounds. Logits have 2.8
nats of entropy.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from tlt_megatron.models.config import ModelConfig, RopeConfig, load_model_config
from tlt_megatron.models.draft_inference import DraftInference
from tlt_megatron.models.draft_model import DraftModel, make_draft_config
from tlt_megatron.models.transformer import Transformer
from tlt_megatron.speculation.sampling import add_noise, gumbel_noise, noisy_argmax
from tools.bench.measure import Spread, cpu_seconds, interleave, print_table, ratios, spread

_ENTROPY = 2.8  # nats: SmolLM2-135M at temperature 1
_SMOLLM2 = ModelConfig(
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


class _NoContext:
    """Attention that reads no earlier tokens."""

    def attend(self, layer: int, query_PNH: Tensor, kv_PKH: Tensor) -> Tensor:  # noqa: ARG002
        """Return the queries."""
        return query_PNH.flatten(1)


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this benchmark."""
    add("--model", help="folder with a config.json; only its shapes count")
    add("--dtype", default="float32", choices=("float32", "bfloat16"))
    add("--vocab-sizes", type=int, nargs="+", default=[1536, 49_152, 151_936], help="of noise")
    add("--num-ids", type=int, nargs="+", default=[0, 16_384, 8192, 4096], help="drafted; 0: all")
    add("--batch-sizes", type=int, nargs="+", default=[1, 8, 64])
    add("--rounds", type=int, default=15)


@torch.no_grad()
def run(options: argparse.Namespace) -> dict[str, object]:
    """Measure and print both tables. Return the values of the JSON."""
    config = load_model_config(options.model) if options.model else _SMOLLM2
    return {
        "dtype": options.dtype,
        "noise_fraction": _bench_noise(config, options),
        **_bench_draft_steps(config, options),
    }


def _random_model(config: ModelConfig, dtype: str) -> Transformer:
    """Return a model of these shapes with random weights, ready for passes without context."""
    model = Transformer(config, getattr(torch, dtype), torch.device("cpu"))
    for _, tensor in model.named_hf_tensors():
        tensor.normal_(std=0.02)
    model.rotary.reserve(1)
    model.pack()
    return model


def _logits_of_a_pass(model: Transformer, batch_size: int) -> Tensor:
    first_B = torch.zeros(batch_size, dtype=torch.int64)
    return model.logits(model.forward(torch.arange(batch_size), first_B, _NoContext()))


def _bench_noise(config: ModelConfig, options: argparse.Namespace) -> dict[str, dict[str, Spread]]:
    """Return, by vocabulary / batch size, milliseconds of a pass and of both forms, their ratio and their shares."""
    found = {}
    rows = []
    for vocab_size in options.vocab_sizes:
        model = _random_model(dataclasses.replace(config, vocab_size=vocab_size), options.dtype)
        for batch_size in options.batch_sizes:
            result = _measure_noise(model, batch_size, options.rounds)
            found[f"{vocab_size}/{batch_size}"] = result
            times = (result[f"{name}_ms"]["median"] for name in ("pass", "plain", "search"))
            shares = (f"{result[f'{name}_share']['median']:.1%}" for name in ("plain", "search"))
            rows.append([vocab_size, batch_size, *times, *result["ratio"].values(), *shares])
    title = f"noise of a decode pass, {options.dtype}, {options.rounds} rounds"
    columns = ("vocabulary", "batch", "pass ms", "plain ms", "search ms", "plain / search")
    columns += ("min", "max", "plain share", "search share")
    print_table(title, columns, rows, num_names=0)
    return found


def _measure_noise(model: Transformer, batch_size: int, rounds: int) -> dict[str, Spread]:
    vocab_size = model.config.vocab_size
    positions_B = torch.arange(batch_size)
    seeds_B = positions_B * 7_919
    generator = torch.Generator().manual_seed(0)
    scale = math.sqrt(2.0 * (math.log(vocab_size) - _ENTROPY))
    logits_BV = scale * torch.randn(batch_size, vocab_size, generator=generator)

    def decode() -> Tensor:
        return _logits_of_a_pass(model, batch_size)

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


def _bench_draft_steps(
    config: ModelConfig, options: argparse.Namespace
) -> dict[str, dict[str, Spread]]:
    """Return, by batch size / ids, the share of a decode pass, and milliseconds of a refresh by ids."""
    target = _random_model(config, options.dtype)
    head_VD = target.lm_head
    model = DraftModel(
        make_draft_config(config, "eagle", head_VD), embedding_VD=head_VD, lm_head_VD=head_VD
    )
    drafts = {n: DraftInference(model, head_VD.dtype, num_ids=n) for n in options.num_ids}
    for draft in drafts.values():
        draft.rotary.reserve(1)
    found = {}
    rows = []
    for batch_size in options.batch_sizes:
        variants = _draft_variants(target, drafts, batch_size)
        seconds = interleave(variants, options.rounds, cpu_seconds)
        for num_ids in drafts:
            of_pass, of_step = seconds[f"pass before {num_ids}"], seconds[f"{num_ids}"]
            share = found[f"{batch_size}/{num_ids}"] = ratios(of_step, of_pass)
            times = (1e3 * spread(values)["median"] for values in (of_pass, of_step))
            shares = (f"{value:.3f}" for value in share.values())
            rows.append([batch_size, num_ids or config.vocab_size, *times, *shares])
    title = f"draft step / decode pass, {options.dtype}, {options.rounds} rounds"
    columns = ("batch", "ids", "pass ms", "step ms", "share", "min", "max")
    print_table(title, columns, rows, num_names=0)
    refreshes = {f"{n}": draft.refresh for n, draft in drafts.items()}
    refresh_s = interleave(refreshes, options.rounds, cpu_seconds)
    refresh_ms = {name: spread([1e3 * s for s in values]) for name, values in refresh_s.items()}
    print({name: f"refresh {value['median']:.1f} ms" for name, value in refresh_ms.items()})
    return {"draft_step_fraction": found, "refresh_ms": refresh_ms}


def _draft_variants(
    target: Transformer, drafts: dict[int, DraftInference], batch_size: int
) -> dict[str, Callable[[], object]]:
    """Return a decode pass and a draft step for each drafter. A step follows a pass, as in decoding."""
    rows_B = torch.arange(batch_size)
    one = torch.ones((), dtype=torch.float64)

    def decode() -> Tensor:
        return noisy_argmax(_logits_of_a_pass(target, batch_size).float(), rows_B, rows_B)

    def step(draft: DraftInference) -> Tensor:
        hidden_BD = torch.zeros(batch_size, draft.config.hidden_size, dtype=draft.dtype)
        _, head_BD = draft.forward(rows_B, hidden_BD, torch.zeros_like(rows_B), _NoContext())
        noisy_BC = add_noise(draft.logits(head_BD), rows_B, rows_B, one, one, draft.ids_C)
        return noisy_BC.log_softmax(-1).max(-1).indices

    variants: dict[str, Callable[[], object]] = {}
    for num_ids, draft in drafts.items():
        variants[f"pass before {num_ids}"] = decode
        variants[f"{num_ids}"] = lambda draft=draft: step(draft)
    return variants
