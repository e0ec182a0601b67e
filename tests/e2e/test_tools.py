"""Runs whose policy calls tools. Some of its tokens are whole calls, so a random policy calls."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.pairs.features import check, make_tasks
from tests.tiny_task import (
    FEATURES,
    REPO,
    make_tiny_task,
    metric_rows,
    rollouts,
    run,
    run_ending,
    write_environment,
    write_tools,
)

pytestmark = pytest.mark.e2e

BASE = ("data.eval=", "logging.trackers=[]", "run.num_steps=2")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = make_tiny_task(tmp_path_factory.mktemp("task"))
    write_environment(config.parent)
    write_tools(config.parent)
    return config


def settings(task: Path, *further: str) -> tuple[str, ...]:
    own = FEATURES["tools"].replace("{task}", str(task.parent)).split()
    return (*BASE, *own, f"reward.function={task.parent}/tools.py:score", *further)


def totals(run_dir: Path) -> dict[str, float]:
    rows = metric_rows(run_dir)
    kinds = ("sum", "code", "error")
    return {kind: sum(row[f"reward/unknown/{kind}/mean"] for row in rows) for kind in kinds}


def test_with_speculation_on_one_rank_and_resumed_a_run_is_the_same(tmp_path: Path) -> None:
    found = check(["tools", "speculation"], make_tasks(tmp_path / "tasks"), tmp_path)
    assert found == ("", [])


def test_results_and_errors_reach_the_policy(task: Path, tmp_path: Path) -> None:
    run(2, task, tmp_path / "run", *settings(task))
    assert all(number > 0 for number in totals(tmp_path / "run").values())
    assert {row["num_turns"] for row in rollouts(tmp_path / "run")} == {1, 2, 3}
    run(1, task, tmp_path / "ended", *settings(task, "rollout.tool_errors=end"))
    counted = totals(tmp_path / "ended")
    assert counted["error"] == 0 < counted["sum"]


SERVER = '''
from mcp.server.mcpserver import MCPServer

server = MCPServer("numbers")


@server.tool()
def add(left: int, right: int) -> str:
    """Add two numbers."""
    return f"5 is {left + right}"


server.run()
'''


def test_a_server_of_mcp_has_tools(task: Path, tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    (tmp_path / "server.py").write_text(SERVER)
    own = settings(task, f'rollout.tools=["mcp:{sys.executable} {tmp_path}/server.py"]')
    run(1, task, tmp_path / "run", *own)
    counted = totals(tmp_path / "run")
    assert min(counted["sum"], counted["error"]) > 0


@pytest.mark.parametrize(
    ("own", "says"),
    [
        ("rollout.environment={task}/environment.py:Search", "rollout.tools"),
        ("rollout.max_turns=1", "rollout.max_turns=1: must be > 1"),
        ("rollout.tools=[python,python]", "each tool once"),
        ("rollout.tools=[pyhton]", "rollout.tools='pyhton': must be one of python, python_without_sandbox"),
        ("rollout.tools=[{task}/none.py:f]", "no such file"),
        ("rollout.tools=[{task}/tools.py:score]", "needs type hints, and a docstring"),
        ("rollout.tools=[mcp:/none/server]", "rollout.tools='mcp:/none/server': "),
        ("data.train={task}/train.jsonl", "must be a list of messages, because there are tools"),
        ("data.train={task}/own.jsonl", "its tools other must be in rollout.tools"),
        ("model.path={task}/silent", "the chat template of {task}/silent has no argument 'tools'"),
    ],
)  # fmt: skip
def test_bad_settings_are_refused_in_one_line(
    task: Path, tmp_path: Path, own: str, says: str
) -> None:
    folder = task.parent
    if "silent" in own and not (folder / "silent").exists():
        shutil.copytree(folder / "model", folder / "silent")
        (folder / "silent" / "chat_template.jinja").write_text(
            "{% for m in messages %}{{ m.role }}:{{ m.content }}<eos>{% endfor %}"
        )
    tools = [{"type": "function", "function": {"name": "other", "parameters": {}}}]
    row = {"prompt": [{"role": "user", "content": "1="}], "label": "5", "tools": tools}
    (folder / "own.jsonl").write_text(json.dumps(row))
    own, says = (text.replace("{task}", str(folder)) for text in (own, says))
    said = run_ending(2, 1, task, tmp_path / "run", *settings(task, own))
    assert says in said
    assert "Traceback" not in said


def test_the_example_trains(task: Path, tmp_path: Path) -> None:
    own = "--config", task, *BASE, "reward.function=exact", "data.max_prompt_tokens=1024"
    rows = f"data.train={task.parent}/chat.jsonl"
    run(1, REPO / "examples" / "tools.yaml", tmp_path / "run", *map(str, own), rows)
    steps = [row for row in metric_rows(tmp_path / "run") if "actor/grad_norm" in row]
    assert [row["step"] for row in steps] == [1, 2]
