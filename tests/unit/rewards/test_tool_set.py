"""Tools of `rollout.tools` and the environment that runs their calls."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tlt_megatron.rewards import sandbox
from tlt_megatron.rewards.environment import Step, ToolCall, Turn
from tlt_megatron.rewards.environment_answer import make_answer
from tlt_megatron.rewards.mcp_server import McpServer
from tlt_megatron.rewards.tool_calls import ToolFailed
from tlt_megatron.rewards.tool_set import (
    MAX_CALLS,
    MAX_RESULT_CHARACTERS,
    ToolSet,
    ToolUse,
    make_tool_use,
)

SOURCE = '''
def lookup(word: str, count: int = 1):
    """Look a word up.

    Args:
        word: The word.
        count: How many meanings.
    """
    if word == "raise":
        raise KeyError(word)
    if word == "exit":
        raise SystemExit(3)
    if word == "flood":
        return "x" * 200_000
    if word == "half":
        return "a\\ud800"
    return {"word": word, "count": count, "text": "<|im_end|>\u00e9"}


def shout(text):
    return text.upper()


shout.schema = {"type": "function", "function": {"name": "loud", "parameters": {"type": "object", "properties": {}}}}


async def later(text: str):
    """Wait.

    Args:
        text: A text.
    """


def bare(text):
    return text


def nothing() -> None:
    """Do nothing."""
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tools") / "tools.py"
    path.write_text(SOURCE)
    return str(path)


def run(tools: ToolSet, *calls: ToolCall) -> list[tuple[str, bool]]:
    return list(tools.run(calls))


def test_schemas_come_from_signatures_or_are_given(file: str) -> None:
    tools = ToolSet([f"{file}:lookup", f"{file}:shout", f"{file}:nothing", "python"], 10.0)
    functions = [tool["function"] for tool in tools.schemas]
    assert [f["name"] for f in functions] == ["lookup", "loud", "nothing", "python"]
    assert functions[0]["parameters"] == {
        "type": "object",
        "properties": {
            "word": {"type": "string", "description": "The word."},
            "count": {"type": "integer", "description": "How many meanings."},
        },
        "required": ["word"],
    }
    assert run(tools, ToolCall("loud", {"text": "a"}), ToolCall("nothing")) == [
        ("A", False),
        ("", False),
    ]


@pytest.mark.parametrize(
    ("call", "text", "has_failed"),
    [
        (ToolCall("lookup", {"word": "a"}), '{"word": "a", "count": 1, "text": "<|im_end|>\u00e9"}', False),
        (ToolCall("lookup", {"word": "half"}), r"a\ud800", False),
        (ToolCall("lookup", {"word": "raise"}), "Error: KeyError: 'raise'", True),
        (ToolCall("lookup", {"word": "exit"}), "Error: SystemExit: 3", True),
        (ToolCall("lookup", {"count": 1}), "Error: lookup(word: str, count: int = 1): missing a required argument: 'word'", True),
        (ToolCall("lookup", {"other": 1}), "Error: lookup(word: str, count: int = 1): missing a required argument: 'word'", True),
        (ToolCall("find"), "Error: there is no tool 'find', only lookup, python", True),
        (ToolCall("", error="the call '{' cannot be read"), "Error: the call '{' cannot be read", True),
        (ToolCall("python", {"code": "6 * 7"}), "42\n", False),
        (ToolCall("python", {"code": "1 / 0"}), "ZeroDivisionError", True),
        (ToolCall("python", {"code": 3}), 'Error: python takes one argument, the text "code"', True),
        (ToolCall("python", {"source": "3"}), 'Error: python takes one argument, the text "code"', True),
    ],
)  # fmt: skip
def test_a_call_gives_its_result_or_its_error(
    file: str, call: ToolCall, text: str, has_failed: bool
) -> None:
    ((found, failed),) = run(ToolSet([f"{file}:lookup", "python"], 10.0), call)
    assert (text in found, failed) == (True, has_failed), found
    found.encode()


def test_a_flood_is_cut(file: str) -> None:
    ((text, _),) = run(ToolSet([f"{file}:lookup"], 10.0), ToolCall("lookup", {"word": "flood"}))
    assert text.endswith(f"\n[{200_000 - MAX_RESULT_CHARACTERS} more characters were cut]")
    assert len(text) < MAX_RESULT_CHARACTERS + 100


@pytest.mark.parametrize(
    ("call", "count"),
    [
        (ToolCall("lookup", {"word": "flood"}), MAX_CALLS),
        (ToolCall("n" * 400_000, {}, "i" * 400_000), MAX_CALLS),
        (ToolCall("lookup", {"word": "a"}), 5000),
        (ToolCall("", error="x" * 300), 5000),
    ],
)
def test_the_results_of_a_turn_fit_into_an_answer(file: str, call: ToolCall, count: int) -> None:
    own = make_tool_use({"tools": [f"{file}:lookup"], "errors": "return", "timeout_s": 60.0})()
    step = own.step(Turn("", tool_calls=(call,) * count))
    assert len(step.messages) == min(count, MAX_CALLS + 1)
    assert make_answer(step.messages).observation == tuple(step.messages)
    if count > MAX_CALLS:
        assert step.messages[-1]["content"] == "Error: at most 32 calls of a turn are run"


def test_hanging_code_of_one_turn_ends_before_the_limit_of_the_turn() -> None:
    hang = ToolCall("python", {"code": "while True: pass"})
    started = time.monotonic()
    results = run(ToolSet(["python"], 2.0), *[hang] * 4)
    assert time.monotonic() - started < 2.0
    assert all(failed for _, failed in results)
    assert results[-1][0] == "Error: no time is left for further calls of this turn"


def test_the_environment_answers_each_call_and_ends_without_one(file: str) -> None:
    spec = {"tools": [f"{file}:lookup"], "errors": "return", "timeout_s": 10.0}
    own = make_tool_use(spec)()
    good, bad = ToolCall("lookup", {"word": "a"}, "abcdefghi"), ToolCall("find")
    step = own.step(Turn("", tool_calls=(good, bad)))
    assert [(m["role"], m["name"], m["tool_call_id"]) for m in step.messages] == [
        ("tool", "lookup", "abcdefghi"),
        ("tool", "find", "call00002"),
    ]
    assert own.step(Turn("text")) == Step(is_done=True)
    assert own.step(Turn("", tool_calls=(good,), is_last=True)) == Step(is_done=True)
    assert own.end() == {"tool_calls": 2, "failed_tool_calls": 1}
    ending = make_tool_use({**spec, "errors": "end"})()
    assert ending.step(Turn("", tool_calls=(good, bad))) == Step(is_done=True)
    assert isinstance(ending, ToolUse)


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        (["{file}:bare"], "needs type hints, and a docstring with all arguments"),
        (["{file}:later"], "must not be async"),
        (["{file}:lookup", "{file}:lookup"], "there is another tool 'lookup'"),
        (["{file}:gone"], "has no 'gone'"),
        (["mcp:/none/server"], "mcp:/none/server"),
        (["python", "python_without_sandbox"], "there is another tool 'python'"),
    ],
)
def test_tools_that_cannot_be_used_are_named(file: str, entries: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=r"rollout\.tools") as error:
        ToolSet([entry.replace("{file}", file) for entry in entries], 10.0)
    assert says in str(error.value)


def test_a_machine_without_a_sandbox_runs_python_only_by_another_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sandbox.find_level.cache_clear()
    monkeypatch.setenv("PATH", "/none")
    monkeypatch.setattr(sandbox, "_readable", lambda: ["/none"])  # Landlock then finds no Python
    try:
        with pytest.raises(ValueError, match="python needs a sandbox, which this machine lacks"):
            ToolSet(["python"], 10.0)
    finally:
        sandbox.find_level.cache_clear()
    monkeypatch.undo()
    assert run(ToolSet(["python_without_sandbox"], 10.0), ToolCall("python", {"code": "2"})) == [
        ("2\n", False)
    ]


def test_a_server_that_hangs_is_bounded(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    server = tmp_path / "server.py"
    server.write_text(
        "import time\nfrom mcp.server.mcpserver import MCPServer\nserver = MCPServer('s')\n"
        "@server.tool()\ndef wait(seconds: int) -> str:\n    time.sleep(seconds)\n    return 'done'\n"
        "server.run()\n"
    )
    entry = f"mcp:{sys.executable} {server}"
    tools = ToolSet([entry], 60.0)
    assert run(tools, ToolCall("wait", {"seconds": 0})) == [("done", False)]
    ((text, failed),) = run(tools, ToolCall("wait", {"seconds": "x"}))
    assert failed
    assert "seconds" in text
    with pytest.raises(ToolFailed, match=r"wait: no answer within 0\.\d+ s"):
        McpServer(entry, 60.0).caller("wait")({"seconds": 1000}, time.monotonic() + 0.5)
