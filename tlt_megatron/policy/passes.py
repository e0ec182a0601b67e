"""Forward and backward passes over packed responses, and their sums over an update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from tlt_megatron.config.schema import AlgorithmSection
from tlt_megatron.policy.batching import Pack, RolloutKey, attach_targets, by_key
from tlt_megatron.policy.health import EngineDifference
from tlt_megatron.policy.interfaces import PolicyModel
from tlt_megatron.policy.policy_loss import policy_loss
from tlt_megatron.runtime.collectives import broadcast_object
from tlt_megatron.runtime.process_groups import ProcessGroups
from tlt_megatron.types import LossResult, MicroBatch, TokenLogprobs

if TYPE_CHECKING:
    from tlt_megatron.mcore.hidden_tap import HiddenStateTap


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What the losses need of responses that their passes do not give, [T] by response."""

    version: int  # of the policy before the update: RL steps done
    advantages: Mapping[RolloutKey, Tensor]
    old_logprobs: Mapping[RolloutKey, Tensor] | None = None  # float32; None: from the same pass
    ref_logprobs: Mapping[RolloutKey, Tensor] | None = None
    values: Mapping[RolloutKey, Tensor] | None = None  # float32; with a critic
    returns: Mapping[RolloutKey, Tensor] | None = None

    def attach(self, pack: Pack, section: AlgorithmSection, max_new_tokens: int) -> MicroBatch:
        """Return the micro-batch of `pack` with these targets."""

        def of_pack(values: Mapping[RolloutKey, Tensor] | None) -> list[Tensor] | None:
            return None if values is None else [values[key] for key in pack.keys]

        return attach_targets(
            pack.batch,
            pack.rollouts,
            advantages=[self.advantages[key] for key in pack.keys],
            old_logprobs=of_pack(self.old_logprobs),
            ref_logprobs=of_pack(self.ref_logprobs),
            old_values=of_pack(self.values),
            returns=of_pack(self.returns),
            aggregation=section.aggregation,
            max_new_tokens=max_new_tokens,
            mask_truncated=section.mask_truncated,
        )


class PolicyPasses:
    """The passes of one RL step on this rank. Peers of its model run the same packs together."""

    def __init__(
        self,
        model: PolicyModel,
        section: AlgorithmSection,
        groups: ProcessGroups,
        *,
        temperature: float,
        max_new_tokens: int,
    ) -> None:
        self.temperature = temperature
        self.max_new_tokens = max_new_tokens
        self.model = model
        self.section = section
        self.groups = groups
        self.sums: dict[str, float] = defaultdict(float)  # metrics, loss_count, num_tokens
        self.differences: dict[RolloutKey, EngineDifference] = {}  # of first passes

    def run(self, packs: Sequence[Pack], targets: Targets, tap: HiddenStateTap | None) -> None:
        """Accumulate the gradients of `packs` in the model.

        Without old log-probs, these are the policy's first passes: they compare the engines.
        """
        is_first_pass = targets.old_logprobs is None
        recorded: list[Tensor] = []  # policy log-probs [P] of each micro-batch, on the last stage

        def loss_fn(predicted: TokenLogprobs, batch: MicroBatch) -> LossResult:
            if is_first_pass:
                recorded.append(predicted.policy_logprobs.detach())
            return policy_loss(predicted, batch, self.section)

        batches = [targets.attach(pack, self.section, self.max_new_tokens) for pack in packs]
        sums = self.model.forward_backward(batches, self.temperature, loss_fn, tap=tap)
        sums["loss_count"] = float(sum(batch.loss_count for batch in batches))
        sums["num_tokens"] = float(sum(batch.loss_mask.sum() for batch in batches))
        for name, value in sums.items():
            self.sums[name] += value
        if is_first_pass:
            pp = self.groups.pp
            known = [logprobs_P.cpu() for logprobs_P in recorded]
            mine = compare_engines(packs, known, targets.version) if pp.is_last else None
            self.differences |= broadcast_object(mine, pp, source=pp.size - 1) or {}


def compare_engines(
    packs: Sequence[Pack], policy_logprobs: Sequence[Tensor], version: int
) -> dict[RolloutKey, EngineDifference]:
    """Compare `policy_logprobs`, [P] of each pack, with those of the rollouts.

    Only of tokens that the policy of `version` drew.
    """
    training = by_key(packs, policy_logprobs)
    return {
        key: EngineDifference.of_newest(training[key], rollout)
        for pack in packs
        for key, rollout in zip(pack.keys, pack.rollouts, strict=True)
        if rollout.policy_version == version
    }
