"""What the tests of the Megatron policy share: tiny packed data, a loss, and a policy on any layout
of forked ranks.

Importing this imports megatron.core in the test process, so that forked ranks need not.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.policy_batches import random_batch
from tlt_megatron.config.policy_sections import LORA_TARGETS
from tlt_megatron.config.schema import (
    McoreSection,
    ModelSection,
    OptimizerSection,
    ParallelSection,
)
from tlt_megatron.mcore import cpu
from tlt_megatron.mcore.hidden_tap import HiddenStateTap
from tlt_megatron.mcore.initialize import initialize_model_parallel
from tlt_megatron.mcore.policy_model import McorePolicyModel
from tlt_megatron.mcore.reference_model import McoreReferenceModel
from tlt_megatron.models.hf_io import HfReader
from tlt_megatron.runtime.device import select_device
from tlt_megatron.runtime.process_groups import ProcessGroups, group_of
from tlt_megatron.types import DraftSequence, LossResult, MicroBatch, ScoredGroup, TokenLogprobs

cpu.install()
for _name in ("dist_checkpointing", "models.gpt.gpt_layer_specs", "optimizer"):
    importlib.import_module(f"megatron.core.{_name}")

VOCAB_SIZE = 512
OPTIMIZER = OptimizerSection(lr=1e-3, weight_decay=0.1, clip_grad=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """A layout of ranks; data parallelism is what is left."""

    world: int
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    virtual: int = 1
    expert: int = 1

    @property
    def parallel(self) -> ParallelSection:
        return ParallelSection(
            tensor=self.tensor,
            context=self.context,
            pipeline=self.pipeline,
            virtual_pipeline=self.virtual,
            expert=self.expert,
        )


def build_policy(
    model_path: Path,
    layout: Layout,
    *,
    optimizer: OptimizerSection = OPTIMIZER,
    num_updates: int = 1,
    dtype: str = "float32",
    keep_reference: bool = False,
    reference: Path | None = None,
    lora_rank: int = 0,
    lora_alpha: float = 32.0,
    lora_targets: Sequence[str] = LORA_TARGETS,
    **mcore: Any,
) -> tuple[McorePolicyModel, ProcessGroups]:
    """On every forked rank of `layout`."""
    world = group_of(dist.group.WORLD)
    groups = initialize_model_parallel(layout.parallel, world, seed=1)
    layers: dict[str, Any] = {
        "parallel": layout.parallel,
        "mcore": McoreSection(**mcore),
        "groups": groups,
        "device": select_device("cpu"),
    }
    second = None
    if reference is not None:
        section = ModelSection(path=str(reference), dtype=dtype)
        second = McoreReferenceModel(model=section, **layers)
    policy = McorePolicyModel(
        model=ModelSection(
            path=str(model_path),
            dtype=dtype,
            lora_rank=lora_rank,
            lora_alpha=lora_alpha,
            lora_targets=[*lora_targets],
        ),
        optimizer=optimizer,
        num_updates=num_updates,
        keep_reference=keep_reference,
        reference=second,
        **layers,
    )
    return policy, groups


def make_micro_batch(lengths: Sequence[int], seed: int) -> MicroBatch:
    """Sequences of `lengths` random tokens; the first third of each (one token at least) is
    prompt.
    """
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)
    token_ids = torch.randint(0, VOCAB_SIZE, (num_tokens,), generator=generator)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    labels, loss_mask = token_ids.roll(-1), torch.ones(num_tokens)
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        labels[end - 1] = 0
        loss_mask[start : start + max(1, (end - start) // 3) - 1] = 0
        loss_mask[end - 1] = 0
    return MicroBatch(
        token_ids=token_ids,
        labels=labels,
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=bounds.to(torch.int32),
        loss_mask=loss_mask,
        loss_weights=loss_mask * torch.rand(num_tokens, generator=generator),
        advantages=torch.randn(num_tokens, generator=generator),
        old_logprobs=torch.zeros(num_tokens),
        rollout_logprobs=torch.zeros(num_tokens),
        loss_count=int(loss_mask.sum()),
    )


# Uneven: 5 micro-batches of 1 to 3 sequences, 5 to 22 tokens, odd totals among them.
LENGTHS = ((7, 13), (5,), (9, 2, 11), (17,), (3, 8))


def make_batch(seed: int) -> list[MicroBatch]:
    """The micro-batches of one optimizer step over all ranks."""
    return [make_micro_batch(lengths, 100 * seed + i) for i, lengths in enumerate(LENGTHS)]


def scored_batch(seed: int) -> list[ScoredGroup]:
    """Two responses to each of three prompts."""
    lengths = [[3 + 4 * g + 2 * i for g in range(2)] for i in range(3)]
    return random_batch(seed, VOCAB_SIZE, lengths, [(1.0, float(i)) for i in range(3)])


def share_of(batch: list[MicroBatch], groups: ProcessGroups, shares: Sequence[int]) -> list:
    """This data-parallel rank's part, where rank i has shares[i] micro-batches."""
    start = sum(shares[: groups.dp.rank])
    return batch[start : start + shares[groups.dp.rank]]


