"""Reads YAML and `a.b=v` overrides into a RunConfig, the typed sections of schema.py, and checks
the JSON of a checkpoint by sections of the same kind.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
import types
import typing
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml

from tlt_megatron.config.other_names import our_name
from tlt_megatron.config.ranges import Section
from tlt_megatron.config.schema import RunConfig
from tlt_megatron.saved_files import one_line, read_bytes

T = TypeVar("T", bound=Section)

_MAX_FILE_BYTES = 1 << 20
_MAX_VALUES = 100_000  # of a file with its aliases written out; ten lines can stand for 10^10
_INT = "tag:yaml.org,2002:int"
_TEXTS = ("rollout.stop[", "eval.stop[")  # settings whose items are no paths


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 1e-6 as a number, and refuses a key that occurs twice in a mapping.

    Plain YAML 1.1 reads 1e-6 as a string, the strategy 4_2_8 as 428 and 010 as 8, and keeps the
    last of two equal keys.
    """

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in found if tag != _INT]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return the mapping's node. ValueError names a key that occurs twice, and both lines."""
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if (key.tag, key.value) in lines:
                first = lines[key.tag, key.value]
                raise ValueError(
                    f"key {key.value!r} stands in line {first} and again in line {line}: must stand once"
                )
            lines[key.tag, key.value] = line
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Write the mappings of `<<` out. ValueError where they stand for too many values."""
        num_values = 0
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                parts = value.value if isinstance(value, yaml.SequenceNode) else [value]
                for part in {id(p): p for p in parts if isinstance(p, yaml.MappingNode)}.values():
                    self.flatten_mapping(part)
                num_values += sum(len(part.value) for part in parts)
        if num_values > _MAX_VALUES:
            raise ValueError(f"its << stand for {num_values} values: must be at most {_MAX_VALUES}")
        super().flatten_mapping(node)


class _Dumper(yaml.SafeDumper):
    """SafeDumper with the same number format, so that it quotes a string that looks like a
    number.
    """


_Loader.add_implicit_resolver(
    _INT, re.compile(r"^[-+]?(0|[1-9][0-9]*|[1-9][0-9]{0,2}(_[0-9]{3})+)$"), list("-+0123456789")
)
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
        list("-+0123456789"),
    )


def load_config(
    path: str | Path | Sequence[str | Path] | None, overrides: Sequence[str] = ()
) -> RunConfig:
    """Read `path` (None: all defaults), apply `a.b=v` overrides in order, and check everything.

    Of several files, a later one replaces the settings that it names. ValueError names the key, the
    value and what is allowed. For an unknown key it also names the nearest known one, or ours if
    the key is of verl, slime or TRL.
    """
    raw: dict[str, Any] = {}
    for file in (path,) if isinstance(path, str | Path) else path or ():
        for section, content in read_sections(Path(file)).items():
            earlier = raw.get(section)
            if isinstance(earlier, dict) and isinstance(content, dict | None):
                content = earlier | (content or {})
            raw[section] = content
    for override in overrides:
        _apply_override(raw, override)
    return _build(RunConfig, raw, "")


def dump_config(config: RunConfig) -> str:
    """Return the whole configuration as YAML. `load_config` reads it back to an equal value."""
    return yaml.dump(dataclasses.asdict(config), Dumper=_Dumper, sort_keys=False)


def read_sections(path: Path) -> dict[str, Any]:
    """Return the sections of a YAML file, unchecked. ValueError names the file."""
    name = f"config={str(path)!r}"
    if not path.is_file():
        raise ValueError(
            f"{name}: {'is a folder, not a file' if path.is_dir() else 'no such file'}"
        )
    try:
        text = read_bytes(path, _MAX_FILE_BYTES).decode()
    except (OSError, ValueError) as error:
        raise ValueError(f"{name}: cannot be read: {error}") from error
    return parse_sections(text, name)


def parse_sections(text: str, name: str) -> dict[str, Any]:
    """Return the sections in the YAML `text` of the file that messages call `name`."""
    sections = _parse(text, name) or {}
    if not isinstance(sections, dict):
        raise ValueError(f"{name}: must hold a mapping of sections, not {_kind(sections)}")
    return sections


def check_record(record: type[T], raw: object, source: object) -> T:
    """Return JSON as a `Section`. ValueError names its source, a file say, and the key that is
    missing or unknown, or has another type or a value outside its range.
    """
    try:
        return _build(record, raw, "")
    except ValueError as error:
        raise ValueError(f"{source} is damaged: {one_line(error)}") from error


def _parse(text: str, name: str) -> Any:
    try:
        content = yaml.load(text, Loader=_Loader)
        _count_values(content, {})
        return content
    # ValueError: a key that occurs twice, or a date such as 2026-13-45; RecursionError: brackets
    # nested too deeply
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{name}: is not YAML: {' '.join(str(error).split())}") from error


def _count_values(content: object, known: dict[int, int]) -> int:
    """Return the number of values that `content` stands for, with its aliases written out.

    `known` holds the counts by identity. ValueError above _MAX_VALUES, and for a value inside
    itself.
    """
    if not isinstance(content, dict | list):
        return 1
    if id(content) not in known:
        known[id(content)] = 0  # in progress
        values = content.values() if isinstance(content, dict) else content
        known[id(content)] = 1 + sum(_count_values(value, known) for value in values)
    count = known[id(content)]
    if count == 0:
        raise ValueError(
            "an alias stands in the value that it names: a value cannot contain itself"
        )
    if count > _MAX_VALUES:
        raise ValueError(f"its aliases stand for {count} values: must be at most {_MAX_VALUES}")
    return count


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ValueError(f"override {override!r}: must be section.key=value")
    *sections, last = key.split(".")
    node = raw
    for section in sections:
        if node.get(section) is None:  # absent, or a section whose keys are all commented out
            node[section] = {}
        if not isinstance(node[section], dict):
            raise ValueError(f"override {override!r}: {section} is a value, not a section")
        # a copy: with a YAML anchor, another section is the same object
        node[section] = dict(node[section])
        node = node[section]
    try:
        value = _parse(text, f"override {override!r}") if text else ""
        is_block = isinstance(value, dict | list) and text.lstrip()[0] not in "[{"
    except ValueError:
        if not Path(text).exists():
            raise
        is_block = True
    if is_block and Path(text).exists():
        value = text  # such as the files [a].jsonl and a: b.jsonl
    is_cut = isinstance(value, str) and " #" in text and text[:1] not in ("'", '"')
    node[last] = text if is_cut else value  # YAML ends a plain text at " #"


def _build(section_type: type, raw: object, prefix: str) -> Any:
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        raise ValueError(f"{prefix}={raw!r}: must be a section of keys, not {_kind(raw)}")
    hints = typing.get_type_hints(section_type)
    known = {f.name for f in dataclasses.fields(section_type)}
    values: dict[str, Any] = {}
    for key, value in raw.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if key not in known or (isinstance(value, dict) and hints[key] is str):
            raise ValueError(f"{name}={value!r}: unknown key; {_meant(name, value, known)}")
        values[key] = _convert(value, hints[key], name)
    fields, absent = dataclasses.fields(section_type), dataclasses.MISSING
    needed = [f.name for f in fields if f.default is absent and f.default_factory is absent]
    if missing := [name for name in needed if name not in values]:
        raise ValueError(f"{prefix or 'it'} lacks {', '.join(missing)}")
    return section_type(**values)


def _meant(name: str, value: object, known: set[str]) -> str:
    """Return what to write instead of an unknown key, or instead of the keys in an unknown
    section.
    """
    keys = [(name, value)]
    for key, content in keys:  # grows
        if isinstance(content, dict):
            keys += [(f"{key}.{inner}", item) for inner, item in content.items()]
    found = [f"{key}: here {ours}" for key, _ in keys if (ours := our_name(key))]
    near = difflib.get_close_matches(name.rpartition(".")[2], known, n=1)
    advice = [f"did you mean {near[0]}?"] if near and not found else found
    section, dot, key = name.partition(".")
    if dot and {section, name} & known == {section}:  # a.b: v in a file, as on the command line
        advice = [f"a file has sections: {section}: {{{key}: {value!r}}}"]
    return "; ".join(advice or [f"must be one of {', '.join(sorted(known))}"])


def nearest_setting(name: str) -> str:
    """Return the setting of ours that a key without a section means; "" for none."""
    if ours := our_name(name):
        return ours
    sections = dataclasses.fields(RunConfig)
    keys = [(s.name, f.name) for s in sections for f in dataclasses.fields(_kind_of(s))]
    name = name.replace("-", "_")
    near = difflib.get_close_matches(name.rpartition(".")[2], [key for _, key in keys], n=1)
    return next((f"{section}.{key}" for section, key in keys if key in near), "")


def _kind_of(section: dataclasses.Field[Any]) -> type:
    return typing.cast(type, section.default_factory)


def _convert(value: object, hint: Any, name: str) -> object:
    """Convert `value` and its items to the annotated types: sections to their classes, int to
    float, and ~/ to the home folder.
    """
    if isinstance(hint, type) and issubclass(hint, Section):
        return _build(hint, value, name)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name}={value!r}: must be a finite number")
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    origins = {typing.get_origin(kind) or kind: kind for kind in kinds}
    if type(value) is date and str in origins:
        return value.isoformat()
    for origin, kind in origins.items():
        if origin is float and type(value) is int:
            return float(value)
        if isinstance(value, origin) and not (origin is int and isinstance(value, bool)):
            return _convert_items(value, kind, name)
    names = ["null" if origin is types.NoneType else origin.__name__ for origin in origins]
    is_text = str in origins and not isinstance(value, list | dict | None)
    advice = ": put it in quotes" if is_text else ""
    raise ValueError(f"{name}={value!r}: must be {' or '.join(names)}, not {_kind(value)}{advice}")


def _convert_items(value: object, hint: Any, name: str) -> object:
    items = typing.get_args(hint)
    if isinstance(value, str) and value.startswith("~/") and not name.startswith(_TEXTS):
        return os.path.expanduser(value)  # a shell does not do it behind the = of a setting
    if isinstance(value, list):
        return [_convert(item, items[0], f"{name}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict) and items[1] is not Any:
        return {
            _convert(key, items[0], f"key of {name}"): _convert(item, items[1], f"{name}.{key}")
            for key, item in value.items()
        }
    return value


def _kind(value: object) -> str:
    return type(value).__name__
