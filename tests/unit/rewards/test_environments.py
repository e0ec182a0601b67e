"""Environments with state in real worker processes: what they get and return, and what becomes of
their conversations when a worker ends.
"""

from __future__ import annotations

import logging
import os
import signal
from concurrent.futures import Future
from dataclasses import replace

import psutil
import pytest

from tests.reward_puppet import PoolMaker
from tlt_megatron.rewards.environment import Turn
from tlt_megatron.rewards.worker_process import Outcome
from tlt_megatron.rewards.workers import HostedConversation, RewardPool
from tlt_megatron.types import Prompt, Transcript

CODE = """
import asyncio, os, random, time

from tlt_megatron import Environment, Step

def length(data_source, solution_str, ground_truth, extra_info):
    return len(solution_str)

class Count(Environment):
    tools = [{"type": "function", "function": {"name": "add"}}]

    def start(self, row, seed):
        self.total = random.Random(seed).randrange(100) + row["extra_info"]["first"]
        return f"{row['ground_truth']} {self.total} {row['messages'][0]['content']}"

    def step(self, turn):
        if turn.text == "raise":
            raise KeyError("no such tool")
        if turn.text == "hang":
            time.sleep(1000)
        if turn.text == "die":
            os._exit(3)
        if turn.text == "text":
            return "text"
        if turn.text == "tokens":
            return Step("given", token_ids=[int(10 * turn.logprobs[0]), 3])
        if turn.text == "negative":
            return Step(token_ids=[3, -1])
        if turn.text == "stop":
            return Step(stop=["</a>", ""])
        if turn.text == "clock":
            return Step(str(time.time()))
        self.total += len(turn.token_ids)
        pid = {"role": "tool", "content": str(self.total)}
        return Step([pid], reward=self.total / 4, is_done=turn.is_last, stop=["</a>"])

    def end(self):
        return {"score": 0.5, "total": self.total}

class Slow(Count):
    async def step(self, turn):
        if turn.text == "hang":
            await asyncio.sleep(1000)
        return super().step(turn)

class Bare:
    def step(self, turn):
        return Step(reward=1.0)

class NoStep:
    pass

class Encodes(Count):
    def start(self, row, seed):
        reward = row["policy"].get("reward", 0.0)
        return Step(token_ids=[seed, *row["policy"]["stop_token_ids"]], reward=reward)

class Needs(Count):
    def __init__(self, url):
        pass

def answer(messages, data_source, ground_truth, extra_info):
    return "", True
"""
PROMPT = Prompt(
    prompt_id="p7",
    draw_index=4,
    token_ids=(1,),
    ground_truth="truth",
    extra_info={"first": 1000},
    messages=({"role": "user", "content": "?"},),
)


def turn(text: str, *, is_last: bool = False) -> Turn:
    return Turn(text, token_ids=(1, 2), is_last=is_last)


class Talk:
    """A conversation of the pool, whose state a test keeps beside it."""

    def __init__(self, pool: RewardPool, sample: int, prompt: Prompt = PROMPT) -> None:
        self.pool, self.sample = pool, sample
        self.handle: HostedConversation = pool.open(prompt, sample)
        self.asked = pool.start(self.handle, seed=sample)
        self.total = 0

    def begin(self) -> None:
        answer = self.asked.result().answer
        assert answer is not None
        assert answer.tools[0]["function"] == {"name": "add"}
        [message] = answer.observation
        truth, total, prompt = str(message["content"]).split()
        assert (truth, prompt) == ("truth", "?")
        self.total = int(total)

    def step(self, text: str = "go on", *, is_last: bool = False) -> Future[Outcome]:
        self.asked = self.pool.step(self.handle, turn(text, is_last=is_last))
        return self.asked

    def check(self, *, is_last: bool = False) -> None:
        self.total += 2
        answer = self.asked.result().answer
        assert answer is not None, self.asked.result()
        assert answer.observation == ({"role": "tool", "content": str(self.total)},)
        assert (answer.reward, answer.is_done, answer.stop) == (self.total / 4, is_last, ("</a>",))


def worker_pids(talks: list[Talk]) -> set[int]:
    keepers = {talk.handle.worker._process.pid for talk in talks}  # type: ignore[union-attr]
    return {child.pid for pid in keepers for child in psutil.Process(pid).children()}


@pytest.mark.parametrize("name", ["Count", "Slow"])
@pytest.mark.parametrize("kill", [False, True])
def test_a_killed_worker_in_the_middle_of_64_conversations_loses_none(
    make_pool: PoolMaker, name: str, kill: bool
) -> None:
    pool = make_pool("length", code=CODE, environment=name, num_workers=2, on_error="raise")
    talks = [Talk(pool, sample) for sample in range(64)]
    for talk in talks:
        talk.begin()
    assert len({talk.total for talk in talks}) > 30  # the seeds differ
    for number in range(4):
        for talk in talks:
            talk.step(is_last=number == 3)
        if kill and number == 1:
            os.kill(min(worker_pids(talks)), signal.SIGKILL)
        for talk in talks:
            talk.check(is_last=number == 3)
    assert len(worker_pids(talks)) == 2
    for end, talk in [(pool.end(talk.handle), talk) for talk in talks]:
        assert end.result().score == 0.5
        assert end.result().details == {"total": talk.total}
    repeated = pool.take_repeated()
    assert 20 < repeated <= 64 if kill else repeated == 0
    assert pool.take_repeated() == 0


