"""What a draft step costs on a CPU, as a share of a decode pass of the target, by the number of token ids that are drafted.

    python -m tools.bench draft-step

Both have random weights in the shapes of SmolLM2-135M, or of another `--model`, and leave out attention over the context. A draft
step runs the drafter's layer and head, adds the noise, and chooses one token per row.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from rich.console import Console
from torch import Tensor

from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.draft_inference import DraftInference
from tlt_megatron.models.draft_model import DraftModel, make_draft_config
from tlt_megatron.models.transformer import Transformer
from tlt_megatron.speculation.sampling import add_noise, noisy_argmax
from tools.bench.measure import cpu_seconds, interleave, make_table, ratios, spread
from tools.bench.noise import SMOLLM2, NoContext, random_model


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this benchmark."""
    add("--model", help="folder with a config.json; only its shapes count")
    add("--dtype", default="float32", choices=("float32", "bfloat16"))
    add("--num-ids", type=int, nargs="+", default=[0, 16_384, 8192, 4096], help="0: all")
    add("--batch-sizes", type=int, nargs="+", default=[1, 8])
    add("--rounds", type=int, default=15)


@torch.no_grad()
def run(options: argparse.Namespace, console: Console) -> dict[str, object]:
    """Measure every batch size and number of ids and print the table. Return the values of the JSON."""
    config = load_model_config(options.model) if options.model else SMOLLM2
    target = random_model(config, getattr(torch, options.dtype))
    head_VD = target.lm_head
    model = DraftModel(
        make_draft_config(config, "eagle", head_VD), embedding_VD=head_VD, lm_head_VD=head_VD
    )
    drafts = {n: DraftInference(model, head_VD.dtype, num_ids=n) for n in options.num_ids}
    for draft in drafts.values():
        draft.rotary.reserve(1)
    title = f"draft step / decode pass, {options.dtype}, {options.rounds} rounds"
    table = make_table(title, "batch", "ids", "pass ms", "step ms", "share", "min", "max")
    found: dict[str, object] = {}
    for batch_size in options.batch_sizes:
        variants = _variants(target, drafts, batch_size)
        seconds = interleave(variants, options.rounds, cpu_seconds)
        for num_ids in drafts:
            share = ratios(seconds[f"{num_ids}"], seconds[f"pass before {num_ids}"])
            found[f"{batch_size}/{num_ids}"] = share
            times = [
                1e3 * spread(seconds[n])["median"] for n in (f"pass before {num_ids}", f"{num_ids}")
            ]
            cells = [*(f"{value:.2f}" for value in times), *(f"{v:.3f}" for v in share.values())]
            table.add_row(f"{batch_size}", f"{num_ids or config.vocab_size}", *cells)
    console.print(table)
    refresh = interleave(
        {f"{n}": d.refresh for n, d in drafts.items()}, options.rounds, cpu_seconds
    )
    refresh_ms = {name: spread([1e3 * s for s in values]) for name, values in refresh.items()}
    console.print({name: f"refresh {value['median']:.1f} ms" for name, value in refresh_ms.items()})
    return {"dtype": options.dtype, "draft_step_fraction": found, "refresh_ms": refresh_ms}


def _variants(
    target: Transformer, drafts: dict[int, DraftInference], batch_size: int
) -> dict[str, Callable[[], object]]:
    """Return a decode pass and a draft step for each drafter. A step follows a pass, as in decoding."""
    rows_B = torch.arange(batch_size)
    first_B = torch.zeros(batch_size, dtype=torch.int64)
    one = torch.ones((), dtype=torch.float64)

    def decode() -> Tensor:
        hidden_BD = target.forward(rows_B, first_B, NoContext())
        return noisy_argmax(target.logits(hidden_BD).float(), rows_B, rows_B)

    def step(draft: DraftInference) -> Tensor:
        hidden_BD = torch.zeros(batch_size, draft.config.hidden_size, dtype=draft.dtype)
        _, head_BD = draft.forward(rows_B, hidden_BD, first_B, NoContext())
        noisy_BC = add_noise(draft.logits(head_BD), rows_B, rows_B, one, one, draft.ids_C)
        return noisy_BC.log_softmax(-1).max(-1).indices

    variants: dict[str, Callable[[], object]] = {}
    for num_ids, draft in drafts.items():
        variants[f"pass before {num_ids}"] = decode
        variants[f"{num_ids}"] = lambda draft=draft: step(draft)
    return variants
