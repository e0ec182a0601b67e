"""Conversations of the policy with the environment of `rollout.environment`, for the rollout
worker.

A turn of the policy is a request of the engine. While the environment answers it in a reward
worker, the engine goes on with other conversations. The answered turn comes back as a longer
prompt, which keeps the sample index and the positions of the sampling noise. So a conversation's
tokens do not depend on how long an answer takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tlt_megatron.config.schema import RolloutSection
from tlt_megatron.data.tokenizer import Tokenizer
from tlt_megatron.engines.base import LaterPrompts, RolloutEngine, group_rollouts
from tlt_megatron.rewards.worker_process import Outcome
from tlt_megatron.rewards.workers import RewardPool
from tlt_megatron.rollout.open_responses import join_parts
from tlt_megatron.types import (
    FinishReason,
    Message,
    Prompt,
    Rollout,
    RolloutGroup,
    RolloutKey,
    SamplingParams,
    Transcript,
)


@dataclass(slots=True, kw_only=True)
class _Conversation:
    """One sample of a prompt, between its first turn and its end."""

    prompt: Prompt
    messages: list[Message]
    turns: list[Rollout] = field(default_factory=list)
    # after each turn but the last
    observations: list[tuple[int, ...]] = field(default_factory=list)
    features: Tensor | None = None  # for all tokens so far
    answer: Future[Outcome] | None = None  # to the last turn
    has_failed: bool = False
    is_cut: bool = False  # a limit on tokens ended it

    @property
    def num_observed(self) -> int:
        return sum(map(len, self.observations))

    @property
    def num_generated(self) -> int:
        return sum(turn.token_ids.numel() for turn in self.turns)

    def merged(self) -> Rollout:
        """Return the conversation as one rollout."""
        whole = last = self.turns[0]
        mask = [torch.ones_like(last.token_ids, dtype=torch.bool)]
        for observation, last in zip(self.observations, self.turns[1:], strict=True):
            whole = join_parts(join_parts(whole, _observed(observation, last)), last)
            mask += [torch.zeros(len(observation), dtype=torch.bool)]
            mask += [torch.ones_like(last.token_ids, dtype=torch.bool)]
        return dataclasses.replace(
            whole,
            prompt_ids=self.prompt.token_ids,
            loss_mask=torch.cat(mask) if self.num_observed else None,
            transcript=Transcript(
                messages=tuple(self.messages), num_turns=len(self.turns), has_failed=self.has_failed
            ),
            finish_reason=FinishReason.LENGTH if self.is_cut else last.finish_reason,
        )


def _observed(token_ids: tuple[int, ...], turn: Rollout) -> Rollout:
    """Return an observation as a part of the conversation before `turn`: it has no log-probs and no
    kept tokens.
    """
    nothing = torch.zeros(len(token_ids))
    return dataclasses.replace(
        turn,
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        logprobs=nothing,
        policy_logprobs=nothing,
        passes=(),
        kept=None,
        versions=((turn.policy_version, len(token_ids)),),
    )


@dataclass
class Conversations:
    """Runs the conversations of one rank. Use `generate` in place of the engine's."""

    engine: RolloutEngine
    pool: RewardPool  # has the environment
    tokenizer: Tokenizer
    section: RolloutSection
    _answered: list[Outcome] = field(default_factory=list, init=False)

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of the answers since the last call, and reset them."""
        answered, self._answered = self._answered, []
        failures = [outcome.failure for outcome in answered]
        return {
            "rollout/tool_seconds": sum(outcome.seconds for outcome in answered),
            "rollout/tool_errors": float(failures.count("error")),
            "rollout/tool_timeouts": float(failures.count("timeout")),
        }

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        policy_version: int,
        on_finish: Callable[[Rollout], None],
        on_features: Callable[[Rollout, Tensor], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> list[RolloutGroup]:
        """Return the conversations as `RolloutEngine.generate` returns responses; `on_finish` gets
        each when it ends.

        `params.max_new_tokens` limits the policy's tokens of a conversation. With
        reward.on_error=raise, RuntimeError if the environment fails. Otherwise the conversation
        ends with its last turn, and `Transcript.has_failed` is set.
        """
        open_: dict[RolloutKey, _Conversation] = {
            (prompt.draw_index, index): _Conversation(prompt=prompt, messages=self._begin(prompt))
            for prompt in prompts
            for index in prompt.sample_indices(params)
        }
        ended: dict[RolloutKey, Rollout] = {}
        unreported: list[RolloutKey] = []  # ended since the engine last asked

        def end(key: RolloutKey) -> None:
            conversation = open_.pop(key)
            unreported.append(key)
            rollout = ended[key] = conversation.merged()
            if on_features is not None and conversation.features is not None:
                on_features(rollout, conversation.features)
            on_finish(rollout)

        def take_turn(turn: Rollout) -> None:
            conversation = open_[turn.key]
            if not self._ask(conversation, turn):
                end(turn.key)

        def keep_features(turn: Rollout, features: Tensor) -> None:
            # the engine's states cover the whole prompt of a turn, so the last turn's are all
            open_[turn.key].features = features.cpu()

        def next_turns() -> LaterPrompts | None:
            prompts = []
            for key, conversation in list(open_.items()):
                if conversation.answer is not None and conversation.answer.done():
                    prompt = self._continue(conversation, params)
                    if prompt is None:
                        end(key)
                    else:
                        prompts.append(prompt)
            later = LaterPrompts(prompts, tuple(unreported))
            unreported.clear()
            return later if open_ else None

        self.engine.generate(
            prompts,
            params,
            policy_version=policy_version,
            on_finish=take_turn,
            on_features=None if on_features is None else keep_features,
            should_stop=should_stop,
            more_prompts=next_turns,
        )
        keys = [(p.draw_index, index) for p in prompts for index in p.sample_indices(params)]
        return group_rollouts(prompts, params, [ended[key] for key in keys])

    def _begin(self, prompt: Prompt) -> list[Message]:
        """Return the prompt as messages."""
        if prompt.messages:
            return list(prompt.messages)
        return [{"role": "user", "content": self.tokenizer.decode(prompt.token_ids)}]

    def _ask(self, conversation: _Conversation, turn: Rollout) -> bool:
        """Add a turn of the policy and ask the environment. Return False if it was the last
        turn.
        """
        text = self.tokenizer.decode_turn(turn.token_ids.tolist())
        conversation.turns.append(turn)
        conversation.messages.append({"role": "assistant", "content": text})
        is_last = len(conversation.turns) == self.section.max_turns
        if is_last or turn.finish_reason is FinishReason.LENGTH:
            return False
        conversation.answer = self.pool.answer(
            conversation.prompt, turn.sample_index, len(conversation.turns), conversation.messages
        )
        return True

    def _continue(self, conversation: _Conversation, params: SamplingParams) -> Prompt | None:
        """Return the prompt of the next turn. None if the answer to the last turn ends the
        conversation.
        """
        assert conversation.answer is not None
        outcome, conversation.answer = conversation.answer.result(), None
        self._answered.append(outcome)
        answer, prompt, last = outcome.answer, conversation.prompt, conversation.turns[-1]
        if answer is None:
            conversation.has_failed = True
            return None
        if answer.is_done:
            return None
        try:
            observation = self.tokenizer.encode_observation(
                answer.observation,
                int(last.token_ids[-1]),
                is_chat=bool(prompt.messages),
                template_kwargs=prompt.template_kwargs,
            )
        except ValueError as error:
            why = f"its observation cannot be encoded: {error}"
            self.pool.fail_answer(prompt, last.sample_index, len(conversation.turns), why)
            self._answered[-1] = dataclasses.replace(outcome, failure="error")
            conversation.has_failed = True
            return None
        room = prompt.limit(params) - conversation.num_generated
        num_observed = conversation.num_observed + len(observation)
        if room == 0 or num_observed > self.section.max_observation_tokens:
            conversation.is_cut = True
            return None
        conversation.messages += answer.observation
        conversation.observations.append(observation)
        return dataclasses.replace(
            prompt,
            token_ids=(*last.prompt_ids, *last.token_ids.tolist(), *observation),
            first_sample=last.sample_index,
            first_position=conversation.num_generated + num_observed,
            num_samples=1,
            max_new_tokens=room,
        )
