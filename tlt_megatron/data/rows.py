"""Reads the keys of slime or verl in the rows of a prompt file, and checks them.

Called by `prompts.load_prompts`. An error names the file, the row (from 1; in .jsonl the line
number), the key and the allowed values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from tlt_megatron.config.schema import DataSection
from tlt_megatron.data.row_files import read_raw_rows, without_nulls
from tlt_megatron.saved_files import parse_json
from tlt_megatron.types import Message, Prompt

_VERL_LABEL = "reward_model.ground_truth"
_MESSAGES_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""")
_LIST_AS_TEXT = re.compile(r"\s*\[\s*\{")
# keys of data sets of verl and TRL, and of their messages
_OTHER_MEDIA = re.compile(
    r"(image|video|audio)s?(_(url|path|file|byte)s?)?|multi_modal_(data|inputs)|mm_data|pixel_values\w*"
)
_OBJECTS = ("reward_model", "extra_info", "metadata")
_SYSTEM = ("system", "system_prompt")
_OF_TEMPLATE = {"tools": list, "documents": list, "chat_template_kwargs": dict}
_KNOWN = {"label", "id", "data_source", "ability", *_OBJECTS, *_SYSTEM, *_OF_TEMPLATE}
_SHOWN_CHARACTERS = 60  # that an error message shows of a prompt


class Kind(Enum):
    """What a row needs besides its prompt."""

    SCORED = "a label"
    UNSCORED = "nothing"
    ANSWERED = "a label that is the answer, or messages that end with it"


class Row(NamedTuple):
    """One row, checked but not tokenized."""

    number: int
    text: str | list[Message]  # what becomes the tokens of `prompt`
    prompt: Prompt  # without tokens and the number of its draw
    conversions: list[str]  # what was converted or may be a mistake, for a warning
    unread: list[str]  # keys that nothing reads


def read_rows(path: Path, section: DataSection, kind: Kind = Kind.SCORED) -> Iterator[Row]:
    """Yield all rows in file order. ValueError at the first row that cannot be used."""
    seen: dict[tuple[str, str], int] = {}  # data_source, prompt_id -> row
    for number, raw in read_raw_rows(path):
        try:
            row = _read_row(raw, number, path.stem, section, kind)
            _check_id(row, seen)
        except ValueError as error:
            raise ValueError(f"{path} row {number}: {error}") from error
        yield row


def _check_id(row: Row, seen: dict[tuple[str, str], int]) -> None:
    source, prompt_id = row.prompt.data_source, row.prompt.prompt_id
    first = seen.setdefault((source, prompt_id), row.number)
    if first != row.number:
        raise ValueError(
            f"id {prompt_id!r} of data_source {source!r} stands in row {first} already; ids (id, metadata.id, "
            "extra_info.index) must differ within a data_source"
        )


