"""The engine of supervised training: it draws nothing and gives the answers of the data set. So a
step of `algorithm.advantage=sft` is an RL step whose rollouts are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tlt_megatron.engines.base import EngineStats, GenerationStopped, PassRecord
from tlt_megatron.types import FinishReason, Prompt, Rollout, RolloutGroup, SamplingParams


class AnswersEngine:
    """Satisfies `engines.base.RolloutEngine`. It needs no weights."""

    def __init__(self) -> None:
        self._stats = EngineStats(seconds=1e-9)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,  # noqa: ARG002
        *,
        policy_version: int,  # noqa: ARG002
        on_finish: Callable[[Rollout], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
        **_: Any,
    ) -> list[RolloutGroup]:
        """Return the answer of each prompt. No policy drew it, so its version is -1."""
        if should_stop is not None and should_stop():
            raise GenerationStopped("told to stop before the answers were read")
        groups = []
        for prompt in prompts:
            assert prompt.answer is not None
            num_tokens = len(prompt.answer.token_ids)
            mask = None if all(prompt.answer.mask) else torch.tensor(prompt.answer.mask)
            rollout = Rollout(
                prompt_id=prompt.prompt_id,
                draw_index=prompt.draw_index,
                sample_index=0,
                prompt_ids=prompt.token_ids,
                token_ids=torch.tensor(prompt.answer.token_ids),
                logprobs=torch.zeros(num_tokens),
                policy_logprobs=torch.zeros(num_tokens),
                finish_reason=FinishReason.STOP,
                versions=((-1, num_tokens),),
                loss_mask=mask,
            )
            if on_finish is not None:
                on_finish(rollout)
            groups.append(RolloutGroup(prompt=prompt, rollouts=(rollout,)))
        return groups

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], **_: Any) -> None:
        """Leave the weights with the trainer."""

    def target_tensors(self) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("no drafter is trained")

    def drafted_ids(self) -> Tensor | None:
        return None

    def load_drafter_weights(self, tensors: Mapping[str, Tensor], **_: Any) -> None:
        raise NotImplementedError("there is no drafter")

    def pause_speculation(self, is_paused: bool) -> bool:  # noqa: ARG002
        return False

    def free_kv(self) -> None: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def stats(self) -> EngineStats:
        return self._stats

    def take_passes(self) -> list[PassRecord]:
        return []

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None: ...

    def close(self) -> None: ...
