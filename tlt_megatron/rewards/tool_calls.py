"""Reads the calls of tools in the text of a turn, in the forms of model families.

`find_form` reads the form from the chat template. The texts have their special tokens. A call that
cannot be read is no exception: it is a `ToolCall` with `error`, which the model gets as its result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from tlt_megatron.rewards.environment import ToolCall

Schemas = Sequence[Mapping[str, Any]]  # OpenAI's: {"type": "function", "function": {...}}

# A template may begin the turn within a thought, which then only ends.
_THOUGHTS = re.compile(
    r"^(?:(?!<think>).)*?</think>|<think>.*?(</think>|$)|\[THINK\].*?(\[/THINK\]|$)", re.DOTALL
)
_TAGGED = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|$)", re.DOTALL)
_CODER = re.compile(r"<function=([^>]*)>(.*?)(?:</function>|$)", re.DOTALL)
# Texts are split at the begins of arguments: an expression that looks for each end would take
# quadratic time where a policy repeats a begin.
_CODER_ARGUMENT = re.compile(r"([^>]*)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_GLM_ARGUMENT = re.compile(r"(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)
_NAMED_MISTRAL = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?\[ARGS\]")
_LLAMA_TAG = "<|python_tag|>"
_DECODER = json.JSONDecoder()
_OF_PYTHON = {"None": "null", "True": "true", "False": "false"}
_KINDS = {str: "string", bool: "boolean", int: "number", float: "number", list: "array"}
_KINDS |= {dict: "object", type(None): "null"}
_DEEPEST = 100  # values within each other in a call
_SHOWN = 60  # characters of a call in an error


class ToolFailed(Exception):
    """A call failed for a reason that the model should read."""


def find_form(template: str) -> str:
    """Return the form of calls that a chat template teaches: tags (Hermes, Qwen, GLM), mistral or
    llama; "" for another one.
    """
    if "<tool_call>" in template:
        return "tags"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    return "llama" if "ipython" in template and '"parameters"' in template else ""


def function_of(tool: object) -> Mapping[str, Any]:
    """Return the function in an OpenAI schema, which some write without what is around it."""
    found = tool.get("function", tool) if isinstance(tool, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def name_of(tool: object) -> str:
    """Return the name in an OpenAI schema, or an empty string for a schema without a name."""
    name = function_of(tool).get("name")
    return name if isinstance(name, str) else ""


def properties_of(tool: object) -> Mapping[str, Any]:
    """Return the schema of each argument of a tool."""
    parameters = function_of(tool).get("parameters")
    found = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def read_calls(text: str, form: str, tools: Schemas) -> tuple[ToolCall, ...]:
    """Return the calls in a turn, in order. Calls within thoughts are none.

    `tools` give the types of arguments that a form writes without quotes.
    """
    text = _THOUGHTS.sub("", text)
    if form == "tags":
        return tuple(_read_tags(text, tools))
    return tuple(_read_mistral(text) if form == "mistral" else _read_llama(text))


def text_before_calls(text: str, form: str) -> str:
    """Return the text of a turn up to its first call."""
    begin = max((found.end() for found in _THOUGHTS.finditer(text)), default=0)
    marks = {"tags": "<tool_call>", "mistral": "[TOOL_CALLS]"}
    rest = text[begin:].partition(marks[form])[0] if form in marks else ""
    return text[:begin] + rest


def _read_tags(text: str, tools: Schemas) -> Iterator[ToolCall]:
    for found in _TAGGED.finditer(text):
        body, end = found[1].strip(), found[2]
        if not end:
            yield _failed(body, "</tool_call> is missing")
        elif body.startswith("{"):
            yield _read_json(body, "arguments")
        elif coder := _CODER.match(body):
            begin, *parts = coder[2].split("<parameter=")
            found_all = [_CODER_ARGUMENT.fullmatch(part) for part in parts]
            yield _with_types(body, f"{coder[1]} {begin}", found_all, tools)
        else:
            name, *parts = body.split("<arg_key>")
            yield _with_types(body, name, [_GLM_ARGUMENT.fullmatch(part) for part in parts], tools)


def _read_llama(text: str) -> Iterator[ToolCall]:
    body = text.strip()
    is_marked = body.startswith(_LLAMA_TAG)
    body = body.removeprefix(_LLAMA_TAG).strip()
    if not is_marked and not re.match(r'\{\s*"(name|type|parameters)"\s*:', body):
        return
    while body:
        found, end = _decode(body)
        if end == 0:
            yield _failed(body, str(found))
            return
        yield _checked(body[:end], found, "parameters")
        body = body[end:].lstrip(" \n\t;")


def _read_mistral(text: str) -> Iterator[ToolCall]:
    for part in text.split("[TOOL_CALLS]")[1:]:
        rest = part
        while found := _NAMED_MISTRAL.match(rest):
            rest = rest[found.end() :].lstrip()
            value, end = _decode(rest)
            if end == 0:
                yield _failed(rest, str(value))
                return
            yield _checked(
                rest[:end],
                {"name": found[1], "arguments": value, "id": found[2] or ""},
                "arguments",
            )
            rest = rest[end:]
        rest = rest.strip()
        if not rest:
            continue
        value, end = _decode(rest)
        if end == 0 or not isinstance(value, list):
            yield _failed(rest, str(value) if end == 0 else "must be a JSON list of calls")
            return
        for call in value:
            yield _checked(json.dumps(call), call, "arguments")


def _decode(text: str) -> tuple[object, int]:
    """Return the JSON value at the begin of `text` and where it ends; (why, 0) if there is none.
    Halves of surrogate pairs are no JSON in UTF-8.
    """
    try:
        value, end = _DECODER.raw_decode(text)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
        if _is_deep(value):
            raise ValueError(f"more than {_DEEPEST} values within each other")
    except (ValueError, RecursionError) as error:
        return f"must be JSON: {error}", 0
    return value, end


def _is_deep(value: object) -> bool:
    """Return whether a value is too deep for copies, which recurse."""
    level: list[Any] = [[value]]
    for _ in range(_DEEPEST + 1):
        lists = [each.values() if isinstance(each, dict) else each for each in level]
        level = [part for each in lists for part in each if isinstance(part, dict | list)]
    return bool(level)


def _read_json(body: str, key: str) -> ToolCall:
    value, end = _decode(body)
    if end < len(body):
        return _failed(body, str(value) if end == 0 else "must be one JSON object")
    return _checked(body, value, key)


def _checked(body: str, value: object, key: str) -> ToolCall:
    """Return the call of a JSON value, whose arguments may also stand under OpenAI's names."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return _failed(body, 'must be an object with a text "name"')
    arguments = value.get(key, value.get("arguments", value.get("parameters", {})))
    if isinstance(arguments, str):  # OpenAI's clients write them as text
        arguments, _ = _decode(arguments.strip() or "{}")
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        return _failed(body, f'"{key}" must be an object', value["name"])
    call_id = value.get("id", "")
    return ToolCall(value["name"], arguments, call_id if isinstance(call_id, str) else "")