def _read_row(raw: object, number: int, stem: str, section: DataSection, kind: Kind) -> Row:
    if not isinstance(raw, dict):
        raise ValueError(f"is a {type(raw).__name__}, must be an object with keys")
    conversions: list[str] = []
    _check_media(raw)
    raw |= {key: _as_object(key, raw[key]) for key in _OBJECTS if key in raw}
    has_answers = kind is Kind.ANSWERED
    key = "messages" if has_answers and raw.get("messages") else section.input_key
    text = _text(raw, key, conversions, may_be_answered=has_answers)
    if has_answers and isinstance(_look_up(raw, section.label_key or "label"), list):
        text = _with_completion(raw, section, text, conversions)
    is_answered = not isinstance(text, str) and text[-1]["role"] == "assistant"
    label = ""
    if kind is not Kind.UNSCORED and not (has_answers and is_answered):
        label = _label(raw, section.label_key, conversions)
    template_kwargs: dict[str, object] = {}
    if isinstance(text, str):
        _check_string(raw, section, conversions)
    else:
        text, template_kwargs = _with_system(raw, text), _template_kwargs(raw, section)
    prompt = Prompt(
        prompt_id=_prompt_id(raw) or f"{stem}:{number}",
        draw_index=0,
        token_ids=(),
        data_source=_data_source(raw),
        ground_truth=label,
        extra_info=_extra_info(raw, conversions),
        messages=() if isinstance(text, str) else tuple(text),
        template_kwargs=template_kwargs,
    )
    for key, value in (
        (section.input_key, text),
        ("the template's arguments", template_kwargs),
        ("id", prompt.prompt_id),
        ("data_source", prompt.data_source),
        ("label", prompt.ground_truth),
    ):
        try:
            json.dumps(value, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError:
            shown = repr(value)[:_SHOWN_CHARACTERS]
            raise ValueError(
                f"{key}={shown} holds half of a surrogate pair, must be Unicode text"
            ) from None
    return Row(number, text, prompt, conversions, _unread(raw, section, has_answers=has_answers))


def _unread(raw: dict[str, object], section: DataSection, *, has_answers: bool) -> list[str]:
    named = {name.partition(".")[0] for name in (section.input_key, section.label_key)}
    read = {*_KNOWN, *named, *(["messages"] if has_answers else [])}
    return [key for key, value in raw.items() if value and key not in read]


def _check_media(values: Mapping[str, object]) -> None:
    for key, value in values.items():
        if value and _OTHER_MEDIA.fullmatch(key):
            raise ValueError(f"{key} is not empty: the policy reads and writes text alone")


def _as_object(key: str, value: object) -> object:
    """Return a value, and JSON text as the object that it stands for, as tables store it."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        return _parsed(key, value)
    return value


def _check_string(raw: dict[str, object], section: DataSection, conversions: list[str]) -> None:
    """Refuse columns that no template could write into a prompt that is a string."""
    for key in (*_SYSTEM, *_OF_TEMPLATE):
        if raw.get(key):
            raise ValueError(
                f"{key} is not empty, and {section.input_key} is a string, which no chat template writes:"
                f" give {section.input_key} as a list of messages, or leave {key} out"
            )
    if section.chat_template_kwargs:
        conversions.append(
            f"{section.input_key} is a string, on which data.chat_template_kwargs has no effect"
        )


def _with_system(raw: dict[str, object], messages: list[Message]) -> list[Message]:
    """Return the messages after the row's system message, if it has one."""
    key, value = _first(raw, *_SYSTEM, absent=(None, ""))
    if value is None:
        return messages
    if not isinstance(value, str):
        raise ValueError(f"{key}={value!r} must be a string")
    if any(message["role"] in ("system", "developer") for message in messages):
        raise ValueError(f"{key} is not empty, and the messages have a system message already")
    return [{"role": "system", "content": value}, *messages]


def _with_completion(
    raw: dict[str, object],
    section: DataSection,
    prompt: str | list[Message],
    conversions: list[str],
) -> list[Message]:
    """Return a prompt with an answer that is messages too, as in TRL. No turn of the prompt is
    imitated.
    """
    key = section.label_key or "label"
    if isinstance(prompt, str):
        raise ValueError(f"{key} is a list of messages, so {section.input_key} must be one too")
    begin = [{**m, "train": False} if m["role"] == "assistant" else m for m in prompt]
    answer = _text(raw, key, conversions, may_be_answered=True)
    assert not isinstance(answer, str)
    return [*begin, *answer]


def _template_kwargs(raw: dict[str, object], section: DataSection) -> dict[str, object]:
    """Return what the chat template gets besides the messages: its arguments, and tools."""
    found = dict(section.chat_template_kwargs)
    for key, kind in _OF_TEMPLATE.items():
        value: Any = raw.get(key)
        if isinstance(value, str) and value.strip():  # as tables store it
            value = _parsed(key, value)
        if not value:
            continue
        if not isinstance(value, kind) or not (
            kind is dict or all(isinstance(part, dict) for part in value)
        ):
            name = "an object with keys" if kind is dict else "a list of objects"
            raise ValueError(f"{key}={value!r} must be {name}")
        found |= value if isinstance(value, dict) else {key: value}
    return found


def _parsed(key: str, text: str) -> Any:
    try:
        return without_nulls(parse_json(text))
    except ValueError as error:
        raise ValueError(f"{key}={text[:_SHOWN_CHARACTERS]!r} must be JSON: {error}") from error


def with_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose calls of tools have arguments as objects, as templates want them.
    Clients of OpenAI write JSON texts. ValueError for another text.
    """
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return message | {"tool_calls": [_with_arguments(call) for call in calls]}


def with_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose content is a text, the parts of a content joined. ValueError for what
    is no text.
    """
    _check_media(message)
    content = message.get("content")
    if isinstance(content, str) or not isinstance(content, Sequence):
        return message
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                f"content[{index}] has the type {kind!r:.80}: must be text, with a text"
            )
    return message | {"content": "".join(part["text"] for part in content)}


def _with_arguments(call: Any) -> Any:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    arguments = _parsed("arguments of a call", function["arguments"].strip() or "{}")
    function = function | {"arguments": arguments}
    return call | {"function": function} if "function" in call else function


