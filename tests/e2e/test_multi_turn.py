"""Runs whose responses are conversations with an environment."""

from __future__ import annotations

import json
import shutil
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import pytest

from tests.tiny_task import (
    REPO,
    TLT,
    check_same_run,
    check_same_tokens,
    metric_rows,
    rollouts,
    run,
    run_ending,
    write_environment,
)

pytestmark = pytest.mark.e2e

SETTINGS = (
    *("rollout.max_turns=3", "rollout.num_prompts=8"),
    *("rollout.max_observation_tokens=12", "data.eval=", "logging.trackers=[]"),
)


def test_pipeline_with_tlt_draws_the_tokens_of_plain_runs(task: Path, tmp_path: Path) -> None:
    environment = write_environment(task.parent)
    single, plain, tlt = (tmp_path / name for name in ("single", "plain", "tlt"))
    run(1, task, single, *SETTINGS, environment)
    run(2, task, plain, *SETTINGS, environment, "parallel.pipeline=2")
    run(2, task, tlt, *SETTINGS, environment, "parallel.pipeline=2", *TLT)
    check_same_run(tlt, plain)
    check_same_tokens(plain, single)
    found = rollouts(plain)
    assert {row["num_turns"] for row in found} == {1, 2, 3}
    assert all(row["loss_mask"][-1] == 1 for row in found if "loss_mask" in row)
    for row in metric_rows(plain):
        mine = [r for r in found if r["policy_version"] == row["step"] - 1]
        lengths = [sum(r.get("loss_mask", [1] * len(r["token_ids"]))) for r in mine]
        assert row["response_length/max"] == max(lengths) <= 24
        assert row["response_length/mean"] == sum(lengths) / len(lengths)
        assert row["rollout/num_turns/mean"] == sum(r["num_turns"] for r in mine) / len(mine)
        assert row["rollout/tool_seconds"] > 0
        assert row["rollout/tool_errors"] == row["rollout/tool_timeouts"] == 0
        assert row["training/rollout_probs_diff_max"] < 1e-4


CHAT = """{% for m in messages %}{% if m.role == 'assistant' %}a:{{ m.content }}<eos>{% else %}b:{{ m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}a:think{% endif %}"""
TOOL = """
def answer(messages, data_source, ground_truth, extra_info):
    return "<eos>b:" + "12+" * (len(messages[-1]["content"]) % 3), False


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    texts = [message["content"] for message in extra_info["messages"]]
    assert solution_str == "\\n".join(texts[1:]), (solution_str, texts)
    return len(texts[-1]) / 8
"""


def test_a_chat_whose_tool_writes_control_tokens(task: Path, tmp_path: Path) -> None:
    """As with reasoning models, turns begin in another way than the template writes them later
    on.
    """
    model = shutil.copytree(task.parent / "model", tmp_path / "model")
    (model / "chat_template.jinja").write_text(CHAT)
    (tmp_path / "tool.py").write_text(TOOL)
    rows = [{"prompt": [{"role": "user", "content": f"{i}="}], "label": "5"} for i in range(8)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    own = (f"model.path={model}", f"data.train={tmp_path}/train.jsonl", "run.num_steps=1")
    own += (f"reward.function={tmp_path}/tool.py:compute_score", *SETTINGS)
    own += ("rollout.max_observation_tokens=80",)
    run(1, task, tmp_path / "run", *own, f"rollout.environment={tmp_path}/tool.py:answer")
    found = rollouts(tmp_path / "run")
    assert any("<pad>" in m["content"] for row in found for m in row["messages"])
    found = [row for row in found if "loss_mask" in row]
    assert found
    for row in found:
        turns = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
        assert not any(turn.endswith("<eos>") for turn in turns)
        tokens = zip(row["loss_mask"], row["token_ids"], strict=True)
        parts = groupby(tokens, key=itemgetter(0))
        observations = [[token for _, token in part] for is_drawn, part in parts if not is_drawn]
        assert len(observations) == len(turns) - 1
        assert all(1 not in ids[1:] for ids in observations)  # the template may end a turn with it


@pytest.mark.parametrize(("column", "key"), [("extra_info", "train"), ("metadata", "eval")])
def test_the_users_own_messages_are_not_replaced(
    task: Path, tmp_path: Path, column: str, key: str
) -> None:
    """A reward function gets the conversation under this name, so a row cannot have it."""
    rows = [{"prompt": "1=", "label": "5", "id": "x", column: {"messages": ["mine"]}}]
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0]))
    own = (*SETTINGS, write_environment(task.parent), f"data.{key}={tmp_path}/rows.jsonl")
    said = run_ending(2, 1, task, tmp_path / "run", *own)
    assert "prompt_id='x': extra_info.messages must not be there" in said


@pytest.mark.parametrize("name", ["calculator", "self_correction", "search"])
def test_an_example_trains(task: Path, tmp_path: Path, name: str) -> None:
    own = ("run.num_steps=2", "data.eval=", "logging.trackers=[]")
    own += ("reward.function=environment",) * (name == "search")
    own += ("run.seed=3",)  # with it, the random policy's conversations have one turn or two
    run(1, REPO / "examples" / f"{name}.yaml", tmp_path / "run", "--config", task, *own)
    rows = [row for row in metric_rows(tmp_path / "run") if "actor/grad_norm" in row]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    assert {row["num_turns"] for row in rollouts(tmp_path / "run")} >= {1, 2}
