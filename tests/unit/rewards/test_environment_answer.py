"""Answers of an environment from real worker processes: what they may be, and what becomes of those
that fail.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.reward_puppet import PoolMaker, score
from tlt_megatron.rewards.environment_answer import make_answer, read_answer
from tlt_megatron.types import Prompt

ENVIRONMENT = """
import os, time

def score(data_source, solution_str, ground_truth, extra_info):
    return float(len(extra_info["messages"])) if "messages" in extra_info else 0.5

def answer(messages, data_source, ground_truth, extra_info):
    turn = messages[-1]["content"]
    if turn == "hang":
        time.sleep(1000)
    if turn == "raise":
        raise KeyError("no such tool")
    if turn == "die":
        os._exit(3)
    if turn == "long":
        return "x" * 2_000_000, False
    if turn == "number":
        return 7
    if turn == "slow":
        time.sleep(0.2)
        return str(os.getpid()), False
    if turn == "wide":
        return chr(1046) * 200_000, False  # escapes would be three times as long
    if turn == "order":
        return "".join({chr(97 + i) * 2 for i in range(26)}), False
    if turn == "half a pair":
        return chr(0xD83D), False
    state = messages[-2].get("state", 0) + 1
    content = f"{data_source} {ground_truth} {extra_info['key']} {turn} {state}"
    return [{"role": "tool", "content": content, "state": state}], turn == "end"

async def answer_async(messages, data_source, ground_truth, extra_info):
    return answer(messages, data_source, ground_truth, extra_info)
"""
PROMPT = Prompt(
    prompt_id="p7",
    draw_index=4,
    token_ids=(1,),
    data_source="source",
    ground_truth="truth",
    extra_info={"key": "value"},
)


def conversation(turn: str, state: int = 0) -> list[dict[str, object]]:
    first = {"role": "user", "content": "?", "state": state}
    return [first, {"role": "assistant", "content": turn}]


@pytest.mark.parametrize("function", ["answer", "answer_async"])
def test_answers_and_failures(
    make_pool: PoolMaker, function: str, caplog: pytest.LogCaptureFixture
) -> None:
    turns = ["go on", "raise", "number", "half a pair", "long", "die", "end"]
    pool = make_pool("score", code=ENVIRONMENT, environment=function)
    with caplog.at_level(logging.WARNING, logger="tlt_megatron.rewards.workers"):
        prompts = [PROMPT, *[replace(PROMPT, prompt_id="p8")] * 2, *[PROMPT] * 4]
        asked = [
            pool.answer(prompt, 3, 2, conversation(turn, state=5))
            for prompt, turn in zip(prompts, turns, strict=True)
        ]
        outcomes = {turn: future.result() for turn, future in zip(turns, asked, strict=True)}
        assert score(pool, "a response") == [0.5]  # the workers still score
    for turn, is_done in (("go on", False), ("end", True)):
        answer = outcomes[turn].answer
        assert answer is not None
        [message] = answer.observation
        assert message == {
            "role": "tool",
            "content": f"source truth value {turn} 6",
            "state": 6,
        }
        assert answer.is_done is is_done
    for turn in ("raise", "number", "half a pair", "long", "die"):
        assert (outcomes[turn].failure, outcomes[turn].answer) == ("error", None)
    assert "no such tool" in outcomes["raise"].detail
    assert "7: must be a pair (observation, is_done)" in outcomes["number"].detail
    assert "observation: must be JSON in UTF-8: " in outcomes["half a pair"].detail
    assert "observation: 2000033 bytes of JSON: at most 524288" in outcomes["long"].detail
    assert "exit status 3" in outcomes["die"].detail
    # once for a prompt
    for warning, prompt_id in zip(sorted(caplog.messages), ("p7", "p8"), strict=True):
        assert f"failed on prompt_id='{prompt_id}' (turn 2 of rollout (4, 3)): " in warning
        assert warning.startswith("rollout.environment=")


def test_an_answer_is_the_same_from_each_worker(make_pool: PoolMaker) -> None:
    """Also a long one of another alphabet, and one that depends on the order of a set."""
    found = []
    for _ in range(2):
        pool = make_pool("score", code=ENVIRONMENT, environment="answer", on_error="raise")
        asked = [pool.answer(PROMPT, 0, 1, conversation(turn)) for turn in ("wide", "order")]
        found.append([future.result().answer for future in asked])
    assert found[0] == found[1]
    assert found[0][0].observation[0]["content"] == "\u0416" * 200_000


def test_answers_that_block_an_async_worker_do_not_use_up_their_time(make_pool: PoolMaker) -> None:
    code = ENVIRONMENT.replace("def score(", "async def score(")
    limits: dict[str, Any] = {"timeout_s": 3.0, "on_error": "raise"}
    pool = make_pool("score", code=code, environment="answer", **limits)
    asked = [pool.answer(PROMPT, 0, 1, conversation("slow")) for _ in range(20)]
    pids = {future.result().answer.observation[0]["content"] for future in asked}
    assert len(pids) == 1  # no worker was lost


def test_an_environment_that_hangs_is_ended(make_pool: PoolMaker) -> None:
    pool = make_pool("score", code=ENVIRONMENT, environment="answer", timeout_s=2)
    outcome = pool.answer(PROMPT, 0, 1, conversation("hang")).result()
    assert (outcome.failure, outcome.answer) == ("timeout", None)
    assert outcome.detail == "no answer within timeout_s=2"
    assert score(pool, "a response") == [0.5]


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ("text", "must be a pair"),
        (("text", 1), "is_done=1: must be True or False"),
        ((None, False), "must be text or a list of messages"),
        (([{"role": "user"}], False), "must be a message with the texts role and content"),
        (([{"role": "user", "content": "x", "state": {1, 2}}], True), "must be JSON"),
    ],
)
def test_what_is_no_answer_is_refused(result: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        read_answer(result)


def test_a_text_is_a_message_of_the_user() -> None:
    assert read_answer(("12", False)).observation == ({"role": "user", "content": "12"},)
    assert read_answer((None, True)).observation == ()


def test_numbers_of_numpy_and_torch_are_read() -> None:
    answer = make_answer(None, np.bool_(True), torch.tensor(0.5))
    assert (answer.observation, answer.is_done, answer.reward) == ((), True, 0.5)
    assert make_answer("x", np.bool_(False), np.float32(0.5)).is_done is False
    with pytest.raises(ValueError, match=r"reward=tensor\(\[1\., 2\.\]\): must be a finite number"):
        make_answer("x", False, torch.tensor([1.0, 2.0]))
