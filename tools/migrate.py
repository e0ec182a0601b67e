"""Writes our config from one of verl (YAML or launch script) or slime (launch script).

    tlt migrate run_qwen3_grpo.sh --out my.yaml

What has no counterpart is printed and stands as a comment at the end of the config, with its value:
nothing is lost.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tlt_megatron.config.load import load_config
from tlt_megatron.config.other_names import our_name
from tools import their_settings as theirs

_QUOTED_OR_NEWLINE = re.compile(r"""#[^\n]*|"(?:\\.|[^"\\])*"|'[^']*'|\n""")


def main(arguments: list[str] | None = None) -> int:
    """Write the config. Return 2 if it does not pass the checks of settings; it is written then, too."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", type=Path, metavar="FILE", help=".yaml of verl, or a script")
    parser.add_argument("--out", type=Path, help="default: <name>.tlt.yaml in this folder")
    options = parser.parse_args(arguments)
    out: Path = options.out or Path(f"{options.source.stem}.tlt.yaml")
    if out.exists():
        raise ValueError(f"--out {out}: exists already")
    given = read(options.source)
    if not given:
        raise ValueError(f"{options.source}: holds no settings of verl or slime")
    ours, left = convert(given)
    nested: dict[str, Any] = {}
    for key, value in ours.items():
        *path, last = key.split(".")
        node = nested
        for name in path:
            node = node.setdefault(name, {})
        node[last] = value
    hints = {key: f"; see {name}" for key in left if (name := our_name(key))}
    lines = [f"{key}: {value!r}{hints.get(key, '')}" for key, value in left.items()]
    text = (
        f"# From {options.source.name}, by tlt migrate.\n{yaml.safe_dump(nested, sort_keys=False)}"
    )
    if lines:
        text += "# Not taken over:\n" + "".join(f"#   {line}\n" for line in lines)
    out.write_text(text, encoding="utf-8")
    print(f"{out}: {len(ours)} settings; not taken over: {len(lines)}")
    for line in lines:
        print(f"  {line}")
    try:
        load_config(out)
    except ValueError as error:
        print(f"to be changed before a run: {error}", file=sys.stderr)
        return 2
    num_nodes, num_ranks = (
        next((given[k] for k in ks if k in given), None) for ks in (theirs.NODES, theirs.GPUS)
    )
    nodes = f" --nnodes {num_nodes}" if num_nodes not in (None, 1) else ""
    print(f"tlt train {out} --nproc-per-node {num_ranks or 'N'}{nodes}")
    return 0


def read(path: Path) -> dict[str, Any]:
    """Return the settings of a YAML file or of a script, by dotted key (verl) or by flag with _
    (slime).
    """
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix in (".yaml", ".yml"):
            settings = yaml.safe_load(text)
            return _flatten(settings, "") if isinstance(settings, dict) else {}
        text = re.sub(r"\$\(\((.+?)\)\)(?!\))", _close_up, text.replace("\\\n", " "))
        text = text.replace("=(", "=( ")
        text = re.sub(r"\)[ \t]*$", " )", text, flags=re.MULTILINE)  # ends an array
        text = re.sub(_QUOTED_OR_NEWLINE, lambda m: "\n;\n" if m[0] == "\n" else m[0], text)
        words = shlex.split(text, comments=True)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error
    variables: dict[str, str] = {}
    found: dict[str, Any] = {}
    flag = ""
    for word in (each for written in words for each in _shell_words(written, variables)):
        name, equals, value = word.partition("=")
        if word.startswith("--") and len(word) > 2:
            flag = name[2:].replace("-", "_")
            found[flag] = _typed(value) if equals else True
            flag = "" if equals else flag
        elif equals and re.fullmatch(r"\w+", name):
            variables[name], flag = value, ""
        elif equals and re.fullmatch(r"\+*[\w.]+\.\w+", name):
            found[name.lstrip("+")], flag = _typed(value), ""
        elif word in ("(", ")", "--", "&&", ";") or "[@]" in word or not flag:
            flag = ""
        elif found[flag] is True:
            found[flag] = _typed(word)
        else:  # a further value
            before = found[flag]
            found[flag] = [*(before if isinstance(before, list) else [before]), _typed(word)]
    return found


def convert(given: theirs.Values) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return our settings by dotted key, and theirs that have no counterpart."""
    ours: dict[str, Any] = {}
    left: dict[str, Any] = {}
    is_verl = any("." in key for key in given)
    table = theirs.VERL if is_verl else theirs.SLIME
    implied = theirs.VERL_IMPLIED if is_verl else theirs.SLIME_IMPLIED
    newest = implied | {theirs.newest_name(key): value for key, value in given.items()}
    implied = {key: value for key, value in newest.items() if key in implied}
    for key, value in {**implied, **given}.items():
        name = theirs.newest_name(key)
        meaning = table.get(name)
        if name in theirs.SWITCHES or (value is None and meaning):
            continue
        settings = None
        if "$" not in str(value):  # else the script leaves it open
            try:
                settings = meaning(value, newest) if meaning else theirs.passed_on(name, value)
            except (TypeError, ValueError):
                settings = None  # of another kind than expected, so it is listed
        if settings is None and name in theirs.NAMES:
            ours[theirs.NAMES[name]] = value  # which the checks refuse
        elif settings is None:
            left[key] = value
        else:
            ours |= settings
    if "run.num_steps" not in ours and any(key in left for key in theirs.EPOCHS):
        ours["run.num_steps"] = None  # which the checks refuse
    loss = ours.get("algorithm.loss")
    if loss in ("gspo", "cispo") and ours.get("algorithm.dual_clip"):
        left["dual clip"] = ours.pop("algorithm.dual_clip")
    if loss == "gspo" and ours.get("algorithm.aggregation") != "sequence_mean":
        left["aggregation"] = ours.pop("algorithm.aggregation", "token_mean")
        ours["algorithm.aggregation"] = "sequence_mean"
    ours = (theirs.VERL_DEFAULTS if is_verl else theirs.SLIME_DEFAULTS) | ours
    if loss in ("gspo", "cispo"):
        ours.pop("algorithm.dual_clip", None)
    if ours.get("algorithm.advantage") != "gae":
        has_discount = ours.get("algorithm.advantage") == "reinforce_plus_plus"
        of_critic = ("critic.", "algorithm.lam", *["algorithm.gamma"] * (not has_discount))
        ours = {key: value for key, value in ours.items() if not key.startswith(of_critic)}
    if ours.get("algorithm.clip_low") and "algorithm.clip_high" not in ours:
        ours["algorithm.clip_high"] = ours["algorithm.clip_low"]
    if ours.get("algorithm.clip_low", 0) > 1:  # no lower bound
        ours["algorithm.clip_low"] = 1.0
    if ours.get("eval.interval") and not ours.get("data.eval"):
        left["evaluation every"] = ours.pop("eval.interval")
    return ours, left


