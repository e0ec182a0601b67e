"""Conversations of the policy with the environment of `rollout.environment`, for the rollout
worker.

A turn of the policy is a request of the engine. While the environment answers it in a reward
worker, the engine goes on with other conversations. The answered turn comes back as a longer
prompt, which keeps the sample index and the positions of the sampling noise. So a conversation's
tokens do not depend on how long an answer takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tlt_megatron.config.schema import RolloutSection
from tlt_megatron.data.tokenizer import Tokenizer
from tlt_megatron.engines.base import (
    GenerationStopped,
    LaterPrompts,
    RolloutEngine,
    group_rollouts,
)
from tlt_megatron.rewards.environment import ToolCall, Turn
from tlt_megatron.rewards.environment_answer import Answer
from tlt_megatron.rewards.tool_calls import read_calls
from tlt_megatron.rewards.worker_process import Outcome
from tlt_megatron.rewards.workers import RewardPool
from tlt_megatron.rollout.open_conversation import (
    OpenConversation,
    check_given,
    cut_text,
    describe_policy,
    num_shared,
    seed_of,
    with_tools,
)
from tlt_megatron.types import (
    FinishReason,
    Message,
    Prompt,
    Rollout,
    RolloutGroup,
    RolloutKey,
    SamplingParams,
)

_POLL_S = 0.1  # between two calls of `should_stop` while environments start


@dataclass
class Conversations:
    """Runs the conversations of one rank. Use `generate` in place of the engine's."""

    engine: RolloutEngine
    pool: RewardPool  # has the environment
    tokenizer: Tokenizer
    section: RolloutSection
    tool_form: str = ""  # of calls, as `tool_calls.find_form` names it
    _answered: list[Outcome] = field(default_factory=list, init=False)

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of the answers since the last call, and reset them."""
        answered, self._answered = self._answered, []
        failures = [outcome.failure for outcome in answered]
        return {
            "rollout/tool_seconds": sum(outcome.seconds for outcome in answered),
            "rollout/tool_errors": float(failures.count("error")),
            "rollout/tool_timeouts": float(failures.count("timeout")),
            "rollout/repeated_conversations": float(self.pool.take_repeated()),
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
        open_: dict[RolloutKey, OpenConversation] = {
            (prompt.draw_index, index): self._begin(prompt, index)
            for prompt in prompts
            for index in prompt.sample_indices(params)
        }
        first = self._start(prompts, open_, params, should_stop or (lambda: False))
        ended: dict[RolloutKey, Rollout] = {}
        unreported: list[RolloutKey] = []  # ended since the engine last asked

        def end(key: RolloutKey) -> None:
            conversation = open_.pop(key)
            unreported.append(key)
            rollout = ended[key] = conversation.merged(self.pool.environment_weight)
            if on_features is not None and conversation.features is not None:
                on_features(rollout, conversation.features)
            on_finish(rollout)

        def take_turn(turn: Rollout) -> None:
            conversation = open_[turn.key]
            if not self._ask(conversation, turn, params):
                end(turn.key)

        def keep_features(turn: Rollout, features: Tensor) -> None:
            # the engine's states cover the whole prompt of a turn, so the last turn's are all
            open_[turn.key].features = features.cpu()

        def next_turns() -> LaterPrompts | None:
            prompts = []
            for key, conversation in list(open_.items()):
                if conversation.answer is None or not conversation.answer.done():
                    continue
                prompt = self._continue(conversation, params)
                if prompt is not None:
                    prompts.append(prompt)
                elif conversation.answer is None:
                    end(key)
            later = LaterPrompts(prompts, tuple(unreported))
            unreported.clear()
            return later if open_ else None

        self.engine.generate(
            first,
            params,
            policy_version=policy_version,
            on_finish=take_turn,
            on_features=None if on_features is None else keep_features,
            should_stop=should_stop,
            more_prompts=next_turns,
        )
        keys = [(p.draw_index, index) for p in prompts for index in p.sample_indices(params)]
        return group_rollouts(prompts, params, [ended[key] for key in keys])

    def _begin(self, prompt: Prompt, sample_index: int) -> OpenConversation:
        messages: list[Message] = list(prompt.messages)
        if not messages:
            text = self.tokenizer.decode(prompt.token_ids)
            messages.append({"role": "user", "content": text})
        is_class = self.pool.environment.has_instances
        return OpenConversation(
            prompt=prompt,
            messages=messages,
            environment=self.pool.open(prompt, sample_index) if is_class else None,
            num_prompt_messages=len(messages),
            template_kwargs=prompt.template_kwargs,
        )

    def _start(
        self,
        prompts: Sequence[Prompt],
        conversations: Mapping[RolloutKey, OpenConversation],
        params: SamplingParams,
        should_stop: Callable[[], bool],
    ) -> list[Prompt]:
        """Start all environments. Return the prompts of the first turns, which are those of the
        rows where the environment adds nothing to them.

        GenerationStopped if `should_stop` returns True first.
        """
        for (draw, sample), conversation in conversations.items():
            if conversation.environment is not None:
                seed = seed_of(params.seed, draw, sample)
                policy = describe_policy(self.tokenizer, conversation.prompt, params)
                conversation.answer = self.pool.start(conversation.environment, seed, policy)
        pending = [each.answer for each in conversations.values() if each.answer is not None]
        while pending:
            if should_stop():
                raise GenerationStopped("environments were not started yet")
            pending = list(wait(pending, timeout=_POLL_S).not_done)
        first: list[Prompt] = []
        for prompt in prompts:
            indices = prompt.sample_indices(params)
            own = [conversations[prompt.draw_index, index] for index in indices]
            asked = [
                self._first_turn(each, index, params)
                for each, index in zip(own, indices, strict=True)
            ]
            is_shared = all(each.token_ids == prompt.token_ids for each in asked)
            first += [prompt] if is_shared else asked
        return first

    def _first_turn(
        self, conversation: OpenConversation, sample_index: int, params: SamplingParams
    ) -> Prompt:
        """Take the answer to the start, and return the prompt of the first turn."""
        prompt, token_ids = conversation.prompt, conversation.prompt.token_ids
        if conversation.answer is not None:
            outcome, conversation.answer = conversation.answer.result(), None
            self._answered.append(outcome)
            if outcome.answer is None:
                conversation.has_failed, conversation.environment = True, None
            else:
                try:
                    token_ids = self._start_tokens(conversation, outcome.answer)
                except ValueError as error:
                    self._fail(conversation, sample_index, f"its start cannot be used: {error}")
        num_kept = num_shared(prompt.token_ids, token_ids)
        conversation.num_replaced = len(prompt.token_ids) - num_kept
        conversation.observations.append(token_ids[num_kept:])
        return dataclasses.replace(
            prompt,
            token_ids=token_ids,
            first_sample=sample_index,
            first_position=conversation.num_observed,
            num_samples=1,
            max_new_tokens=prompt.limit(params),
        )

    def _start_tokens(self, conversation: OpenConversation, answer: Answer) -> tuple[int, ...]:
        """Add the messages and tools of a start. Return the tokens of the first prompt.

        ValueError if they cannot be encoded, or exceed rollout.max_observation_tokens.
        """
        prompt, messages = conversation.prompt, answer.observation
        token_ids, kwargs = prompt.token_ids, with_tools(prompt.template_kwargs, answer.tools)
        if answer.token_ids is not None:
            check_given(answer.token_ids, kwargs, self.tokenizer, self.section)
            token_ids = answer.token_ids
        elif prompt.messages and (messages or answer.tools):
            token_ids = self.tokenizer.encode_start(prompt.messages, messages, kwargs)
        elif answer.tools:
            raise ValueError("tools need prompts that are lists of messages")
        elif messages:
            last = token_ids[-1]
            added = self.tokenizer.encode_observation(messages, last, is_chat=False)
            token_ids = (*token_ids, *added)
        num_kept = num_shared(prompt.token_ids, token_ids)
        num_added, limit = len(token_ids) - num_kept, self.section.max_observation_tokens
        if not num_kept:
            raise ValueError(
                "the prompt with its messages and tools begins with another token than the prompt of the row, which must"
                " begin with a system message"
            )
        if num_added > limit:
            raise ValueError(
                f"its messages and tools take {num_added} tokens: at most rollout.max_observation_tokens={limit}"
            )
        conversation.template_kwargs = kwargs
        conversation.messages += messages
        conversation.num_prompt_messages += len(messages)
        return token_ids

    def _ask(self, conversation: OpenConversation, turn: Rollout, params: SamplingParams) -> bool:
        """Add a turn of the policy and ask the environment. Return False if it was the last turn,
        which only an environment that is a class gets.
        """
        text = self.tokenizer.decode_turn(turn.token_ids.tolist())
        conversation.turns.append(turn)
        conversation.messages.append({"role": "assistant", "content": text})
        is_last = len(conversation.turns) == self.section.max_turns
        is_last |= turn.finish_reason is FinishReason.LENGTH
        if conversation.has_failed:  # its start
            return self._end(conversation)
        if conversation.environment is not None:
            is_last |= conversation.num_generated == conversation.prompt.limit(params)
            asked = Turn(
                text=text,
                tool_calls=self._calls(text, conversation),
                token_ids=tuple(turn.token_ids.tolist()),
                messages=tuple(conversation.messages),
                is_last=is_last,
                logprobs=tuple(turn.logprobs.tolist()),
            )
            conversation.answer = self.pool.step(conversation.environment, asked)
            return True
        if is_last:
            return False
        conversation.answer = self.pool.answer(
            conversation.prompt, turn.sample_index, len(conversation.turns), conversation.messages
        )
        return True

    def _calls(self, text: str, conversation: OpenConversation) -> tuple[ToolCall, ...]:
        tools: Any = conversation.template_kwargs.get("tools")
        return read_calls(text, self.tool_form, tools) if tools and self.tool_form else ()

    def _continue(self, conversation: OpenConversation, params: SamplingParams) -> Prompt | None:
        """Return the prompt of the next turn. None if there is none. Then the conversation waits
        for the environment's end, or it has no `answer`.
        """
        assert conversation.answer is not None
        outcome, conversation.answer = conversation.answer.result(), None
        self._answered.append(outcome)
        if conversation.is_ending:
            conversation.has_failed |= bool(outcome.failure)
            conversation.end = {**outcome.details, "score": outcome.score}
            return None
        answer = outcome.answer
        if answer is None:
            conversation.has_failed = True
            return None
        if conversation.environment is not None:
            conversation.rewards.append(answer.reward)
        prompt = None if answer.is_done else self._next_turn(conversation, answer, params)
        if prompt is None:
            self._end(conversation)
        return prompt

    def _end(self, conversation: OpenConversation) -> bool:
        """Ask for the end of an environment. Return False if there is none."""
        if conversation.environment is None:
            return False
        conversation.is_ending = True
        conversation.answer = self.pool.end(conversation.environment)
        return True

    def _next_turn(
        self, conversation: OpenConversation, answer: Answer, params: SamplingParams
    ) -> Prompt | None:
        """Return the prompt of the next turn. None if a limit or an observation that cannot be
        encoded ends the conversation.
        """
        prompt, last = conversation.prompt, conversation.turns[-1]
        is_last = len(conversation.turns) == self.section.max_turns
        if is_last or last.finish_reason is FinishReason.LENGTH:
            return None
        messages = self._cut(answer.observation)
        kwargs = conversation.template_kwargs
        try:
            observation = answer.token_ids
            if observation is not None:
                check_given(observation, kwargs, self.tokenizer, self.section)
            else:
                observation = self.tokenizer.encode_observation(
                    messages,
                    int(last.token_ids[-1]),
                    is_chat=bool(prompt.messages),
                    template_kwargs=kwargs,
                )
            stop = None if answer.stop is None else self.tokenizer.stop_strings(answer.stop)
        except ValueError as error:
            why = f"its observation cannot be encoded: {error}"
            self._fail(conversation, last.sample_index, why)
            return None
        room = prompt.limit(params) - conversation.num_generated
        num_observed = conversation.num_observed + len(observation)
        if room == 0 or num_observed > self.section.max_observation_tokens:
            conversation.is_cut = True
            return None
        conversation.messages += messages
        conversation.observations.append(observation)
        return dataclasses.replace(
            prompt,
            token_ids=(*last.prompt_ids, *last.token_ids.tolist(), *observation),
            first_sample=last.sample_index,
            first_position=conversation.num_generated + num_observed,
            num_samples=1,
            max_new_tokens=room,
            stop=prompt.stop if stop is None else stop,
        )

    def _cut(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages with results of tools cut to rollout.max_tool_tokens."""
        limit = self.section.max_tool_tokens
        if not limit:
            return messages
        return [
            {**each, "content": cut_text(self.tokenizer, str(each["content"]), limit)}
            if each["role"] == "tool"
            else each
            for each in messages
        ]

    def _fail(self, conversation: OpenConversation, sample_index: int, why: str) -> None:
        """Handle an answer that cannot be used."""
        self.pool.fail_answer(conversation.prompt, sample_index, len(conversation.turns), why)
        self._answered[-1] = dataclasses.replace(self._answered[-1], failure="error")
        conversation.has_failed = True
