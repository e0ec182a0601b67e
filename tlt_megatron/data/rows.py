"""Read the rows of a prompt file (.jsonl or .parquet) with slime's or verl's keys, and check them.

Called by `prompts.load_prompts`. An error names the file, the row (from 1; in .jsonl the line
number), the key and the allowed values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

from tlt_megatron.config.schema import DataSection
from tlt_megatron.types import Message, Prompt

_BATCH_ROWS = 1024
_VERL_LABEL = "reward_model.ground_truth"
_MESSAGES_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""")
_OTHER_MEDIA = ("images", "videos", "audios")  # columns of data sets of verl and TRL
_SHOWN_CHARACTERS = 60  # of a prompt, in an error message


class Row(NamedTuple):
    """One row, checked but not tokenized."""

    number: int
    text: str | list[Message]  # what becomes the tokens of `prompt`
    prompt: Prompt  # without tokens and the number of its draw
    conversions: list[str]  # what was converted or may be a mistake, for a warning


def read_rows(path: Path, section: DataSection) -> Iterator[Row]:
    """Yield all rows in file order. ValueError at the first row that cannot be used."""
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise ValueError(f"{path}: must be a .jsonl or .parquet file")
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    seen: dict[tuple[str, str], int] = {}  # data_source, prompt_id -> row
    for number, raw in readers[path.suffix](path):
        try:
            row = _read_row(raw, number, path.stem, section)
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


def _read_jsonl(path: Path) -> Iterator[tuple[int, object]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                raw = json.loads(line, object_pairs_hook=_without_twins)
            except (ValueError, RecursionError) as error:  # bad JSON or bad UTF-8
                raise ValueError(
                    f"{path} row {number}: must be one JSON object: {error}"
                ) from error
            yield number, raw


def _without_twins(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object. ValueError for a key that stands twice: a value would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"the key {_twin([key for key, _ in pairs])!r} stands twice")
    return found


def _twin(names: list[str]) -> str:
    """Return the first name that stands twice, or nothing."""
    return next((name for name in names if names.count(name) > 1), "")


def _read_parquet(path: Path) -> Iterator[tuple[int, object]]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: is not a parquet file: {error}") from error
    with file:
        if twin := _twin(file.schema_arrow.names):
            raise ValueError(f"{path}: the column {twin!r} stands twice")
        number = 0
        try:
            # no threads: ranks that are forked later would inherit their pool
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, use_threads=False):
                for raw in batch.to_pylist():
                    number += 1
                    yield number, raw
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise ValueError(f"{path}: is damaged behind row {number}: {error}") from error


def _read_row(raw: object, number: int, stem: str, section: DataSection) -> Row:
    if not isinstance(raw, dict):
        raise ValueError(f"is a {type(raw).__name__}, must be an object with keys")
    conversions: list[str] = []
    for key in _OTHER_MEDIA:
        if raw.get(key):
            raise ValueError(f"{key} is not empty: the policy reads and writes text alone")
    text = _text(raw, section.input_key, conversions)
    prompt = Prompt(
        prompt_id=_prompt_id(raw) or f"{stem}:{number}",
        draw_index=0,
        token_ids=(),
        data_source=_data_source(raw),
        ground_truth=_label(raw, section.label_key, conversions),
        extra_info=_extra_info(raw, conversions),
        messages=() if isinstance(text, str) else tuple(text),
    )
    return Row(number, text, prompt, conversions)


def _text(raw: dict[str, object], key: str, conversions: list[str]) -> str | list[Message]:
    value = _look_up(raw, key)
    if value is None:
        raise ValueError(f"{key} is missing, must be a string or a list of messages ({_keys(raw)})")
    if isinstance(value, str):
        if not _MESSAGES_AS_TEXT.match(value):
            return value
        conversions.append(f"{key} is JSON text, read as chat messages")
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{key}={value[:_SHOWN_CHARACTERS]!r}... must be a list of messages, not the text of one that is not JSON ({error})"
            ) from error
    if not isinstance(value, list) or not value:
        raise ValueError(f"{key}={value!r} must be a string or a list of messages")
    messages: list[Message] = []
    for index, message in enumerate(value):
        if not isinstance(message, dict) or not (
            isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        ):
            raise ValueError(
                f"{key}[{index}]={message!r} must be a message with the strings role and content"
            )
        # parquet gives every message the keys of all messages, with null for missing values
        messages.append({name: part for name, part in message.items() if part is not None})
    if messages[-1]["role"] == "assistant":
        raise ValueError(
            f"{key} ends with a turn of the assistant, must end with one that it answers"
        )
    return messages


def _label(raw: dict[str, object], key: str, conversions: list[str]) -> str:
    name, value = _first(raw, key) if key else _first(raw, "label", _VERL_LABEL)
    if value is None:
        wanted = key or f"label (or {_VERL_LABEL})"
        raise ValueError(f"{wanted} is missing, must be a string, number or boolean ({_keys(raw)})")
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
    return str(value)


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
    if not isinstance(value, str | int | None):
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
