"""What sampling noise and a draft step cost on a CPU, as shares of a decode pass of the target.

    python -m tools.bench costs

Noise: a search for the winner against noise for all tokens, by vocabulary. Draft step: the
drafter's layer and head, the noise and the choice of a token, by the number of token ids that are
drafted. Target and drafter have random weights in the shapes of SmolLM2-135M, or of another
`--model`. Passes leave out attention over the context and the draw, so shares are upper bounds.
Logits have 2.8 nats of entropy.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from tlt_megatron.models.config import ModelConfig, load_model_config
from tlt_megatron.models.draft_inference import DraftInference
from tlt_megatron.models.draft_model import DraftModel, make_draft_config
from tlt_megatron.models.transformer import Transformer
from tlt_megatron.speculation.sampling import add_noise, gumbel_noise, noisy_argmax
from tools.bench.measure import Spread, cpu_seconds, interleave, ratios, spread
from tools.gpu.shapes import MODEL_CONFIGS
from tools.print_tables import print_table

_ENTROPY = 2.8  # nats: SmolLM2-135M at temperature 1
Shares = dict[str, dict[str, Spread]]


class _NoContext:
    """Attention that reads no earlier tokens."""

    def attend(self, layer: int, query_PNH: Tensor, kv_PKH: Tensor) -> Tensor:  # noqa: ARG002
        """Return the queries."""
        return query_PNH.flatten(1)


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this benchmark."""
    small = str(MODEL_CONFIGS / "smollm2-135m")
    add("--model", default=small, help="folder with a config.json; only its shapes count")
    add("--dtype", default="float32", choices=("float32", "bfloat16"))
    add("--vocab-sizes", type=int, nargs="+", default=[1536, 49_152, 151_936], help="of noise")
    add("--num-ids", type=int, nargs="+", default=[0, 16_384, 8192, 4096], help="drafted; 0: all")
    add("--batch-sizes", type=int, nargs="+", default=[1, 8, 64])
    add("--rounds", type=int, default=15)


@torch.no_grad()
def run(options: argparse.Namespace) -> dict[str, object]:
    """Measure and print a table of each. Return the values of the JSON."""
    config, batch_sizes = load_model_config(options.model), options.batch_sizes
    noise: dict[str, Shares] = {}
    for vocab_size in options.vocab_sizes:
        model = _random_model(dataclasses.replace(config, vocab_size=vocab_size), options.dtype)
        for size in batch_sizes:
            forms = _noise_forms(vocab_size, size)
            noise[f"{vocab_size}/{size}"] = _measure(model, size, forms, options.rounds)
    target = _random_model(config, options.dtype)
    drafts = {f"{n}": _random_draft(target, n) for n in options.num_ids}
    steps: dict[str, Shares] = {}
    for size in batch_sizes:
        forms = {name: partial(_draft_step, draft, size) for name, draft in drafts.items()}
        steps[f"{config.vocab_size}/{size}"] = _measure(target, size, forms, options.rounds)
    _print(f"noise of a decode pass, {options.dtype}", "form", noise)
    _print(f"draft step / decode pass, {options.dtype}", "ids", steps)
    return {"dtype": options.dtype, "noise": noise, "draft_step": steps}


def _measure(
    model: Transformer, batch_size: int, forms: Mapping[str, Callable[[], object]], rounds: int
) -> Shares:
    """Return, by form, the milliseconds of a pass and of the form, and its share of the pass.

    Each form follows a pass, as in decoding: its inputs are not in the cache.
    """
    first_B = torch.zeros(batch_size, dtype=torch.int64)

    def decode() -> Tensor:
        hidden_BD, _ = model.forward(torch.arange(batch_size), first_B, _NoContext())
        return model.logits(hidden_BD)

    found: Shares = {}
    for name, form in forms.items():
        seconds = interleave({"pass": decode, "form": form}, rounds, cpu_seconds)
        found[name] = {
            "pass_ms": spread([1e3 * s for s in seconds["pass"]]),
            "ms": spread([1e3 * s for s in seconds["form"]]),
            "share": ratios(seconds["form"], seconds["pass"]),
        }
    return found


def _print(title: str, form: str, found: Mapping[str, Shares]) -> None:
    rows = []
    for key, forms in found.items():
        for name, each in forms.items():
            times = (each["pass_ms"]["median"], each["ms"]["median"])
            rows.append(
                [*key.split("/"), name, *times, *(f"{s:.3f}" for s in each["share"].values())]
            )
    columns = ("vocabulary", "batch", form, "pass ms", "ms", "share", "min", "max")
    print_table(title, columns, rows, num_names=0)


def _random_model(config: ModelConfig, dtype: str) -> Transformer:
    """Return a model of these shapes with random weights, ready for passes without context."""
    model = Transformer(config, getattr(torch, dtype), torch.device("cpu"))
    for _, tensor in model.named_hf_tensors():
        tensor.normal_(std=0.02)
    model.rotary.reserve(1)
    model.pack()
    return model


def _noise_forms(vocab_size: int, batch_size: int) -> dict[str, Callable[[], Tensor]]:
    """Return both ways to draw the tokens of a pass."""
    positions_B = torch.arange(batch_size)
    seeds_B = positions_B * 7_919
    generator = torch.Generator().manual_seed(0)
    scale = math.sqrt(2.0 * (math.log(vocab_size) - _ENTROPY))
    logits_BV = scale * torch.randn(batch_size, vocab_size, generator=generator)

    def every_token() -> Tensor:
        return gumbel_noise(seeds_B, positions_B, vocab_size).add_(logits_BV).argmax(dim=1)

    return {
        "every token": every_token,
        "search": partial(noisy_argmax, logits_BV, seeds_B, positions_B),
    }


def _random_draft(target: Transformer, num_ids: int) -> DraftInference:
    head_VD = target.lm_head
    config = make_draft_config(target.config, "eagle", head_VD)
    model = DraftModel(config, embedding_VD=head_VD, lm_head_VD=head_VD)
    draft = DraftInference(model, num_ids=num_ids)
    draft.rotary.reserve(1)
    return draft


def _draft_step(draft: DraftInference, batch_size: int) -> Tensor:
    rows_B = torch.arange(batch_size)
    one = torch.ones((), dtype=torch.float64)
    hidden_BD = torch.zeros(batch_size, draft.config.hidden_size, dtype=draft.dtype)
    _, head_BD = draft.forward(rows_B, hidden_BD, torch.zeros_like(rows_B), _NoContext())
    noisy_BC = add_noise(draft.logits(head_BD), rows_B, rows_B, one, one, draft.ids_C)
    return noisy_BC.log_softmax(-1).max(-1).indices