def _flatten(node: Any, prefix: str) -> dict[str, Any]:
    if not isinstance(node, dict):
        return {prefix: node}
    found: dict[str, Any] = {}
    for key, value in node.items():
        found |= _flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return found


def _shell_words(word: str, variables: Mapping[str, str]) -> list[str]:
    """Return `word` expanded: several words if it is a variable that holds settings."""
    expanded = _expand(word, variables)
    is_variable = re.fullmatch(r"\$\w+|\$\{\w+\}", word)
    holds_settings = re.match(r"\s*(--\w|\+*[\w.]+\.\w+=)", expanded)
    return expanded.split() if is_variable and holds_settings else [expanded]


def _expand(word: str, variables: Mapping[str, str]) -> str:
    """Return `word` with the values of $NAME, ${NAME} and ${NAME:-default}; unknown names stay."""

    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[2], match[3]
        known = variables.get(name, os.environ.get(name, default))
        return match[0] if known is None else known

    def result(match: re.Match[str]) -> str:
        text = re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0], name[0]), match[1])
        if "**" in text or not re.fullmatch(r"[\d+*/()-]+", text):
            return match[0]
        try:
            return str(eval(text.replace("/", "//")))  # digits, operators and parentheses only
        except (ArithmeticError, SyntaxError, TypeError):
            return match[0]

    for _ in range(4):  # a default may hold a name
        word = re.sub(r"\$(\w+)|\$\{(\w+)(?::-([^${}]*))?\}", value, word)
    return re.sub(r"\$\[(.+?)\]", result, word)


def _close_up(arithmetic: re.Match[str]) -> str:
    """Return $((a * b)) as one word, $[a*b]."""
    return f"$[{re.sub(r'[ $]', '', arithmetic[1])}]"


def _typed(text: str) -> Any:
    if re.fullmatch(r"[-+]?[\d.]+e[-+]?\d+", text):  # YAML reads 1e-6 as text
        return float(text)
    try:
        return None if text == "None" else yaml.safe_load(text)
    except yaml.YAMLError:
        return text


if __name__ == "__main__":
    sys.exit(main())
