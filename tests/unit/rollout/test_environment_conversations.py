"""Conversations over a real engine with environments that have state."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.tiny_models import make_tiny_hf
from tests.unit.engines.conftest import engine_over
from tests.unit.rollout.test_conversations import (
    PARAMS,
    SETTINGS,
    STOPS,
    Letters,
    Pool,
    answer_of,
    converse,
    draw_prompts,
    turn_by_turn,
)
from tlt_megatron.config.schema import RolloutSection
from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.engines.embedded.speculate import Speculation
from tlt_megatron.rewards.environment import Turn
from tlt_megatron.rewards.environment_answer import Answer
from tlt_megatron.rewards.worker_process import Loaded, Outcome
from tlt_megatron.rollout.conversations import Conversations
from tlt_megatron.rollout.open_conversation import seed_of
from tlt_megatron.speculation.selector import FixedSelector
from tlt_megatron.types import Prompt, Rollout, RolloutKey


class Instances(Pool):
    """Environments with state, which begin with up to 30 tokens and reward each turn."""

    def __init__(self, failing: str = "") -> None:
        super().__init__()
        self.environment = Loaded(has_instances=True)
        self.environment_weight = 2.0
        self.failing = failing  # "start" or "step" of the second sample
        self.ended: list[RolloutKey] = []

    def open(self, prompt: Prompt, sample_index: int) -> Any:
        return prompt, sample_index

    def start(self, talk: Any, seed: int, policy: Any = None) -> Future[Outcome]:
        prompt, sample = talk
        assert seed == seed_of(PARAMS.seed, prompt.draw_index, sample)
        if self.failing == "start" and sample:
            return done(Outcome(failure="error"))
        size = seed % 3 * 10
        text = Letters().decode([(11 * i + seed) % 48 for i in range(size)])
        observation = ({"role": "user", "content": text},) if size else ()
        return done(Outcome(answer=Answer(observation=observation)))

    def step(self, talk: Any, turn: Turn) -> Future[Outcome]:
        if self.failing == "step" and talk[1]:
            return done(Outcome(failure="timeout"))
        answer = answer_of(turn.messages).answer
        return done(Outcome(answer=replace(answer, reward=len(turn.token_ids) / 8)))

    def end(self, talk: Any) -> Future[Outcome]:
        self.ended.append((talk[0].draw_index, talk[1]))
        return done(Outcome(score=0.5, details={"own": 3.0}))


def done(outcome: Outcome) -> Future[Outcome]:
    future: Future[Outcome] = Future()
    future.set_result(outcome)
    return future


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    return make_tiny_hf(path, "qwen3", num_layers=2, vocab_size=48)


def test_environments_with_state_begin_reward_and_end(tiny_path: Path) -> None:
    prompts, pool = draw_prompts(8), Instances()
    rows: dict[RolloutKey, int] = {}

    def keep(rollout: Rollout, features_TF: Tensor) -> None:
        rows[rollout.key] = features_TF.shape[0]

    engine = engine_over(tiny_path, **SETTINGS)
    alone = engine_over(tiny_path, max_new_tokens=200)
    plain = converse(engine, prompts, pool, on_features=keep)
    assert sorted(pool.ended) == [r.key for r in plain]
    for rollout in plain:
        prompt = prompts[rollout.draw_index]
        seed = seed_of(PARAMS.seed, *rollout.key)
        start = pool.start((prompt, rollout.sample_index), seed).result().answer.observation
        tokens, mask = turn_by_turn(alone, prompt, rollout.sample_index, start)
        assert rollout.token_ids.tolist() == tokens
        found = [True] * len(tokens) if rollout.loss_mask is None else rollout.loss_mask.tolist()
        assert found == mask
        assert (rollout.prompt_ids, rollout.outline.num_replaced) == (prompt.token_ids, 0)
        assert rows[rollout.key] == rollout.num_tokens - 1
        talk = rollout.transcript
        assert talk.end == {"score": 0.5, "own": 3.0}
        assert len(talk.turn_rewards) == len(rollout.outline.turns) == talk.num_turns
        assert sum(turn.num_tokens for turn in rollout.outline.turns) == sum(mask)
        for turn, reward in zip(rollout.outline.turns, talk.turn_rewards, strict=True):
            assert (turn.reward, reward) == (turn.num_tokens / 4, turn.num_tokens / 8)
        assert talk.messages[1 : talk.num_prompt_messages] == start
    assert {r.transcript.num_prompt_messages for r in plain} == {1, 2}
    strategy = SpeculationStrategy.parse("ngram_4")
    engine.set_speculation(Speculation(None, FixedSelector(strategy), [strategy]))
    speculative = converse(engine, prompts, Instances())
    assert [r.token_ids.tolist() for r in speculative] == [r.token_ids.tolist() for r in plain]
    assert [r.outline.turns for r in speculative] == [r.outline.turns for r in plain]


@pytest.mark.parametrize("failing", ["start", "step"])
def test_an_environment_that_fails_rewards_no_turn(tiny_path: Path, failing: str) -> None:
    found = converse(engine_over(tiny_path, **SETTINGS), draw_prompts(3), Instances(failing))
    for rollout in found:
        assert rollout.transcript.has_failed == bool(rollout.sample_index)
        if rollout.sample_index:
            assert rollout.transcript.num_turns == 1
            assert [turn.reward for turn in rollout.outline.turns] == [0.0]


def test_a_start_that_is_too_long_is_a_failure(tiny_path: Path) -> None:
    pool, failed = Instances(), []
    pool.fail_answer = lambda prompt, sample, turn, why: failed.append((turn, why))
    settings = SETTINGS | {"max_observation_tokens": 12}
    conversations = Conversations(
        engine_over(tiny_path, **settings), pool, Letters(), RolloutSection(**settings)
    )
    groups = conversations.generate(
        draw_prompts(4), PARAMS, policy_version=1, on_finish=lambda rollout: None
    )
    talks = [rollout.transcript for group in groups for rollout in group.rollouts]
    assert 0 < len(failed) == sum(talk.has_failed for talk in talks) < len(talks)
    assert set(failed) == {
        (
            0,
            "its start cannot be used: its messages and tools take 20 tokens: at most"
            " rollout.max_observation_tokens=12",
        )
    }


class Encoded(Instances):
    """The same environments. They encode their messages themselves."""

    further: tuple[int, ...] = ()

    def encoded(self, future: Future[Outcome], *before: int) -> Future[Outcome]:
        outcome = future.result()
        texts = [ord(c) - 200 for m in outcome.answer.observation for c in str(m["content"])]
        given = replace(outcome.answer, token_ids=(*before, *texts, *self.further))
        return done(replace(outcome, answer=given))

    def start(self, talk: Any, seed: int, policy: Any = None) -> Future[Outcome]:
        sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop_token_ids": [*STOPS]}
        assert policy == {**sampling, "max_new_tokens": 16, "tokenizer": "letters"}
        return self.encoded(super().start(talk, seed), *talk[0].token_ids)

    def step(self, talk: Any, turn: Turn) -> Future[Outcome]:
        assert len(turn.logprobs) == len(turn.token_ids)
        assert -30 < sum(turn.logprobs) < 0
        return self.encoded(super().step(talk, turn))


def test_an_environment_that_gives_tokens_equals_the_one_of_their_messages(tiny_path: Path) -> None:
    engine, prompts = engine_over(tiny_path, **SETTINGS), draw_prompts(6)
    found = converse(engine, prompts, Encoded())
    for one, other in zip(found, converse(engine, prompts, Instances()), strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert (one.outline, one.transcript) == (other.outline, other.transcript)


@pytest.mark.parametrize(
    ("further", "kwargs", "settings", "why"),
    [
        ((48,), {}, {}, "token 48 is none of the tokenizer in letters"),
        ((), {"tools": [{}]}, {}, "it gives tokens, so tools would have no effect"),
        ((), {}, {"max_tool_tokens": 5}, "so rollout.max_tool_tokens would have no effect"),
    ],
)
def test_tokens_that_cannot_be_used_are_a_failure(
    tiny_path: Path, further: tuple[int, ...], kwargs: dict, settings: dict, why: str
) -> None:
    pool, failed = Encoded(), []
    pool.further = further
    pool.fail_answer = lambda prompt, sample, turn, why: failed.append((turn, why))
    prompts = [replace(each, template_kwargs=kwargs) for each in draw_prompts(1)]
    section = RolloutSection(**SETTINGS | settings)
    talks = Conversations(engine_over(tiny_path, **SETTINGS), pool, Letters(), section)
    talks.generate(prompts, PARAMS, policy_version=1, on_finish=lambda rollout: None)
    assert [turn for turn, _ in failed] == [0, 0]
    assert all(said.startswith("its start cannot be used: ") and why in said for _, said in failed)
