"""The tools of `rollout.tools`, and the environment that runs their calls. For reward workers.

An entry is `python` (the sandbox), `python_without_sandbox`, a function as path/to/file.py:name or
package.module:name, or `mcp:COMMAND`, which starts an MCP server with all of its tools. The schema
of a function is its attribute `schema` (OpenAI's form), or comes from its signature and docstring:

    def lookup(word: str) -> str:
        \"\"\"Look a word up in the dictionary.

        Args:
            word: The word.
        \"\"\"
"""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import EnumType
from typing import Any, NamedTuple, get_args, get_type_hints

from tlt_megatron.config.extensions import MCP, UNSAFE_PYTHON, load_extension
from tlt_megatron.rewards.environment import Environment, Step, ToolCall, Turn
from tlt_megatron.rewards.mcp_server import McpServer
from tlt_megatron.rewards.reward import is_async
from tlt_megatron.rewards.sandbox import find_level, run_python
from tlt_megatron.rewards.tool_calls import ToolFailed
from tlt_megatron.rewards.worker_process import ToolUseSpec
from tlt_megatron.runtime.log import encodable

MAX_RESULT_CHARACTERS = 1 << 16  # of a turn, together: they fit into a message of the worker
MAX_CALLS = 32  # of a turn
_MAX_NAME = 64  # characters of a name or id that the policy wrote
_PYTHON_S = 10.0  # of one piece of code, at most
_TURN_SHARE = 0.8  # of reward.timeout_s, after which a turn's further code and MCP calls do not run
_PYTHON_SCHEMA = {
    "name": "python",
    "description": "Runs Python code. Returns what it prints, and the value of an expression at its end.",
    "parameters": {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "The code."}},
        "required": ["code"],
    },
}


class Tool(NamedTuple):
    """One tool. `run` gets the arguments and the time when it must have ended (monotonic)."""

    function: Mapping[str, Any]  # of its OpenAI schema: name, description, parameters
    run: Callable[[Mapping[str, Any], float], object]


class ToolSet:
    """The tools of a run, loaded once in each worker.

    ValueError names an entry that cannot be used.
    """

    def __init__(self, entries: Sequence[str], timeout_s: float) -> None:
        self._tools: dict[str, Tool] = {}
        self._timeout_s = timeout_s
        for entry in entries:
            for tool in _load(entry, timeout_s):
                name = tool.function["name"]
                if name in self._tools:
                    raise ValueError(f"rollout.tools={entry!r}: there is another tool {name!r}")
                self._tools[name] = tool

    @property
    def schemas(self) -> list[dict[str, object]]:
        """Return OpenAI's schemas, for the chat template."""
        return [{"type": "function", "function": tool.function} for tool in self._tools.values()]

    def run(self, calls: Sequence[ToolCall]) -> Iterator[tuple[str, bool]]:
        """Yield the text of each result, and whether the call failed."""
        deadline = time.monotonic() + _TURN_SHARE * self._timeout_s
        limit = MAX_RESULT_CHARACTERS // max(1, len(calls))
        for index, call in enumerate(calls):
            try:
                if index == MAX_CALLS:
                    raise ToolFailed(f"Error: at most {MAX_CALLS} calls of a turn are run")
                text, has_failed = self._run(call, deadline), False
            except ToolFailed as error:
                text, has_failed = str(error), True
            cut = len(text) - limit
            if cut > 0:
                text = f"{text[:limit]}\n[{cut} more characters were cut]"
            yield encodable(text), has_failed

    def _run(self, call: ToolCall, deadline: float) -> str:
        if call.error:
            raise ToolFailed(f"Error: {call.error}")
        tool = self._tools.get(call.name)
        if tool is None:
            raise ToolFailed(
                f"Error: there is no tool {call.name!r}, only {', '.join(self._tools)}"
            )
        try:
            return _as_text(tool.run(call.arguments, deadline))
        except ToolFailed:
            raise
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            raise ToolFailed(f"Error: {type(error).__name__}: {error}") from error


class ToolUse(Environment):
    """Runs the calls of each turn and answers with their results. A turn without a call ends the
    conversation.
    """

    tool_set: ToolSet
    errors = "return"  # rollout.tool_errors

    def __init__(self) -> None:
        self.tools = ()  # each prompt has its tools already
        self._counts = {"tool_calls": 0, "failed_tool_calls": 0}

    def step(self, turn: Turn) -> Step:
        """Return the results of the calls, as messages of the role tool."""
        if turn.is_last or not turn.tool_calls:
            return Step(is_done=True)
        messages, calls = [], turn.tool_calls[: MAX_CALLS + 1]
        for call, (text, has_failed) in zip(calls, self.tool_set.run(calls), strict=True):
            self._counts["tool_calls"] += 1
            self._counts["failed_tool_calls"] += has_failed
            if has_failed and self.errors == "end":
                return Step(is_done=True)
            # templates of Mistral want nine characters
            call_id = call.id or f"call{self._counts['tool_calls']:05}"
            named = {"name": call.name[:_MAX_NAME], "tool_call_id": call_id[:_MAX_NAME]}
            messages.append({"role": "tool", **named, "content": text})
        return Step(messages)

    def end(self) -> Mapping[str, float]:
        """Return how many calls there were, and how many failed."""
        return self._counts


