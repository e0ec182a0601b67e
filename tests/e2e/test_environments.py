"""Runs whose environment is a class, with state and rewards of turns."""

from __future__ import annotations

import json
import math
import shutil
from itertools import accumulate
from pathlib import Path

import pytest

from tests.tiny_task import (
    ENVIRONMENT,
    FEATURES,
    TLT,
    check_same_run,
    metric_rows,
    rollouts,
    run,
    run_ending,
)

pytestmark = pytest.mark.e2e

BASE = ("data.eval=", "logging.trackers=[]", "rollout.num_samples=2", "run.num_steps=2")


def settings(task: Path, *further: str) -> tuple[str, ...]:
    own = FEATURES["environment"].replace("{task}", str(task.parent)).split()
    return (*BASE, *own, *further)


ADVANTAGE = """
import json
from itertools import accumulate

import torch


def of_turns(rewards, groups, scale):
    found = []
    for group, rewards_of_group in zip(groups, rewards, strict=True):
        assert group.prompt.ground_truth == "5"
        of_group = []
        for rollout, details, reward_T in zip(group.rollouts, group.details, rewards_of_group, strict=True):
            assert sum(turn.num_tokens for turn in rollout.outline.turns) == reward_T.numel()
            expected_T = torch.zeros_like(reward_T)
            ends = list(accumulate(turn.num_tokens for turn in rollout.outline.turns))
            for end, turn in zip(ends, rollout.outline.turns, strict=True):
                expected_T[end - 1] = turn.reward
            expected_T[-1] += details["environment"] - sum(turn.reward for turn in rollout.outline.turns)
            expected_T[-1] += 0.5 * details["compute_score"]
            assert torch.allclose(expected_T, reward_T, atol=1e-12)
            of_group.append(scale * reward_T)
        found.append(of_group)
    return found
"""