def tiny_loss(logprobs: TokenLogprobs, micro_batch: MicroBatch) -> LossResult:
    """Weighted policy gradient with a little entropy: every part of the log-probs gets a
    gradient.
    """
    per_token = -logprobs.logprobs * micro_batch.advantages - 0.1 * logprobs.entropy
    loss_sum = (per_token * micro_batch.loss_weights).sum()
    return LossResult(
        loss_sum=loss_sum,
        count=micro_batch.loss_count,
        metrics={
            "loss": loss_sum.detach(),
            "tokens": micro_batch.loss_mask.sum(),
        },
    )


def train(
    policy: McorePolicyModel,
    groups: ProcessGroups,
    seeds: Sequence[int],
    shares: Sequence[int] = (len(LENGTHS),),
    between: Callable[[McorePolicyModel], None] = lambda policy: None,
    make: Callable[[int], list[MicroBatch]] = make_batch,
) -> dict[str, Any]:
    """One optimizer step per seed; metric sums over data-parallel ranks, stats, and the weights at
    the end.

    `between` is called before each step. `make` returns the micro-batches of all ranks for a seed.
    """
    sums, stats = [], []
    for seed in seeds:
        between(policy)
        share = share_of(make(seed), groups, shares)
        found = policy.forward_backward(share, 0.8, tiny_loss)  # empty without micro-batches
        sums.append({"loss": 0.0, "tokens": 0.0} | found)
        stats.append(policy.optimizer_step())
    return {
        "sums": sums,
        "stats": stats,
        "weights": export(policy),
        "dp_rank": groups.dp.rank,
    }


def tap_states(
    policy: McorePolicyModel, batches: list[MicroBatch], aux_layer_ids: tuple[int, ...] = ()
) -> tuple[list[DraftSequence], list[Tensor]]:
    """What a tap of a pass over this rank's micro-batches gives, and the log-probs of that pass."""
    tapped: list[DraftSequence] = []
    tap = HiddenStateTap(
        on_sequence=tapped.append, max_bytes=1 << 20, hidden_size=64, aux_layer_ids=aux_layer_ids
    )
    return tapped, [each.logprobs for each in policy.infer_logprobs(batches, 1.0, tap=tap)]


def load_hf(path: Path) -> Any:
    """The model by transformers, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path).float().eval()


def hf_logits(model: Any, micro_batch: MicroBatch) -> torch.Tensor:
    """The logits [P, V] of transformers, one sequence at a time."""
    sequences = micro_batch.token_ids.split(micro_batch.cu_seqlens.diff().tolist())
    return torch.cat([model(token_ids[None]).logits[0] for token_ids in sequences])


def export(policy: McorePolicyModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.export_hf_weights()}


def exports_source(policy: McorePolicyModel, path: Path) -> bool:
    """Whether the policy exports the weights of the folder `path`, bit for bit."""
    source, exported = dict(HfReader(path).items()), export(policy)
    same_bits = (torch.equal(exported[name], tensor) for name, tensor in source.items())
    return exported.keys() == source.keys() and all(same_bits)


def check_same_bits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Each weight bit for bit."""
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


def check_weights(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], rel: float = 1e-5
) -> None:
    """Each weight to `rel` of its norm."""
    for name, weight in expected.items():
        assert (found[name] - weight).norm() <= rel * weight.norm(), name


def check_trained(
    results: Sequence[dict[str, Any]], expected: dict[str, Any], rel: float = 1e-5
) -> None:
    """What `train` returned on every rank: losses, gradient norms and weights are those of one
    rank.
    """
    for step, sums in enumerate(expected["sums"]):
        by_dp_rank = {result["dp_rank"]: result["sums"][step] for result in results}
        for name, value in sums.items():
            total = sum(part[name] for part in by_dp_rank.values())
            assert total == pytest.approx(value, rel=rel)
    for result in results:
        for mine, theirs in zip(result["stats"], expected["stats"], strict=True):
            assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=rel)
            assert not mine.is_skipped
        check_weights(result["weights"], expected["weights"])
