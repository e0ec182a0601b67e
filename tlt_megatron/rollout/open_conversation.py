"""One conversation of the policy with an environment, between its start and its end."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tlt_megatron.config.schema import RolloutSection
from tlt_megatron.data.tokenizer import Tokenizer
from tlt_megatron.rewards.tool_calls import name_of
from tlt_megatron.rewards.worker_process import Outcome
from tlt_megatron.rewards.workers import HostedConversation
from tlt_megatron.rollout.open_responses import join_parts
from tlt_megatron.types import (
    FinishReason,
    Message,
    Outline,
    Prompt,
    Rollout,
    SamplingParams,
    Transcript,
    TurnCredit,
)


@dataclass(slots=True, kw_only=True)
class OpenConversation:
    """One sample of a prompt, between its first turn and its end."""

    prompt: Prompt
    messages: list[Message]
    environment: HostedConversation | None = None  # None: it is a function
    num_prompt_messages: int = 0
    template_kwargs: Mapping[str, object]
    num_replaced: int = 0  # last tokens of the prompt that `observations[0]` replaces
    turns: list[Rollout] = field(default_factory=list)
    observations: list[tuple[int, ...]] = field(default_factory=list)  # before each turn
    rewards: list[float] = field(default_factory=list)  # of an environment that is a class
    end: Mapping[str, float] = field(default_factory=dict)
    features: Tensor | None = None  # for all tokens so far
    answer: Future[Outcome] | None = None  # to the last turn, or of the end
    is_ending: bool = False
    has_failed: bool = False
    is_cut: bool = False  # a limit on tokens ended it

    @property
    def num_observed(self) -> int:
        return sum(map(len, self.observations))

    @property
    def num_generated(self) -> int:
        return sum(turn.token_ids.numel() for turn in self.turns)

    def merged(self, weight: float) -> Rollout:
        """Return the conversation as one rollout. `weight` is that of the environment's rewards."""
        parts, mask = [], []
        for observation, turn in zip(self.observations, self.turns, strict=True):
            if observation:
                parts.append(_observed(observation, turn))
                mask.append(torch.zeros(len(observation), dtype=torch.bool))
            parts.append(turn)
            mask.append(torch.ones_like(turn.token_ids, dtype=torch.bool))
        shares = self.rewards if self.rewards and not self.has_failed else [0.0] * len(self.turns)
        prompt_ids = self.prompt.token_ids
        return dataclasses.replace(
            functools.reduce(join_parts, parts),
            prompt_ids=prompt_ids[: len(prompt_ids) - self.num_replaced],
            loss_mask=torch.cat(mask) if self.num_observed else None,
            outline=Outline(
                turns=tuple(
                    TurnCredit(turn.token_ids.numel(), weight * reward)
                    for turn, reward in zip(self.turns, shares, strict=True)
                ),
                num_replaced=self.num_replaced,
            ),
            transcript=Transcript(
                messages=tuple(self.messages),
                num_turns=len(self.turns),
                has_failed=self.has_failed,
                num_prompt_messages=self.num_prompt_messages,
                turn_rewards=tuple(self.rewards),
                end=self.end,
            ),
            finish_reason=FinishReason.LENGTH if self.is_cut else self.turns[-1].finish_reason,
        )


def seed_of(seed: int, draw_index: int, sample_index: int) -> int:
    """Return the seed of an environment, below 2 ** 32, as NumPy wants it."""
    digest = hashlib.sha256(f"{seed}/{draw_index}/{sample_index}".encode()).digest()
    return int.from_bytes(digest[:4], "little")


def with_tools(
    template_kwargs: Mapping[str, object], tools: Sequence[Mapping[str, object]]
) -> Mapping[str, object]:
    """Return the arguments of the chat template with further tools. One of the same name gives way
    to the row's.
    """
    known = template_kwargs.get("tools") or ()
    assert isinstance(known, Sequence)
    names = {name_of(tool) for tool in known}
    further = [tool for tool in tools if name_of(tool) not in names]
    return {**template_kwargs, "tools": [*known, *further]} if further else template_kwargs


def describe_policy(
    tokenizer: Tokenizer, prompt: Prompt, params: SamplingParams
) -> dict[str, object]:
    """Return what an environment is told of the policy."""
    temperature, top_p, top_k = params.distribution
    return {
        "tokenizer": str(tokenizer.path),
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "max_new_tokens": prompt.limit(params),  # of the conversation
        "stop_token_ids": list(params.stop_token_ids),
    }


def check_given(
    token_ids: Sequence[int],
    template_kwargs: Mapping[str, object],
    tokenizer: Tokenizer,
    section: RolloutSection,
) -> None:
    """Raise ValueError for a token of an environment that is none of the tokenizer, and for
    settings that have no effect where an environment encodes its messages.
    """
    unknown = [each for each in token_ids if each >= len(tokenizer.hf)]
    if unknown:
        raise ValueError(f"token {unknown[0]} is none of the tokenizer in {tokenizer.path}")
    ignored = [*template_kwargs, *["rollout.max_tool_tokens"] * bool(section.max_tool_tokens)]
    if ignored:
        raise ValueError(f"it gives tokens, so {ignored[0]} would have no effect")


def cut_text(tokenizer: Tokenizer, text: str, num_tokens: int) -> str:
    """Return the text, cut behind as many tokens if it has more."""
    token_ids = tokenizer.encode_texts([text])[0]
    if len(token_ids) <= num_tokens:
        return text
    kept = tokenizer.decode(token_ids[:num_tokens], skip_special_tokens=False)
    return kept.rstrip("\ufffd")  # a part of a character


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


def num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of tokens with which both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