def test_rewards_of_turns_are_logged_and_reach_an_advantage_of_the_user(
    task: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(ADVANTAGE)
    own = settings(task, f"algorithm.advantage={tmp_path}/own.py:of_turns")
    run(2, task, tmp_path / "run", *own, *TLT, "algorithm.advantage_args={scale: 2.0}")
    found = rollouts(tmp_path / "run")
    assert {row["num_turns"] for row in found} >= {2, 3}
    for row in found:
        assert len(row["turn_rewards"]) == len(row["turn_lengths"]) == row["num_turns"]
        mask = row.get("loss_mask", [1] * len(row["token_ids"]))
        assert sum(row["turn_lengths"]) == sum(mask)
        num_proposed = sum(row["accept_lengths"]) - len(row["accept_lengths"])
        assert sum(row["turn_drafted"]) == num_proposed
        assert all(d < n for d, n in zip(row["turn_drafted"], row["turn_lengths"], strict=True))
        texts = [m["content"] for m in row["messages"][row["num_prompt_messages"] :]]
        digits = [c for c in "\n".join(texts) if c.isdigit()]
        share = round(4 * sum(c < "5" for c in digits) / max(1, len(digits))) / 4
        given = sum(row["turn_rewards"]) + row["end"]["score"]
        assert row["reward"] == pytest.approx(given + 0.5 * share, abs=1e-12)
        # the state is that of the seed and all turns: the start's messages are no part of it
        assert (row["end"]["state"] % 2) / 2 == row["end"]["score"]
    assert sum(sum(row["turn_drafted"]) for row in found) > 0
    # an observation may be empty, so that the mask shows fewer turns than there are
    assert any(not m["content"] for row in found for m in row["messages"])
    for step in metric_rows(tmp_path / "run"):
        mine = [r for r in found if r["policy_version"] == step["step"] - 1]
        each = [reward for r in mine for reward in r["turn_rewards"]]
        assert step["rollout/turn_reward/mean"] == pytest.approx(sum(each) / len(each))
        assert step["reward/weight/environment"] == 1
        assert step["reward/weight/compute_score"] == 0.5
        total = math.fsum(r["end"]["score"] + sum(r["turn_rewards"]) for r in mine) / len(mine)
        assert step["reward/unknown/environment/mean"] == pytest.approx(total)
        assert step["training/rollout_probs_diff_max"] < 1e-4


DYING = """
import os, signal


class Dying(Search):
    def step(self, turn):
        if len(turn.messages) > 3:
            try:
                os.close(os.open({mark!r}, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                {body}
        return super().step(turn)
"""


def write_dying(folder: Path, body: str) -> str:
    path = folder / "dying.py"
    path.write_text(ENVIRONMENT + DYING.format(mark=str(folder / "died"), body=body))
    return f"rollout.environment={path}:Dying"


def test_a_worker_that_is_killed_in_the_middle_changes_nothing(task: Path, tmp_path: Path) -> None:
    own = settings(task, "run.num_steps=1")
    run(1, task, tmp_path / "straight", *own)
    dying = write_dying(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    run(1, task, tmp_path / "killed", *own, dying)
    assert (tmp_path / "died").exists()
    check_same_run(tmp_path / "killed", tmp_path / "straight")
    assert metric_rows(tmp_path / "straight")[0]["rollout/repeated_conversations"] == 0
    assert metric_rows(tmp_path / "killed")[0]["rollout/repeated_conversations"] > 0


@pytest.mark.parametrize(
    ("body", "limit_s", "line"),
    [
        ("raise KeyError('no tool')", 120, "no tool"),
        ("import time; time.sleep(99)", 5, "timeout_s=5"),
    ],
)
def test_a_step_that_fails_ends_the_run_in_one_line_or_scores_0(
    task: Path, tmp_path: Path, body: str, limit_s: int, line: str
) -> None:
    limit = f"reward.timeout_s={limit_s}"
    own = settings(task, write_dying(tmp_path, body), limit, "run.num_steps=1")
    said = run_ending(1, 1, task, tmp_path / "raise", *own)
    [named] = [each for each in said.splitlines() if "failed on prompt_id=" in each]
    assert named.startswith("pretrain_rl: ")
    assert "dying.py:Dying' failed on" in named
    assert "(turn 2 of rollout (" in named
    assert line in said
    (tmp_path / "died").unlink()
    run(1, task, tmp_path / "zero", *own, "reward.on_error=zero")
    [failed] = [row for row in rollouts(tmp_path / "zero") if row["has_failed"]]
    assert (failed["reward"], failed["num_turns"]) == (0, 2)


CHAT = """#{% if tools %}t:{{ tools[0].function.name }}{% endif %}{% for m in messages %}{% if m.role == 'assistant' %}a:{{ m.content }}<eos>{% else %}b:{{ m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}a:{% endif %}"""
TOOL = """
from tlt_megatron import Step


class Tool:
    tools = [{"type": "function", "function": {"name": "look"}}]

    def start(self, row, seed):
        return [{"role": "user", "content": "<eos>b:" + "ab"[seed % 2]}] if seed % 3 else None

    async def step(self, turn):
        return Step("12+"[: len(turn.text) % 4], reward=len(turn.text) / 32)


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    texts = [m["content"] for m in extra_info["messages"] if m["role"] != "user" or m["content"] in "12+"]
    assert solution_str == "\\n".join(texts), (solution_str, texts)
    return 1.0
"""


def test_a_chat_with_tools_and_messages_of_the_start(task: Path, tmp_path: Path) -> None:
    model = shutil.copytree(task.parent / "model", tmp_path / "model")
    (model / "chat_template.jinja").write_text(CHAT)
    (tmp_path / "tool.py").write_text(TOOL)
    rows = [{"prompt": [{"role": "user", "content": f"{i}="}], "label": "5"} for i in range(8)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    own = settings(task, f"model.path={model}", f"data.train={tmp_path}/train.jsonl")
    own += (f"rollout.environment={tmp_path}/tool.py:Tool", "rollout.max_observation_tokens=80")
    own += (f"reward.function={{environment: 1.0, {tmp_path}/tool.py:compute_score: 0.5}}",)
    run(1, task, tmp_path / "run", *own, "run.num_steps=1")
    found = rollouts(tmp_path / "run")
    decode = dict(enumerate(["<pad>", "<EOS>", *"0123456789+-*/=<>.,;:#abcdefghijklmnopqrst"]))
    assert {row["num_prompt_messages"] for row in found} == {1, 2}
    for row in found:
        text = row["prompt"] + "".join(decode.get(t, "?") for t in row["token_ids"])
        number = row["messages"][0]["content"]
        assert row["prompt"] == "#"  # the row's own prompt goes on in another way
        assert text.startswith(f"#t:lookb:{number}")
        rest = text.removeprefix(f"#t:lookb:{number}")
        if row["num_prompt_messages"] == 2:  # its control tokens are text, as in observations
            assert rest.startswith("b:<eos>b:")
        assert row["loss_mask"][0] == 0
        ends = list(accumulate(row["turn_lengths"]))
        assert ends[-1] == sum(row["loss_mask"])
    strings = [{"prompt": "1=", "label": "5", "id": "x"}]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, strings)))
    said = run_ending(2, 1, task, tmp_path / "refused", *own)
    assert "prompt_id='x': must be a list of messages, because rollout.environment='" in said
    # its template names the tool, and has no form of calls
    warned = "has calls in a form that is not known"
    assert warned in "".join(p.read_text() for p in (tmp_path / "run").glob("logs/*/*"))
