"""Tools of `rollout.tools` and the environment that runs their calls."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tlt_megatron.rewards import sandbox, tool_set
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
import enum
from typing import Optional


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


class Color(enum.Enum):
    RED = "red"


def paint(color: Color, others: list[Color], last: Optional[Color] = None):
    """Paint.

    Args:
        color: The color.
        others: Others.
        last: Last.
    """
    return [each and each.name for each in (color, *others, last)]


def give(kind: str):
    """Return something that JSON does not have.

    Args:
        kind: The kind.
    """
    if kind == "later":
        return later("x")
    return {"keys": {(1, 2): 3}, "set": {1}, "nan": float("nan")}[kind]


def many(*words: str, **rest: int):
    """Take words.

    Args:
        words: The words.
        rest: The rest.
    """


def numpy_style(word: str):
    """Take a word.

    Parameters
    ----------
    word : str
    """
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
        (ToolCall("find"), "Error: there is no tool 'find', only lookup, paint, give, python", True),
        (ToolCall("", error="the call '{' cannot be read"), "Error: the call '{' cannot be read", True),
        (ToolCall("paint", {"color": "red", "others": ["red"]}), '["RED", "RED", null]', False),
        (ToolCall("paint", {"color": "red", "others": [], "last": "red"}), '["RED", "RED"]', False),
        (ToolCall("paint", {"color": "blue", "others": []}), "Error: ValueError: 'blue' is not a valid Color", True),
        (ToolCall("give", {"kind": "keys"}), "Error: TypeError: keys must be str", True),
        (ToolCall("give", {"kind": "later"}), "Error: TypeError: the tool returns an awaitable", True),
        (ToolCall("give", {"kind": "set"}), '"{1}"', False),
        (ToolCall("give", {"kind": "nan"}), "NaN", False),
        (ToolCall("python", {"code": "6 * 7"}), "42\n", False),
        (ToolCall("python", {"code": "1 / 0"}), "ZeroDivisionError", True),
        (ToolCall("python", {"code": 3}), 'Error: python takes one argument, the text "code"', True),
        (ToolCall("python", {"source": "3"}), 'Error: python takes one argument, the text "code"', True),
    ],
)  # fmt: skip
def test_a_call_gives_its_result_or_its_error(
    file: str, call: ToolCall, text: str, has_failed: bool
) -> None:
    names = ["lookup", "paint", "give"]
    ((found, failed),) = run(ToolSet([*(f"{file}:{n}" for n in names), "python"], 120.0), call)
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


def test_hanging_code_of_one_turn_ends_before_the_limit_of_the_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sandbox is one that takes all the time that it is given."""
    now_s = [0.0]

    def hang_until(code: str, *, level: str, timeout_s: float) -> sandbox.PythonResult:
        now_s[0] += timeout_s
        return sandbox.PythonResult(text="[stopped: it took too long]", failure="timeout")

    monkeypatch.setattr(tool_set, "run_python", hang_until)
    monkeypatch.setattr(tool_set, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    hang = ToolCall("python", {"code": "while True: pass"})
    results = run(ToolSet(["python"], 20.0), *[hang] * 4)
    assert 10.0 < now_s[0] < 20.0
    assert all(failed for _, failed in results)
    assert results[0][0] == "[stopped: it took too long]"  # the same text in a repetition
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
        (["{file}:bare"], "needs type hints, and a docstring in Google's style with all arguments"),
        (["{file}:numpy_style"], "needs type hints, and a docstring in Google's style with all"),
        (
            ["{file}:many"],
            "must have named parameters alone, not *words: str: write one with a list",
        ),
        (["mcp:python 'server.py"], "No closing quotation"),
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
    assert run(ToolSet(["python_without_sandbox"], 120.0), ToolCall("python", {"code": "2"})) == [
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
    with pytest.raises(ToolFailed, match=r"^Error: wait: it took too long$"):
        McpServer(entry, 60.0).caller("wait")({"seconds": 1000}, time.monotonic() + 0.5)


PAGES = """
import json, os, sys
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    page = (asked.get("params") or {}).get("cursor", "0")
    tool = {"name": f"tool{page}", "inputSchema": {"type": "object", "properties": {}}}
    found = {
        "initialize": {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "s", "version": "1"}},
        "tools/list": {"tools": [tool]} | ({"nextCursor": str(int(page) + 1)} if page < "2" else {}),
        "tools/call": {"content": [
            {"type": "text", "text": os.environ["KEY_OF_A_USER"]},
            {"type": "image", "data": "AAAA", "mimeType": "image/png"},
            {"type": "resource", "resource": {"uri": "file:///a", "text": "two"}},
        ]},
    }[asked["method"]]
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": found}), flush=True)
"""


def test_all_pages_and_parts_of_a_server_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mcp")
    monkeypatch.setenv("KEY_OF_A_USER", "one")
    (tmp_path / "pages.py").write_text(PAGES)
    tools = ToolSet([f"mcp:{sys.executable} {tmp_path}/pages.py"], 60.0)
    assert [t["function"]["name"] for t in tools.schemas] == ["tool0", "tool1", "tool2"]
    assert run(tools, ToolCall("tool2")) == [("one\n[image]\ntwo", False)]
