"""Conversations over a real engine, with an environment that answers when the test says so."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.routes import open_mixture
from tests.tiny_models import make_tiny_hf
from tests.unit.engines.conftest import engine_over, make_prompts
from tlt_megatron.config.schema import RolloutSection
from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.engines.base import LaterPrompts
from tlt_megatron.engines.embedded.embedded_engine import EmbeddedEngine
from tlt_megatron.engines.embedded.speculate import Speculation
from tlt_megatron.rewards.environment_answer import Answer
from tlt_megatron.rewards.worker_process import Loaded, Outcome
from tlt_megatron.rollout.conversations import Conversations
from tlt_megatron.speculation.selector import FixedSelector
from tlt_megatron.stop_strings import StopStrings
from tlt_megatron.types import FinishReason, Message, Prompt, Rollout, RolloutKey, SamplingParams

STOPS = (0, 9, 18, 27, 36, 45)
# Four tokens share a letter: strings end turns within a pair of tokens, and never over two turns.
STRINGS = StopStrings(("bc", "db", "l"), lambda token_id: bytes([97 + token_id // 4]))
PARAMS = SamplingParams(
    num_samples=2, max_new_tokens=16, stop_token_ids=STOPS, stop=STRINGS, seed=3
)
SETTINGS = {
    "environment": "any.py:answer",
    "max_turns": 4,
    "max_observation_tokens": 100,
    "max_new_tokens": 16,
}


class Letters:
    """A tokenizer whose token n is the character n + 200."""

    path, hf = Path("letters"), range(48)

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(200 + token) for token in token_ids)

    decode_turn = decode

    def encode_observation(
        self,
        messages: Sequence[Message],
        last_token: int,
        *,
        is_chat: bool,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> tuple[int, ...]:
        return tuple(ord(char) - 200 for message in messages for char in str(message["content"]))


def answer_of(messages: Sequence[Message]) -> Outcome:
    """Return up to 40 tokens that depend on the conversation. Its last turn decides whether it is
    done.
    """
    letters = [ord(char) for message in messages for char in str(message["content"])]
    size = sum(letters) % 41
    text = Letters().decode([(7 * i + sum(letters)) % 48 for i in range(size)])
    answer = Answer(observation=({"role": "user", "content": text},), is_done=letters[-2] % 3 == 0)
    return Outcome(answer=answer, seconds=0.5)


class Pool:
    """Answers at once, or when `is_ready` of the sample says so."""

    def __init__(
        self,
        outcome: Callable[[Sequence[Message]], Outcome] = answer_of,
        is_ready: Callable[[RolloutKey], bool] = lambda key: True,
    ) -> None:
        self.environment = Loaded()
        self.environment_weight = 0.0
        self.outcome = outcome
        self.is_ready = is_ready
        self.num_asked = 0

    def answer(
        self, prompt: Prompt, sample_index: int, turn: int, messages: Sequence[Message]
    ) -> Future[Outcome]:
        self.num_asked += 1
        assert turn == sum(message["role"] == "assistant" for message in messages)
        later: Future[Outcome] = Future()
        later.set_result(self.outcome(messages))
        later.done = lambda: self.is_ready((prompt.draw_index, sample_index))
        return later

    def take_repeated(self) -> int:
        return 0


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    return make_tiny_hf(path, "qwen3", num_layers=2, vocab_size=48)


def draw_prompts(count: int) -> list[Prompt]:
    draw = random.Random(4)
    return make_prompts(*(draw.randint(1, 70) for _ in range(count)))


def converse(
    engine: EmbeddedEngine, prompts: Sequence[Prompt], pool: Pool | None = None, **calls: Any
) -> list[Rollout]:
    """Return the conversations in the order of the prompts. Each must be reported when it ends."""
    conversations = Conversations(engine, pool or Pool(), Letters(), RolloutSection(**SETTINGS))
    found: list[Rollout] = calls.pop("ended", [])
    calls["on_finish"] = found.append
    groups = conversations.generate(prompts, PARAMS, policy_version=1, **calls)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert {id(r) for r in found} == {id(r) for r in rollouts}
    return rollouts


def turn_by_turn(
    engine: EmbeddedEngine, prompt: Prompt, sample_index: int, start: Sequence[Message] = ()
) -> tuple[list, list]:
    """Return tokens and mask of a conversation whose turns are separate calls of the engine."""
    messages: list[Message] = [{"role": "user", "content": Letters().decode(prompt.token_ids)}]
    messages += start
    tokens = list(Letters().encode_observation(start, 0, is_chat=False))
    mask = [False] * len(tokens)
    for turn in range(1, 5):
        asked = replace(
            prompt,
            first_sample=sample_index,
            num_samples=1,
            token_ids=(*prompt.token_ids, *tokens),
            first_position=len(tokens),
            max_new_tokens=PARAMS.max_new_tokens - sum(mask),
        )
        [group] = engine.generate([asked], PARAMS, policy_version=1)
        [rollout] = group.rollouts
        tokens += rollout.token_ids.tolist()
        mask += [True] * rollout.token_ids.numel()
        messages.append({"role": "assistant", "content": Letters().decode(rollout.token_ids)})
        answer = answer_of(messages).answer
        observed = Letters().encode_observation(answer.observation, 0, is_chat=False)
        is_long = mask.count(False) + len(observed) > SETTINGS["max_observation_tokens"]
        is_over = is_long or sum(mask) == PARAMS.max_new_tokens or turn == 4
        if is_over or answer.is_done or rollout.finish_reason is FinishReason.LENGTH:
            break
        messages += answer.observation
        tokens += observed
        mask += [False] * len(observed)
    return tokens, mask


@pytest.mark.parametrize(
    "settings",
    [{}, {"kv_cache_tokens": 384}, {"max_batch_size": 3}, {"batch_invariant": True}],
    ids=str,
)
def test_conversations_are_their_turns_one_after_another(tiny_path: Path, settings: dict) -> None:
    prompts = draw_prompts(8)
    features: dict[RolloutKey, Tensor] = {}

    def keep(rollout: Rollout, features_TF: Tensor) -> None:
        features[rollout.key] = features_TF
        assert features_TF.shape[0] == rollout.num_tokens - 1

    engine = engine_over(tiny_path, **(SETTINGS | settings))
    alone = engine_over(tiny_path, max_new_tokens=200)
    plain = converse(engine, prompts, on_features=keep)
    for rollout, key in zip(plain, sorted(features), strict=True):
        tokens, mask = turn_by_turn(alone, prompts[key[0]], key[1])
        assert rollout.token_ids.tolist() == tokens
        found = [True] * len(tokens) if rollout.loss_mask is None else rollout.loss_mask.tolist()
        assert found == mask
        is_drawn = rollout.logprobs != 0
        assert is_drawn.tolist() == mask
        assert rollout.num_generated == sum(mask) <= PARAMS.max_new_tokens
        assert rollout.transcript.messages[-1]["role"] == "assistant"
    if not settings:  # only observations are prefilled, and the last token of each turn before one
        again = sum(
            r.token_ids.numel() - r.num_generated + r.transcript.num_turns - 1 for r in plain
        )
        assert engine.stats().num_prefilled_tokens == again + sum(len(p.token_ids) for p in prompts)
    assert {r.transcript.num_turns for r in plain} >= {1, 2, 3}
    assert {r.finish_reason for r in plain} == {FinishReason.STOP, FinishReason.LENGTH}
    strategy = SpeculationStrategy.parse("ngram_4")
    engine.set_speculation(Speculation(None, FixedSelector(strategy), [strategy]))
    speculative = converse(engine, prompts)
    assert [r.token_ids.tolist() for r in speculative] == [r.token_ids.tolist() for r in plain]
    if "kv_cache_tokens" not in settings:
        assert any(n > 1 for r in speculative for n in r.accept_lengths)


def test_a_slow_answer_holds_no_other_conversation(tiny_path: Path) -> None:
    prompts = draw_prompts(4)
    engine = engine_over(tiny_path, **SETTINGS, max_batch_size=4, kv_cache_tokens=64 * 64)
    plain = converse(engine, prompts)
    slow = next(r.key for r in plain if r.transcript.num_turns > 2)
    ended: list[Rollout] = []
    used: list[int] = []  # KV pages, while only the slow conversation is open

    def is_ready(key: RolloutKey) -> bool:
        if key == slow and len(ended) == len(plain) - 1:
            cache = engine._cache
            used.append(cache.num_pages - cache.num_free)
        return key != slow or len(used) > 2

    polls = iter(range(10_000))  # the engine polls while it waits for the slow answer
    found = converse(
        engine,
        prompts,
        Pool(is_ready=is_ready),
        ended=ended,
        should_stop=lambda: next(polls, None) is None,
    )
    assert [r.token_ids.tolist() for r in found] == [r.token_ids.tolist() for r in plain]
    assert (ended[-1].draw_index, ended[-1].sample_index) == slow
    assert used[2] == 1  # its first turn, which fits into a page; the KV of the others is free


def test_a_failed_environment_ends_its_conversation(tiny_path: Path) -> None:
    def fail_late(messages: Sequence[Message]) -> Outcome:
        is_second = sum(message["role"] == "assistant" for message in messages) == 2
        return Outcome(failure="timeout", seconds=2.0) if is_second else answer_of(messages)

    engine = engine_over(tiny_path, **SETTINGS)
    pool = Pool(fail_late)
    conversations = Conversations(engine, pool, Letters(), RolloutSection(**SETTINGS))
    finished: list[Rollout] = []
    conversations.generate(draw_prompts(6), PARAMS, policy_version=1, on_finish=finished.append)
    failed = [r for r in finished if r.transcript.has_failed]
    assert failed
    assert all(
        (r.transcript.num_turns == 2 and r.loss_mask is None) or r.loss_mask[-1] for r in failed
    )
    assert max(r.transcript.num_turns for r in finished) == 2
    assert conversations.take_metrics() == {
        "rollout/tool_timeouts": len(failed),
        "rollout/tool_errors": 0,
        "rollout/repeated_conversations": 0,
        "rollout/tool_seconds": 0.5 * (pool.num_asked - len(failed)) + 2.0 * len(failed),
    }
    assert conversations.take_metrics()["rollout/tool_seconds"] == 0


def test_a_later_prompt_that_was_not_announced_is_refused(tiny_path: Path) -> None:
    engine = engine_over(tiny_path, **SETTINGS)
    [prompt] = draw_prompts(1)
    limit = len(prompt.token_ids) + PARAMS.max_new_tokens + SETTINGS["max_observation_tokens"]
    longer = replace(prompt, token_ids=(1,) * (limit - PARAMS.max_new_tokens + 1))
    message = f"prompt 'p0' and its response need {limit + 1} positions: .* at most {limit}"
    with pytest.raises(ValueError, match=message):
        engine.generate(
            [prompt], PARAMS, policy_version=1, more_prompts=lambda: LaterPrompts([longer])
        )


def test_of_an_engine_without_prompts_none_are_expected(tiny_path: Path) -> None:
    assert converse(engine_over(tiny_path, **SETTINGS), []) == []
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("num_prompts", [2, 6])  # in one batch of four, and with others waiting
def test_planned_memory_has_lanes_for_all_rows_and_room_for_a_later_prompt(
    tiny_path: Path, num_prompts: int
) -> None:
    settings = SETTINGS | {"max_new_tokens": 600, "max_observation_tokens": 8}
    engine = engine_over(
        tiny_path, **settings, num_samples=2, max_batch_size=4, max_prompt_tokens=16
    )
    strategy = SpeculationStrategy.parse("ngram_4")
    engine.set_speculation(Speculation(None, FixedSelector(strategy), [strategy]))
    finished: list[Rollout] = []
    engine.generate(
        [
            replace(prompt, token_ids=(1,) * 8, max_new_tokens=20)
            for prompt in draw_prompts(num_prompts)
        ],
        SamplingParams(num_samples=2, max_new_tokens=600, seed=3),
        policy_version=1,
        on_finish=finished.append,
        more_prompts=lambda: None if len(finished) == 2 * num_prompts else LaterPrompts([]),
    )
    assert engine.take_passes()
    assert engine.stats().num_unspeculated_passes == 0


def test_a_conversation_has_the_routes_of_all_its_turns(tmp_path: Path) -> None:
    path = make_tiny_hf(tmp_path, "qwen3_moe", num_layers=2, vocab_size=48)
    found = converse(engine_over(path, **SETTINGS, routing_replay=True), draw_prompts(3))
    assert any(rollout.loss_mask is not None for rollout in found)
    _, routes_of = open_mixture(path)
    for rollout in found:
        assert torch.equal(rollout.routes.long().sort().values, routes_of(rollout))
