"""What exactness costs: acceptance of noise-keyed drafts and of rejection sampling, on the same distributions.

    python -m tools.bench coupling --model build/tiny_policy --drafter build/tiny_drafter \
        --prompts build/tiny_policy/eval.jsonl

Both distributions, the policy's and the drafter's, are taken after responses of the policy. With one draft, rejection sampling
accepts 1 - TV(p, q), the upper bound for independent draws. Shared noise accepts sum_i 1 / sum_j max(p_j / p_i, q_j / q_i)
(Daliri, Musco, Suresh 2024). With several drafts at one node, SpecInfer rejects recursively without replacement (Miao et al.
2024), and shared noise takes the drafter's best candidates under the noise. Shapes: N rows, V tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from rich.console import Console
from torch import Tensor

from tlt_megatron.config.schema import DrafterSection
from tlt_megatron.drafter.drafter_loss import make_objective, unroll_draft
from tlt_megatron.drafter.packing import pack_batch
from tools.bench.measure import add_policy_options, print_table
from tools.load_engine import LoadedPolicy

_Scheme = Callable[[Tensor, Tensor, int, torch.Generator], Tensor]
_WIDTHS = (2, 4)  # drafts at one node
_NUM_DRAWS = 64  # for each row, if no formula is known


def acceptances(
    target_NV: Tensor, draft_NV: Tensor, generator: torch.Generator
) -> dict[str, float]:
    """Return, by scheme, the mean probability over the rows that the policy's token is among the drafts."""
    p, q = target_NV.double(), draft_NV.double()
    rows_N = torch.arange(len(p))
    result = {
        "1: independent draws": (p * q).sum(1).mean(),
        "1: greedy draft": p[rows_N, q.argmax(1)].mean(),
        "1: rejection, sampled draft (1 - TV)": torch.minimum(p, q).sum(1).mean(),
        "1: shared noise": shared_noise(p, q).mean(),
    }
    for width in _WIDTHS:
        greedy = p.gather(1, q.topk(width).indices).sum(1).mean()
        result[f"{width}: greedy drafts"] = greedy
        result[f"{width}: SpecInfer, sampled drafts"] = _mean(_specinfer, p, q, width, generator)
        result[f"{width}: shared noise"] = _mean(_best_by_noise, p, q, width, generator)
    return {name: float(value) for name, value in result.items()}


def shared_noise(p_NV: Tensor, q_NV: Tensor) -> Tensor:
    """Return [N]: the probability that argmax(log p + noise) = argmax(log q + noise) for the same Gumbel noise."""
    tiny = torch.finfo(p_NV.dtype).tiny
    p, q = p_NV.clamp(min=tiny), q_NV.clamp(min=tiny)
    ratios_NVV = torch.maximum(p.unsqueeze(1) / p.unsqueeze(2), q.unsqueeze(1) / q.unsqueeze(2))
    return (1.0 / ratios_NVV.sum(2)).sum(1)


def _mean(
    scheme: _Scheme, p_NV: Tensor, q_NV: Tensor, width: int, generator: torch.Generator
) -> Tensor:
    draws = [scheme(p_NV, q_NV, width, generator).double() for _ in range(_NUM_DRAWS)]
    return torch.stack(draws).mean()


def _best_by_noise(p_NV: Tensor, q_NV: Tensor, width: int, generator: torch.Generator) -> Tensor:
    """Return [N] bool: whether the policy's draw is among the drafter's best `width` under the same noise."""
    noise_NV = -torch.empty_like(p_NV).exponential_(generator=generator).log()
    drawn_N1 = (p_NV.log() + noise_NV).argmax(1, keepdim=True)
    return ((q_NV.log() + noise_NV).topk(width).indices == drawn_N1).any(1)


def _specinfer(p_NV: Tensor, q_NV: Tensor, width: int, generator: torch.Generator) -> Tensor:
    """Return [N] bool: whether recursive rejection accepts one of `width` drafts, drawn without replacement."""
    accepted_N = torch.zeros(len(p_NV), dtype=torch.bool)
    for _ in range(width):
        draft_N1 = torch.multinomial(q_NV, 1, generator=generator)
        chance_N = (p_NV.gather(1, draft_N1) / q_NV.gather(1, draft_N1)).squeeze(1)
        accepted_N |= torch.rand(len(p_NV), generator=generator, dtype=p_NV.dtype) < chance_N
        p_NV = _normalized((p_NV - q_NV).clamp(min=0.0))
        q_NV = _normalized(q_NV.scatter(1, draft_N1, 0.0))
    return accepted_N


def _normalized(weights_NV: Tensor) -> Tensor:
    """Scale rows to sum 1. An empty row becomes uniform; it occurs only after an accepted draft."""
    sums_N1 = weights_NV.sum(1, keepdim=True)
    uniform = torch.full_like(weights_NV, 1.0 / weights_NV.shape[1])
    return torch.where(sums_N1 > 1e-300, weights_NV / sums_N1.clamp(min=1e-300), uniform)


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this benchmark."""
    add_policy_options(add, "eval")
    add("--num-prompts", type=int, default=32)
    add("--num-tokens", type=int, default=200)


@torch.no_grad()
def run(options: argparse.Namespace, console: Console) -> dict[str, object]:
    """Measure at the first drafted token and print the table. Return the values of the JSON."""
    policy = LoadedPolicy(options.model, max_new_tokens=options.num_tokens)
    prompts = policy.prompts(options.prompts, options.num_prompts)
    params = policy.params(options.num_tokens, seed=4)
    batch = pack_batch(policy.draft_sequences(prompts, params))
    model = policy.load_drafter(options.drafter)
    head_VD = model.lm_head_VD
    objective = make_objective(DrafterSection(algorithm="hass"))
    _, head_inputs = unroll_draft(model, batch, objective)
    rows_M = batch.loss_mask.nonzero().squeeze(-1)
    target_MV = (batch.target_hidden[rows_M] @ head_VD.t()).softmax(1)
    draft_MV = (head_inputs[0][rows_M] @ head_VD.t()).softmax(1)
    measured = acceptances(target_MV, draft_MV, torch.Generator().manual_seed(0))
    entropy = float(-(target_MV * target_MV.clamp(min=1e-30).log()).sum(1).mean())
    title = f"{len(rows_M)} tokens, {entropy:.2f} nats of entropy"
    rows = ([name, f"{value:.3f}"] for name, value in measured.items())
    print_table(console, title, ("drafts: scheme", "accepted"), rows)
    return {"num_tokens": len(rows_M), "entropy": entropy, "accepted": measured}