def _text(
    raw: dict[str, object], key: str, conversions: list[str], *, may_be_answered: bool
) -> str | list[Message]:
    value = _look_up(raw, key)
    if value is None:
        raise ValueError(
            f"{key} is missing, must be a string or a list of messages ({_keys(raw)}):"
            " data.input_key names the key of prompts"
        )
    if isinstance(value, str):
        found = _messages_in(key, value)
        if found is None:
            return value
        conversions.append(f"{key} is JSON text, read as chat messages")
        value = found
    if not isinstance(value, list) or not value:
        raise ValueError(f"{key}={value!r} must be a string or a list of messages")
    messages: list[Message] = []
    for index, message in enumerate(value):
        try:
            message = with_arguments(with_text(message)) if isinstance(message, dict) else None
        except ValueError as error:
            raise ValueError(f"{key}[{index}]: {error}") from error
        is_call = message is not None and message.get("tool_calls")
        if message is None or not (
            isinstance(message.get("role"), str)
            and isinstance(message.get("content", "" if is_call else None), str)
        ):
            raise ValueError(
                f"{key}[{index}]={value[index]!r} must be a message with the strings role and content"
            )
        messages.append(message)
    if messages[-1]["role"] == "assistant" and not may_be_answered:
        raise ValueError(
            f"{key} ends with a turn of the assistant, must end with one that it answers"
        )
    return messages


def _messages_in(key: str, text: str) -> object:
    """Return the chat messages that a prompt is as JSON text; None if it is another text."""
    if not _LIST_AS_TEXT.match(text):
        return None
    is_meant = _MESSAGES_AS_TEXT.match(text)
    try:
        found = _parsed(key, text)
    except ValueError:
        if is_meant:
            raise
        return None
    are_messages = all(isinstance(each, dict) and "role" in each for each in found)
    return found if is_meant or are_messages else None


def _label(raw: dict[str, object], key: str, conversions: list[str]) -> str:
    name, value = _first(raw, key) if key else _first(raw, "label", _VERL_LABEL)
    if value is None:
        wanted = key or f"label (or {_VERL_LABEL})"
        raise ValueError(
            f"{wanted} is missing, must be a string, number or boolean ({_keys(raw)}):"
            " data.label_key names the key of ground truths"
        )
    if isinstance(value, str):
        if not value.strip():
            raise ValueError(f"{name}={value!r} must not be empty: no response could match it")
        if value.strip().lower() == "nan":
            conversions.append(f"{name} is the text nan, as tables write a missing value")
        return value
    if isinstance(value, float | Decimal):
        return _number(value, name, conversions)
    if not isinstance(value, int):
        raise ValueError(f"{name}={value!r} must be a string, number or boolean")
    return str(value).lower()  # true, as JSON writes it


def _number(value: float | Decimal, key: str, conversions: list[str]) -> str:
    """Format a number as a response would write it: 42.0 becomes 42, 1e-07 becomes 0.0000001."""
    exact = value if isinstance(value, Decimal) else Decimal(repr(value))
    if not exact.is_finite():
        raise ValueError(f"{key}={value!r} must be a finite number: no response could match it")
    text = str(int(exact)) if exact == exact.to_integral_value() else f"{exact.normalize():f}"
    if text != str(value):
        conversions.append(
            f"{key} is a number that no response would write so, read in its plain form (42.0 as 42)"
        )
    return text


def _data_source(raw: dict[str, object]) -> str:
    key, value = _first(raw, "data_source", "metadata.data_source", "metadata.source_name")
    if not isinstance(value, str | None):
        raise ValueError(f"{key}={value!r} must be a string")
    return value or ""


def _prompt_id(raw: dict[str, object]) -> str:
    key, value = _first(raw, "id", "metadata.id", "extra_info.index", absent=(None, ""))
    if isinstance(value, float) and value.is_integer():  # tables with gaps store ints as floats
        value = int(value)
    if not isinstance(value, str | int | None) or isinstance(value, bool):
        raise ValueError(f"{key}={value!r} must be a string or a whole number")
    return "" if value is None else str(value)


def _extra_info(raw: dict[str, object], conversions: list[str]) -> dict[str, object]:
    extra_info, metadata = _mapping(raw, "extra_info"), _mapping(raw, "metadata")
    conversions += [
        f"metadata.{key} replaces another value of extra_info.{key}"
        for key, value in metadata.items()
        if extra_info.get(key) not in (None, value)
    ]
    return {**extra_info, **metadata}


def _mapping(raw: dict[str, object], key: str) -> dict[str, object]:
    value = raw.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{key}={value!r} must be an object with keys")
    return value


def _first(
    raw: dict[str, object], *keys: str, absent: tuple[object, ...] = (None,)
) -> tuple[str, object]:
    """Return the first key whose value is not one of `absent`, with the value; else "" and None."""
    found = ((key, _look_up(raw, key)) for key in keys)
    return next(((key, value) for key, value in found if value not in absent), ("", None))


def _look_up(raw: dict[str, object], key: str) -> object:
    """Return the value of `key`, first as a literal key, then as a dotted path; None if missing."""
    if key in raw:
        return raw[key]
    value: object = raw
    for part in key.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(part)
    return value


def _keys(raw: dict[str, object]) -> str:
    return f"the row has {', '.join(map(str, raw)) or 'no keys'}"
