"""Model FLOPs utilization: the operations that passes of the policy need over what the ranks' GPUs
could do.

The count is verl's (verl/utils/flops_counter.py at b178a3cd, `_estimate_qwen2_flops`), so that
numbers compare.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tlt_megatron.config.schema import RunConfig
from tlt_megatron.models.config import ModelConfig, load_model_config
from tlt_megatron.policy.policy_trainer import Inference

# Dense bfloat16 FLOP/s of the tensor cores, from NVIDIA's data sheets. Where a sheet has the rate
# with sparsity alone, half of it.
_PEAKS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "H200": 989e12,
    "H200 NVL": 835e12,
    "H100": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L20": 119.5e12,
    "L4": 121e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "A10": 125e12,
}


def peak_flops(gpu_name: str) -> float | None:
    """Return the bfloat16 FLOP/s of a GPU by torch's name of it ("NVIDIA H100 80GB HBM3"); None if
    unknown.
    """
    known = [name for name in _PEAKS if re.search(rf"\b{name}\b", gpu_name)]
    return _PEAKS[max(known, key=len)] if known else None


def forward_flops(model: ModelConfig, lengths: Sequence[int]) -> float:
    """Return the FLOPs of a forward pass over sequences of `lengths` tokens, each with causal
    attention.

    A multiply-add counts as two. The embedding table counts like the head. A backward pass takes
    twice as many.
    """
    heads, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention, dense = 2 * heads + 2 * kv, 3 * model.ffn_size
    layers = model.num_layers * (attention + dense)
    if (experts := model.experts) is not None:
        active = experts.num_per_token * experts.ffn_size + experts.shared_ffn_size
        sparse = experts.num_experts + 3 * active
        layers += len(experts.layers) * (sparse - dense)
    weights = model.hidden_size * (layers + 2 * model.vocab_size)
    squares = sum(length * length for length in lengths)
    return 2.0 * weights * sum(lengths) + 2.0 * model.num_layers * heads * squares


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilization:
    """Makes the metrics perf/mfu/* of a run whose GPUs are known."""

    model: ModelConfig
    reference: ModelConfig
    num_epochs: int  # passes of an update over its batch
    peak: float  # FLOP/s of all ranks

    def metrics(self, inference: Inference, step: Mapping[str, float]) -> dict[str, float]:
        """Return perf/mfu/actor and perf/mfu/actor_infer, each where its pass ran.

        `step` are the other metrics of the step. Responses that the update skips are not counted.
        """
        lengths = {
            rollout.key: rollout.num_tokens
            for scored in inference.plan.scored
            for rollout in scored.rollouts
        }
        flops = {}
        if "actor/num_updates" in step:
            updated = [n for key, n in lengths.items() if key not in inference.plan.skipped]
            count = 3 * self.num_epochs * forward_flops(self.model, updated)
            flops["actor"] = count / step["timing_s/update_actor"]
        if inference.old_logprobs is not None:
            has_reference = inference.ref_logprobs is not None
            passes = [self.model, *[self.reference] * has_reference]
            count = sum(forward_flops(model, list(lengths.values())) for model in passes)
            flops["actor_infer"] = count / step["timing_s/old_log_prob"]
        return {f"perf/mfu/{name}": rate / self.peak for name, rate in flops.items()}


def make_utilization(config: RunConfig, gpu_name: str, num_ranks: int) -> Utilization | None:
    """Return the utilization of a run in bfloat16 on GPUs with a known peak, else None."""
    peak = peak_flops(gpu_name)
    if peak is None or config.model.dtype != "bfloat16":
        return None
    return Utilization(
        model=load_model_config(config.model.path),
        reference=load_model_config(config.second_path or config.model.path),
        num_epochs=config.algorithm.num_epochs,
        peak=peak * num_ranks,
    )