@pytest.mark.parametrize("name", ["Count", "Slow"])
def test_a_conversation_that_ends_its_workers_is_to_blame_and_no_other(
    make_pool: PoolMaker, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make_pool("length", code=CODE, environment=name, on_error="zero")
    others = [Talk(pool, sample) for sample in range(6)]
    bad = Talk(pool, 6, replace(PROMPT, prompt_id="bad"))
    for talk in (*others, bad):
        talk.begin()
    with caplog.at_level(logging.WARNING, logger="tlt_megatron.rewards.workers"):
        for talk in others[:3]:
            talk.step()
        died = bad.step("die")
        for talk in others[3:]:
            talk.step()
        assert (died.result().failure, died.result().answer) == ("error", None)
        for _ in range(2):
            for talk in others:
                talk.check()
                talk.step()
        for talk in others:
            talk.check()
    [line] = caplog.messages
    assert "failed on prompt_id='bad' (turn 1 of rollout (4, 6)): " in line
    assert "ended with exit status 3" in line


@pytest.mark.parametrize("name", ["Count", "Slow"])
@pytest.mark.parametrize(
    ("text", "failure", "detail"),
    [
        ("raise", "error", "no such tool"),
        ("text", "error", "step returned 'text': must be a Step"),
        ("stop", "error", "stop=['</a>', '']: must be a list of texts, or None"),
        ("negative", "error", "token_ids=[3, -1]: must be a list of token ids, or None"),
        ("hang", "timeout", "timeout_s=4"),
    ],
)
def test_a_step_that_fails_is_named(
    make_pool: PoolMaker, name: str, text: str, failure: str, detail: str
) -> None:
    limit_s = 4 if failure == "timeout" else 120
    pool = make_pool("length", code=CODE, environment=name, on_error="raise", timeout_s=limit_s)
    talk, other = Talk(pool, 0), Talk(pool, 1)
    for each in (talk, other):
        each.begin()
    place = rf"rollout.environment=.*:{name}' failed on prompt_id='p7' \(turn 1 of rollout \(4, 0\)"
    with pytest.raises(RuntimeError, match=place) as error:
        talk.step(text).result()
    assert detail in str(error.value) or (name == "Slow" and failure == "timeout")
    other.step()
    other.check()


def test_an_environment_that_answers_in_another_way_is_named(make_pool: PoolMaker) -> None:
    pool = make_pool("length", code=CODE, environment="Count", on_error="zero")
    talk = Talk(pool, 0)
    talk.begin()
    talk.step("clock").result()
    (pid,) = worker_pids([talk])
    os.kill(pid, signal.SIGKILL)
    outcome = talk.step().result()
    assert outcome.failure == "error"
    assert "answered in another way" in outcome.detail


def test_only_step_is_needed(make_pool: PoolMaker) -> None:
    pool = make_pool("length", code=CODE, environment="Bare", on_error="raise")
    talk = pool.open(PROMPT, 0)
    start, step, end = (
        pool.start(talk, 0).result(),
        pool.step(talk, turn("a")).result(),
        pool.end(talk).result(),
    )
    assert start.answer is not None
    assert step.answer is not None
    assert start.answer.observation == start.answer.tools == ()
    assert (step.answer.reward, end.score, end.details) == (1.0, 0.0, {})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoStep", "is a class without a method step"),
        ("Needs", "has parameters \\(url\\), must accept \\(\\)"),
    ],
)
def test_a_class_that_is_no_environment_is_refused(
    make_pool: PoolMaker, name: str, message: str
) -> None:
    with pytest.raises(ValueError, match=rf"rollout.environment=.*:{name}': {message}"):
        make_pool("length", code=CODE, environment=name).wait_ready()


def test_rewards_of_an_environment_are_a_weighted_part(tmp_path) -> None:
    path = tmp_path / "own.py"
    path.write_text(CODE)
    weights = {"environment": 2.0, f"{path}:length": 0.5}
    settings = {"num_workers": 1, "timeout_s": 60.0, "on_error": "raise"}
    talk = Transcript(
        messages=(), num_turns=2, has_failed=False, turn_rewards=(0.25, 1), end={"score": 3, "n": 7}
    )
    with RewardPool(weights, environment=f"{path}:Count", **settings) as pool:
        pool.submit("a", PROMPT, "four", talk)
        outcome = (pool.collect() or {})["a"]
        assert outcome.score == 2 * 4.25 + 0.5 * 4
        assert outcome.details == {"environment": 4.25, "environment/n": 7, "length": 4}
        assert pool.environment_weight == 2
    with (
        pytest.raises(
            ValueError, match=r"reward\.function=environment: needs an environment that is a class"
        ),
        RewardPool("environment", environment=f"{path}:answer", **settings) as pool,
    ):
        pool.wait_ready()


def test_an_environment_may_give_tokens_and_gets_what_the_policy_is(make_pool: PoolMaker) -> None:
    pool = make_pool("length", code=CODE, environment="Encodes")
    talk = pool.open(PROMPT, 0)
    first = pool.start(talk, 5, {"stop_token_ids": [7, 8]}).result().answer
    assert first is not None
    assert (first.token_ids, first.observation) == ((5, 7, 8), ())
    talk = pool.open(PROMPT, 1)
    refused = pool.start(talk, 5, {"stop_token_ids": [7], "reward": 1.0}).result()
    assert "only messages and token_ids" in refused.detail
    pool = make_pool("length", code=CODE, environment="Count")
    talk = pool.open(PROMPT, 0)
    pool.start(talk, 5).result()
    asked = Turn("tokens", token_ids=(1,), logprobs=(0.5,))
    answer = pool.step(talk, asked).result().answer
    assert answer is not None
    assert (answer.token_ids, answer.observation[0]["content"]) == ((5, 3), "given")