def _with_types(
    body: str, name: str, found: Sequence[re.Match[str] | None], tools: Schemas
) -> ToolCall:
    """Return the call of arguments that are texts: those that are no strings by the tool's schema
    are JSON, or None, True or False as Python writes them.
    """
    words = name.split()
    if len(words) != 1 or None in found:
        return _failed(body, "neither JSON nor a name with arguments")
    named = [tool for tool in tools if name_of(tool) == words[0]]
    known = properties_of(named[0]) if named else {}
    arguments: dict[str, object] = {}
    for key, text in (match.groups() for match in found if match):
        written = _OF_PYTHON.get(text.strip(), text.strip())
        value, end = _decode(written)
        kinds = {*_kinds(known.get(key.strip()))}
        is_text = "string" in kinds and _KINDS[type(value)] not in kinds - {"string"}
        arguments[key.strip()] = value if 0 < end == len(written) and not is_text else text
    return ToolCall(words[0], arguments)


def _kinds(schema: object) -> Iterator[str]:
    """Yield the types of JSON that a schema allows, as far as it names them."""
    if not isinstance(schema, Mapping):
        return
    for kind in _items(schema.get("type")) or [schema.get("type")]:
        yield "number" if kind == "integer" else str(kind)
    yield from ["null"] if schema.get("nullable") else []
    yield from (_KINDS.get(type(value), "") for value in _items(schema.get("enum")))
    for key in ("anyOf", "oneOf", "allOf"):
        yield from chain.from_iterable(map(_kinds, _items(schema.get(key))))


def _items(value: object) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _failed(body: str, why: str, name: str = "") -> ToolCall:
    shown = body if len(body) <= _SHOWN else f"{body[:_SHOWN]}..."
    return ToolCall(name, error=f"the call {shown!r} cannot be read: {why}")
