"""Environments of verifiers with its own client and renderer. The tests write the turns."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.reward_puppet import PoolMaker
from tests.verifiers_policy import TOKENS, write_tokenizer
from tlt_megatron.rewards.environment import Turn
from tlt_megatron.types import Prompt

pytest.importorskip("verifiers")

TASKSET = '''
import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["Twice", "AskTwice"]


class Data(vf.TaskData):
    answer: str = ""


class Task(vf.Task[Data, vf.State]):
    @vf.reward(weight=0.5)
    async def is_right(self, trace) -> float:
        if self.data.answer == "raise":
            raise KeyError("no such answer")
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def num_turns(self, trace) -> float:
        return trace.num_turns


class Twice(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        given = {"system_prompt": "be brief."}
        return [Task(Data(prompt=f"say {each}", answer=each, **given)) for each in ("ab", "raise")]


class AskTwice(vf.Harness[vf.HarnessConfig]):
    """Asks again, as a user. With "env" of the config it changes what the policy wrote."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [{"role": "system", "content": data.system_prompt}, {"role": "user", "content": data.prompt}]
        client = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0)
        for text in ("again", ""):
            done = await client.chat.completions.create(model=ctx.model, messages=messages)
            turn = done.choices[0].message.content
            turn = self.config.env.get("changed", turn)
            messages += [{"role": "assistant", "content": turn}, {"role": "user", "content": text}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
'''


@pytest.fixture(scope="module", autouse=True)
def module(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("twice")
    (folder / "twice.py").write_text(TASKSET)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield


def environment_of(**agent: Any) -> Any:
    from tlt_megatron.rewards.verifiers_environment import from_verifiers

    return from_verifiers({"taskset": {"id": "twice"}, "agent": agent}, {"name": "qwen3"})


def policy_in(folder: Path) -> dict[str, Any]:
    write_tokenizer(folder)
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop_token_ids": [1, 3]}
    return {**sampling, "tokenizer": str(folder), "max_new_tokens": 64}


def turn_of(text: str, *, is_last: bool = False) -> Turn:
    drawn = (*map(TOKENS.index, text), 3)
    return Turn(text, drawn, is_last=is_last, logprobs=(-0.5,) * len(drawn))


def converse(environment: Any, folder: Path, task: int, *turns: str, cuts: bool = False) -> Any:
    """Write the turns. Return all tokens, the messages of the steps, and the end."""
    from tlt_megatron.rewards.verifiers_environment import write_rows

    write_rows(environment, folder / "rows.jsonl")
    row = json.loads((folder / "rows.jsonl").read_text().splitlines()[task])

    async def run() -> Any:
        own = environment()
        first = await own.start({"extra_info": row["metadata"], "policy": policy_in(folder)}, 0)
        token_ids, messages = [*first.token_ids], []
        for number, text in enumerate(turns, 1):
            turn = turn_of(text, is_last=cuts and number == len(turns))
            step = await own.step(turn)
            token_ids += turn.token_ids
            token_ids += step.token_ids or ()
            messages += step.messages
            if step.is_done:
                break
        return "".join(TOKENS[each] for each in token_ids), messages, await own.end()

    return asyncio.run(run())


BEGIN = "<|im_start|>system\nbe brief.<|im_end|>\n<|im_start|>user\nsay ab<|im_end|>\n<|im_start|>assistant\n"


def test_an_environment_is_played_by_its_own_harness_and_client(tmp_path: Path) -> None:
    text, messages, end = converse(environment_of(), tmp_path, 0, "no", "ab")
    again = "<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    assert text == BEGIN + "no" + again + "ab<|im_end|>"
    assert messages == [{"role": "user", "content": "again"}]
    assert end == {"is_right": 1, "num_turns": 2, "score": 0.5}


@pytest.mark.parametrize("cuts", [True, False])  # False: the second prompt finds no room
def test_a_conversation_that_is_cut_is_scored(tmp_path: Path, cuts: bool) -> None:
    _, _, end = converse(environment_of(), tmp_path, 0, "ab", cuts=cuts)
    assert end == {"is_right": 1, "num_turns": 1, "score": 0.5}


@pytest.mark.parametrize(
    ("agent", "task", "why"),
    [
        ({"sampling": {"temperature": 0.3}}, 0, "verifiers: temperature=0.3: turns have temperature=1.0"),
        ({"sampling": {"max_tokens": 9}}, 0, "max_tokens=9: rollout.max_new_tokens=64 holds"),
        ({"sampling": {"min_p": 0.1}}, 0, "min_p=0.1: the engine has no such setting of a turn"),
        ({"harness": {"id": "twice", "env": {"changed": "other"}}}, 0, "does not extend the 47 tokens so far, from token 44"),
        ({"model": "other"}, 0, "model='other' is not the policy"),
        ({}, 1, "the episode failed: TaskError: task Task scoring: KeyError: 'no such answer'"),
    ],
)  # fmt: skip
def test_an_environment_that_cannot_be_trained_is_refused(
    tmp_path: Path, agent: dict[str, Any], task: int, why: str
) -> None:
    with pytest.raises(ValueError, match=r"^verifiers: ") as error:
        converse(environment_of(**agent), tmp_path, task, "ab", "ab")
    assert why in str(error.value)


def test_a_row_of_another_taskset_is_refused(tmp_path: Path) -> None:
    environment = environment_of()
    row = {"extra_info": {"task": 1, "task_key": "other"}, "policy": {}}
    with pytest.raises(ValueError, match="task=1: not a row of this taskset: write them again"):
        asyncio.run(environment().start(row, 0))


def test_a_tool_is_written_alike_by_both_versions_of_mcp() -> None:
    from tlt_megatron.rewards.verifiers_harness import with_ordered_keys

    word = {"properties": {"word": {"type": "string"}, "a": {}}, "required": ["word"]}
    function = {"name": "lookup", "description": "finds"}
    old, new = {**word, "type": "object", "title": "x"}, {"type": "object", **word, "title": "x"}
    texts = {
        json.dumps(
            with_ordered_keys({"type": "function", "function": {**function, "parameters": p}})
        )
        for p in (old, new)
    }
    assert len(texts) == 1
    assert '{"properties": {"word": {"type": "string"}, "a": {}}, "required"' in texts.pop()


CODE = """
from tlt_megatron.rewards.verifiers_environment import from_verifiers

Twice = from_verifiers({"taskset": {"id": "twice"}}, {"name": "qwen3"})


def length(data_source, solution_str, ground_truth, extra_info):
    return len(solution_str)
"""


def test_another_worker_repeats_an_episode_whose_worker_has_ended(
    make_pool: PoolMaker, tmp_path: Path
) -> None:
    pool = make_pool("length", code=CODE, environment="Twice", timeout_s=500)
    about = {"task": 0, "task_key": environment_of().tasks[0].key}
    talk = pool.open(Prompt(prompt_id="p", draw_index=0, token_ids=(2,), extra_info=about), 0)
    assert pool.start(talk, 0, policy_in(tmp_path)).result().answer is not None
    step = pool.step(talk, turn_of("no")).result().answer
    assert step is not None
    assert step.observation == ({"role": "user", "content": "again"},)
    assert talk.worker is not None
    for child in psutil.Process(talk.worker._process.pid).children():
        child.kill()
    last = pool.step(talk, turn_of("ab")).result()
    assert last.answer is not None, last
    assert last.answer.is_done
    end = pool.end(talk).result()
    assert (end.score, end.details) == (0.5, {"is_right": 1, "num_turns": 2})
    assert pool.take_repeated() == 1
