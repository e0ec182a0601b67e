"""Prints the JSON Schema of a config, with which editors complete and check it.

    tlt schema > tlt_schema.json

The first line of a config then is `# yaml-language-server: $schema=tlt_schema.json`. The schema has
names, types, named values, ranges and the comments of config/schema.py. A run also checks settings
against each other.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import io
import json
import re
import tokenize
import types
import typing
from collections.abc import Iterator
from typing import Any

from tlt_megatron.config.extensions import REGISTRY
from tlt_megatron.config.ranges import Range
from tlt_megatron.config.schema import RunConfig

_CODE = r"^.+:[A-Za-z_]\w*$"  # path/to/file.py:name or package.module:name
_INTERVAL = re.compile(r"in ([\[(])([\d.]+), (2\*\*32|[\d.]+)([\])])")
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def main() -> None:
    """Print the schema."""
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0]).parse_args()
    print(json.dumps(make_schema(), indent=2))


def make_schema() -> dict[str, Any]:
    """Return the schema of all sections."""
    sections = {
        field.name: _section(field.name, typing.cast(type, field.default_factory))
        for field in dataclasses.fields(RunConfig)
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A config of tlt_megatron",
        **_object(sections),
    }


def comments_of(kind: type) -> Iterator[tuple[str, str]]:
    """Yield the comment of each field of a section by its name: the lines above it, on its lines,
    or both.
    """
    source = inspect.getsource(kind)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    found = [token for token in tokens if token.type == tokenize.COMMENT]
    comments = {token.start[0]: token.string for token in found}
    alone = {token.start[0] for token in found if token.line.lstrip().startswith("#")}
    (owner,) = ast.parse(source).body
    for field in owner.body if isinstance(owner, ast.ClassDef) else ():
        if isinstance(field, ast.AnnAssign):
            first = field.lineno
            while first - 1 in alone:
                first -= 1
            lines = range(first, (field.end_lineno or first) + 1)
            words = [comments[n].lstrip("# ") for n in lines if n in comments]
            yield ast.unparse(field.target), " ".join(words)


def _section(name: str, kind: type) -> dict[str, Any]:
    hints, default = typing.get_type_hints(kind, include_extras=True), kind()
    settings = {}
    for key, comment in comments_of(kind):
        setting = _setting(hints[key], comment)
        if names := getattr(REGISTRY.get(f"{name}.{key}"), "built_in", None):
            setting = _named(setting, [*names], may_be_empty=getattr(default, key) == "")
            setting["description"] = comment
        settings[key] = setting | {"default": getattr(default, key)}
    about = " ".join((kind.__doc__ or "").partition("\n\n")[0].split())
    return {"description": about, **_object(settings), "type": ["object", "null"]}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _setting(hint: Any, comment: str) -> dict[str, Any]:
    """Return the schema of an annotated type: its type, its comment, and the values that
    `ranges.Range` allows.
    """
    ranges = [note for note in getattr(hint, "__metadata__", ()) if isinstance(note, Range)]
    found = _type(hint.__origin__ if ranges else hint)
    for allowed in (each.allowed for each in ranges):
        found |= _bounds(allowed)
        comment += f" ({allowed})" if allowed not in comment else ""
        if allowed.startswith("one of "):
            found["enum"] = allowed.removeprefix("one of ").split(", ")
    return found | {"description": comment.strip()}


def _bounds(allowed: str) -> dict[str, float]:
    """Return the limits that a text begins with: ">= 1", "in (0, 1]"."""
    if limit := re.match(r"(>=?) ([\d.]+)", allowed):
        return {"minimum" if limit[1] == ">=" else "exclusiveMinimum": _number(limit[2])}
    if interval := _INTERVAL.match(allowed):
        first, low, high, last = interval.groups()
        return {
            "minimum" if first == "[" else "exclusiveMinimum": _number(low),
            "maximum" if last == "]" else "exclusiveMaximum": _number(high),
        }
    return {}


def _number(text: str) -> float:
    return 2**32 if text == "2**32" else float(text) if "." in text else int(text)


def _named(setting: dict[str, Any], names: list[str], *, may_be_empty: bool) -> dict[str, Any]:
    """Return the schema of a setting that takes a built-in name, or the place of code."""
    one = [{"enum": [*names, *[""] * may_be_empty]}, {"type": "string", "pattern": _CODE}]
    about = {"description": setting["description"]}
    if setting.get("type") == "array":
        return about | {"type": "array", "items": {"anyOf": one}}
    tables = [kind for kind in setting.get("anyOf", ()) if kind.get("type") == "object"]
    tables = [{**t, "propertyNames": {"anyOf": one}} for t in tables]
    lists = [kind for kind in setting.get("anyOf", ()) if kind.get("type") == "array"]
    return about | {"anyOf": [*one, *tables, *lists]}


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