def make_tool_use(spec: ToolUseSpec) -> type[ToolUse]:
    """Return the environment of a run, with the tools loaded."""
    tools = ToolSet(spec["tools"], spec["timeout_s"])
    own = {"tool_set": tools, "tools": tools.schemas, "errors": spec["errors"]}
    return type("ToolUse", (ToolUse,), own)


def _load(entry: str, timeout_s: float) -> Iterator[Tool]:
    if entry in ("python", UNSAFE_PYTHON):
        level, why = find_level() if entry == "python" else ("none", "")
        if entry == "python" and level == "none":
            raise ValueError(
                f"rollout.tools: python needs a sandbox, which this machine lacks: {why}. Install bubblewrap,"
                " or name python_without_sandbox, which lets a model's code do all that this user may"
            )
        yield Tool(_PYTHON_SCHEMA, _python_at(level))
    elif entry.startswith(MCP):
        server = McpServer(entry, timeout_s)
        for function in server.functions:
            yield Tool(function, server.caller(function["name"]))
    else:
        yield _load_function(entry)


def _python_at(level: str) -> Callable[[Mapping[str, Any], float], object]:
    def run(arguments: Mapping[str, Any], deadline: float) -> object:
        code = arguments.get("code")
        if set(arguments) != {"code"} or not isinstance(code, str):
            raise ToolFailed('Error: python takes one argument, the text "code"')
        left = min(_PYTHON_S, deadline - time.monotonic())
        if left <= 0:
            raise ToolFailed("Error: no time is left for further calls of this turn")
        result = run_python(code, level=level, timeout_s=left)
        if result.failure:
            raise ToolFailed(result.text)
        return result.text

    return run


def _load_function(entry: str) -> Tool:
    function = load_extension("rollout.tools", entry)
    if is_async(function):
        raise ValueError(f"rollout.tools={entry!r}: must not be async")
    found, enums = getattr(function, "schema", None), {}
    if found is None:
        from transformers.utils.chat_template_utils import get_json_schema

        try:
            found = get_json_schema(function)
        except Exception as error:  # transformers has several kinds for docstrings and type hints
            raise ValueError(
                f"rollout.tools={entry!r}: needs type hints, and a docstring in Google's style with all arguments under"
                f" Args: {error}"
            ) from error
        enums = _enums(entry, function)
    schema = found.get("function", found) if isinstance(found, Mapping) else {}
    if not isinstance(schema.get("name"), str) or not isinstance(schema.get("parameters"), Mapping):
        raise ValueError(
            f"rollout.tools={entry!r}: its schema must be OpenAI's: a name and parameters"
        )
    signature = inspect.signature(function)

    def run(arguments: Mapping[str, Any], deadline: float) -> object:
        del deadline  # the pool ends a function that hangs
        try:
            bound = signature.bind(**arguments)
        except TypeError as error:
            raise ToolFailed(f"Error: {schema['name']}{signature}: {error}") from error
        for name in enums.keys() & bound.arguments.keys():
            bound.arguments[name] = _as_enum(enums[name], bound.arguments[name])
        return function(*bound.args, **bound.kwargs)

    return Tool(schema, run)


def _enums(entry: str, function: Callable[..., Any]) -> dict[str, EnumType]:
    """Return the enum of each parameter that has one: JSON gives the value of a member. ValueError
    for parameters that no JSON object of arguments can give.
    """
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(
                f"rollout.tools={entry!r}: must have named parameters alone, not {parameter}: write one with a list, or"
                " give the function an attribute `schema`"
            )
    hints = get_type_hints(function).items()
    kinds = ((name, kind) for name, hint in hints for kind in (hint, *get_args(hint)))
    return {name: kind for name, kind in kinds if isinstance(kind, EnumType)}


def _as_enum(kind: EnumType, value: Any) -> Any:
    if isinstance(value, list):
        return [_as_enum(kind, each) for each in value]
    return value if value is None else kind(value)


def _as_text(result: object) -> str:
    if isinstance(result, str):
        return result
    if inspect.isawaitable(result):
        raise TypeError("the tool returns an awaitable: it must return its result")
    return "" if result is None else json.dumps(result, ensure_ascii=False, default=str)
