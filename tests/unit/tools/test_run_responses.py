"""The table of responses in the report and on the live page."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.rollout_stand_ins import make_prompts, make_rollout
from tests.unit.tools.test_report import make_run
from tlt_megatron.rollout.rollout_log import RolloutLog
from tlt_megatron.types import Outline, ScoredGroup, Transcript, TurnCredit
from tools.commands.report import main as report
from tools.run_report.live import LiveRun
from tools.run_report.responses import read_responses

HOSTILE = "</td></script><script>alert(1)</script>&amp;"


class Texts:
    """The text of a response is that of its first token; the prompt is token -1."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = [*texts, "the prompt"]

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.texts[token_ids[0]]

    decode_turn = decode


def write_responses(run_dir: Path, step: int, texts: list[str]) -> None:
    """A step whose responses are `texts`, of 1, 2, 3, ... tokens and rewards 0.5, 1.5, 2.5, ..."""
    (prompt,) = make_prompts([0], "math")
    prompt = replace(prompt, token_ids=(-1,))
    rollouts = [make_rollout(prompt, (i,) * (i + 1), i) for i in range(len(texts))]
    rewards = tuple(index + 0.5 for index in range(len(texts)))
    log = RolloutLog(run_dir / "rollouts", Texts(texts), rank=0)
    own = {(0, index) for index in range(len(texts))}
    log.write(
        step,
        [ScoredGroup(prompt=prompt, rollouts=tuple(rollouts), rewards=rewards)],
        own,
        {(0, 1): 0.125},
    )


TURNS = (
    {"role": "user", "content": "Find 7."},
    {"role": "assistant", "content": '<tool_call>{"name": "look"}</tool_call>'},
    {"role": "tool", "name": "look", "content": HOSTILE},
    {"role": "assistant", "content": "8"},
    {"role": "user", "content": ""},
    {"role": "assistant", "content": "7" * 2000},
)


def write_conversation(run_dir: Path, step: int, **changes: Any) -> None:
    """A step with a conversation of three turns, of 3, 1 and 2 tokens. The second observation has
    no tokens.
    """
    (prompt,) = make_prompts([0], "search")
    given = {"num_turns": 3, "has_failed": False, "turn_rewards": (0.0, 0.25, 0.5)}
    transcript = Transcript(messages=TURNS, **given, end={"score": 0.125, "open_part": 0.5})
    rollout = replace(
        make_rollout(prompt, (0,) * 8),
        loss_mask=torch.tensor([1, 1, 1, 0, 0, 1, 1, 1], dtype=torch.bool),
        passes=((3, 2), (7, 1), (8, 2)),  # behind a prompt of two tokens
        outline=Outline(turns=(TurnCredit(3, 0.0), TurnCredit(1, 0.25), TurnCredit(2, 0.5))),
        transcript=replace(transcript, **changes),
    )
    log = RolloutLog(run_dir / "rollouts", Texts(["whole"]), rank=0)
    log.write(
        step, [ScoredGroup(prompt=prompt, rollouts=(rollout,), rewards=(0.875,))], {(0, 0)}, {}
    )


def test_responses_are_shown_as_text(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    write_responses(run_dir, 3, ["short", HOSTILE, "x" * 5000])
    assert report([str(run_dir)]) == 0
    for page in (LiveRun(run_dir).page([]), (run_dir / "report.html").read_text(encoding="utf-8")):
        assert "alert(1)</script>" not in page
        assert "&lt;/td&gt;&lt;/script&gt;&lt;script&gt;alert(1)&lt;/script&gt;&amp;amp;" in page
        assert "<td>3</td><td>1.5</td><td>2</td><td>0.12</td><td>math</td><td>" in page
        assert "<td>3</td><td>0.5</td><td>1</td><td></td><td>math</td><td><div>the prompt" in page
        assert "x" * 4000 + " … and 1,000 characters" in page


def test_a_conversation_is_shown_turn_by_turn(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    write_conversation(run_dir, 2, has_failed=True, turn_rewards=(0.0,), end={})
    write_conversation(run_dir, 3)
    write_responses(run_dir, 4, ["no conversation"])
    page = LiveRun(run_dir).page([])
    shown = re.findall(
        r"<section( class=.turn.)?><b>(.*?)</b> <small>(.*?)</small>(?:<p>(.*?)</p>)?", page
    )
    texts = [text for _, _, _, text in shown]
    assert [each[:3] for each in shown[:6]] == [
        (' class="turn"', "turn 1", "reward 0 · 3 tokens · 33% drafted"),
        ("", "tool look", ""),
        (' class="turn"', "turn 2", "reward 0.25 · 1 tokens · 0% drafted"),
        ("", "user", ""),
        (' class="turn"', "turn 3", "reward 0.5 · 2 tokens · 50% drafted"),
        ("", "end", "score 0.125 · open_part 0.5"),
    ]
    assert texts[:2] == [
        html.escape(TURNS[1]["content"], quote=False).replace('"', "&#34;"),
        html.escape(HOSTILE),
    ]
    assert texts[4] == "7" * 666 + " … and 1,334 characters"
    assert "<td><div>Find 7.</div></td>" in page
    failed = [each[1:3] for each in shown[6:]]
    assert failed[2] == ("turn 2", "1 tokens · 0% drafted")
    assert failed[-1] == ("failed", "the environment failed, so the reward is 0")
    assert "<td><div>no conversation</div></td>" in page


def test_the_newest_responses_are_shown(tmp_path: Path) -> None:
    for step in (9, 10, 11):
        write_responses(tmp_path, step, [f"{step}a", f"{step}b", f"{step}c"])
    found = [row.response for row in read_responses(tmp_path, 4)]
    assert found == ["11a", "11b", "11c", "10c"]
