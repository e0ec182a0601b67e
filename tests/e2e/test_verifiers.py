"""Runs on an environment of verifiers, whose client asks for each turn by its tokens."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.faults.case import compare
from tests.faults.lab import copy_stopped
from tests.tiny_task import (
    REPO,
    TLT,
    make_tiny_task,
    metric_rows,
    python,
    rollouts,
    run,
    run_ending,
)
from tests.verifiers_policy import TOKENS, write_policy

pytest.importorskip("verifiers")
pytestmark = pytest.mark.e2e

SETTINGS = (
    *("data.eval=", "data.max_prompt_tokens=128", "logging.trackers=[]", "optimizer.eps=1e-5"),
    *("rollout.environment=glossary_env:Glossary", "rollout.max_turns=3", "reward.timeout_s=500"),
    *("rollout.max_observation_tokens=1200", "reward.function=environment", "reward.num_workers=1"),
    *(
        "checkpoint.interval=1",
        "checkpoint.keep=0",
        "rollout.num_prompts=3",
        "rollout.num_samples=3",
    ),
)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = make_tiny_task(tmp_path_factory.mktemp("task"))
    write_policy(config.parent / "glossary")
    rows = config.parent / "glossary.jsonl"
    written = python(
        "examples/glossary_env.py",
        rows,
        PYTHONPATH=os.pathsep.join(map(str, (REPO / "examples", REPO))),
    )
    assert written.returncode == 0, written.stderr
    return config


@pytest.fixture(scope="module")
def settings(task: Path) -> Iterator[tuple[str, ...]]:
    """Let workers and the tool server find the environment, as a package that is installed."""
    own = f"model.path={task.parent}/glossary", f"data.train={task.parent}/glossary.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(REPO / "examples"))
        patch.setenv("PYTHONPATH", os.pathsep.join((str(REPO / "examples"), str(REPO))))
        yield (*SETTINGS, *own)


@pytest.fixture(scope="module")
def straight(
    task: Path, settings: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    run(1, task, run_dir, *settings)
    return run_dir


def test_three_steps_train_on_the_tokens_and_rewards_of_verifiers(straight: Path) -> None:
    steps = [row for row in metric_rows(straight) if "actor/grad_norm" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert all(row["training/rollout_probs_diff_max"] < 1e-4 for row in steps)
    found = rollouts(straight)
    meanings = {"blorp": "a sort of umbrella", "fendle": "rain at noon"}
    for row in found:
        turns = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
        results = [m["content"] for m in row["messages"] if m["role"] == "tool"]
        word = row["messages"][0]["content"].split("'")[1]
        has_looked = any(meanings.get(word, "-") in each for each in results)
        assert row["reward"] == row["end"]["score"] == pytest.approx(0.2 * has_looked)
        assert row["end"]["num_results"] == len(results)
        text = "".join(TOKENS[token] for token in row["token_ids"])
        kept = [t for t, k in zip(row["token_ids"], row["loss_mask"], strict=True) if k]
        drawn = "".join(TOKENS[token] for token in kept)  # as the policy drew it
        assert re.sub(r"<\|im_end\|>|<\|endoftext\|>", "", drawn) == "".join(turns)
        for result in results:
            readable = "".join(c if c in TOKENS else "<pad>" for c in result)
            assert f"<tool_response>\n{readable}\n</tool_response>" in text
        assert sum(row["turn_lengths"]) == len(kept)
        assert len(turns) == row["num_turns"] == row["end"]["num_replies"]
    assert {row["reward"] for row in found} == {0, 0.2}
    assert len({row["num_turns"] for row in found}) > 1


@pytest.mark.parametrize("further", [["--resume=auto"], TLT])
def test_a_resume_and_speculation_change_nothing(
    task: Path,
    settings: tuple[str, ...],
    straight: Path,
    tmp_path: Path,
    further: Sequence[str],
) -> None:
    if further != TLT:
        copy_stopped(straight, tmp_path / "run", 1)
    run(1, task, tmp_path / "run", *settings, *further)
    assert not compare(tmp_path / "run", straight)


REFUSED = """
from tlt_megatron.rewards.verifiers_environment import from_verifiers

agent = {"sampling": {"temperature": 0.3}}
Glossary = from_verifiers({"taskset": {"id": "glossary"}, "agent": agent}, {"name": "qwen3"})
"""


def test_other_sampling_ends_the_run_in_a_line_that_names_the_row(
    task: Path, settings: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "cool.py").write_text(REFUSED)
    own = (*settings, f"rollout.environment={tmp_path}/cool.py:Glossary", "run.num_steps=1")
    said = run_ending(1, 1, task, tmp_path / "run", *own)
    [line] = [each for each in said.splitlines() if "failed on prompt_id=" in each]
    assert "cool.py:Glossary' failed on prompt_id='" in line
    assert "(start of rollout (0, " in line
    assert "verifiers: temperature=0.3: turns have temperature=1.0" in said
