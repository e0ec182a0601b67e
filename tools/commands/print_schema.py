"""Prints the JSON Schema of a config, with which editors complete and check it.

    tlt schema > tlt_schema.json

The first line of a config then is `# yaml-language-server: $schema=tlt_schema.json`. The schema has
names, types and named values; a run also checks ranges, and settings against each other.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import types
import typing
from typing import Any

from tlt_megatron.config.ranges import Range
from tlt_megatron.config.schema import RunConfig

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def main() -> None:
    """Print the schema."""
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0]).parse_args()
    print(json.dumps(make_schema(), indent=2))


def make_schema() -> dict[str, Any]:
    """Return the schema of all sections."""
    sections = {
        field.name: _section(typing.cast(type, field.default_factory))
        for field in dataclasses.fields(RunConfig)
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A config of tlt_megatron",
        **_object(sections),
    }


def _section(kind: type) -> dict[str, Any]:
    hints, default = typing.get_type_hints(kind, include_extras=True), kind()
    settings = {
        field.name: _setting(hints[field.name]) | {"default": getattr(default, field.name)}
        for field in dataclasses.fields(kind)
    }
    about = " ".join((kind.__doc__ or "").partition("\n\n")[0].split())
    return {"description": about, **_object(settings), "type": ["object", "null"]}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _setting(hint: Any) -> dict[str, Any]:
    """Return the schema of an annotated type: its type, and what `ranges.Range` says in words."""
    ranges = [note for note in getattr(hint, "__metadata__", ()) if isinstance(note, Range)]
    if not ranges:
        return _type(hint)
    allowed = "; ".join(each.allowed for each in ranges)
    found = _type(hint.__origin__) | {"description": allowed}
    if allowed.startswith("one of "):
        found["enum"] = allowed.removeprefix("one of ").split(", ")
    return found


def _type(hint: Any) -> dict[str, Any]:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if len(kinds) > 1:
        return {"anyOf": [_type(kind) for kind in kinds]}
    origin, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin is list:
        return {"type": "array", "items": _type(arguments[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": _type(arguments[1])}
    return {"type": _TYPES[origin]} if origin in _TYPES else {}


if __name__ == "__main__":
    raise SystemExit("run it as: tlt schema")
