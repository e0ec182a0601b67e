"""Writes our config from one of verl (YAML or launch script) or slime (launch script).

    tlt migrate run_qwen3_grpo.sh --out my.yaml

What has no counterpart is printed and stands as a comment at the end of the config, with its value:
nothing is lost.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tlt_megatron.config.load import load_config, read_sections
from tlt_megatron.config.other_names import our_name
from tlt_megatron.runtime.typed_command import tlt_command
from tlt_megatron.saved_files import read_text
from tools.commands import their_settings as theirs

# Up to a newline that is not quoted.
_COMMAND = re.compile(r"""(?:#[^\n]*|"(?:\\.|[^"\\])*"|'[^']*'|[^\n"'#])+""")
_TRL = {"model_name_or_path", "per_device_train_batch_size", "num_generations", "dataset_name"}
_ENDS = ("(", ")", "--", "&&", ";")  # where the values of a flag end


def main(arguments: list[str] | None = None) -> int:
    """Write the config. Return 2 if it does not pass the checks of settings: it is written all the
    same.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
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
    shown = {key: value if key == theirs.SCORER else repr(value) for key, value in left.items()}
    lines = [f"{key}: {value}{hints.get(key, '')}" for key, value in shown.items()]
    text = (
        f"# From {options.source.name}, by tlt migrate.\n{yaml.safe_dump(nested, sort_keys=False)}"
    )
    if lines:
        text += "# Not taken over:\n" + "".join(f"#   {line}\n" for line in lines)
    out.write_text(text, encoding="utf-8")
    print(f"{out}: {len(ours)} settings; not taken over: {len(lines)}")
    for line in lines:
        print(f"  {line}")
    is_open = ours["run.num_steps"] is None
    unknown = f"run.num_steps: set the number of RL steps, which {options.source} does not say"
    problems = [unknown] * is_open
    try:
        load_config(out, ["run.num_steps=1"] if is_open else [])
    except ValueError as error:
        problems.append(str(error))
    for problem in problems:
        print(f"to be changed before a run: {problem}", file=sys.stderr)
    if problems:
        return 2
    nodes, gpus = (
        next((given[k] for k in ks if k in given), None) for ks in (theirs.NODES, theirs.GPUS)
    )
    _print_next(out, str(nodes or 1), str(gpus))
    return 0


def _print_next(out: Path, num_nodes: str, num_gpus: str) -> None:
    """Print commands that plan and start the run. A number that the source leaves to a variable of
    its cluster, or has not, is a guess: 1 node, 8 GPUs, 80 GiB.
    """
    is_open = not (num_nodes.isdecimal() and num_gpus.isdecimal())
    nodes = int(num_nodes) if num_nodes.isdecimal() else 1
    gpus = int(num_gpus) if num_gpus.isdecimal() else 8
    plan = tlt_command("plan", out, "--ranks", nodes * gpus, "--memory", 80)
    print(f"{plan}   # put {'your GPUs and ' * is_open}their GiB here")
    train = tlt_command("train", out, "--nproc-per-node", gpus)
    if nodes > 1:
        train += f" --nnodes {nodes} --node-rank 0 --master-addr $(hostname)"
        train += f"   # and its like on {nodes - 1} other nodes"
    print(train)


def read(path: Path) -> dict[str, Any]:
    """Return the settings of a YAML file or of a script, by dotted key (verl) or by flag with _
    (slime).
    """
    try:
        if path.suffix in (".yaml", ".yml"):
            found = _flatten(read_sections(path), "")
            if names := _TRL & found.keys():
                raise ValueError(
                    f"{', '.join(sorted(names))}: names of TRL, whose settings are in no table of"
                    " this command: docs/coming_from.md has ours"
                )
            return found
        return _read_script(read_text(path).replace("\\\n", " "))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error


def _read_script(text: str) -> dict[str, Any]:
    """Return the settings of every command and array. Nothing is run."""
    variables: dict[str, str] = {}
    found: dict[str, list[str]] = {}  # the words of each setting
    for command in _COMMAND.findall(text):
        words: list[str] | None = None  # the values of the flag before
        is_of_ray = False
        for word in shlex.split(_spread_arrays(_expand(command, variables)), comments=True):
            is_of_ray = word == "ray" or (is_of_ray and word not in _ENDS)
            if is_of_ray:
                continue
            name, equals, value = word.partition("=")
            if word.startswith("--") and len(word) > 2:
                words = found[name[2:].replace("-", "_")] = [value] if equals else []
                words = None if equals else words
            elif equals and name.isidentifier():
                variables[name], words = value, None
            elif equals and re.fullmatch(r"\+*[\w.]+\.\w+", name):
                found[name.lstrip("+")], words = [value], None
            elif word in _ENDS or "[@]" in word:
                words = None
            elif words is not None:
                words.append(word)
    return {name: _value(words) for name, words in found.items()}


def convert(given: theirs.Values) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return our settings by dotted key, and theirs that have no counterpart."""
    project = "verl" if any("." in key for key in given) else "slime"
    tables = theirs.read_tables()
    table = theirs.converters(project, tables[project])
    given = tables[f"{project}_implied"] | dict(given)
    ours: dict[str, Any] = tables[f"{project}_defaults"]
    left: dict[str, Any] = {}
    for key, value in given.items():
        meaning = table.get(key)
        if key in tables["switches"] or (value is None and meaning):
            continue
        settings = None
        is_open = "$" in str(value)  # the script leaves it to a variable
        if not is_open or key in tables["never_default"]:
            with contextlib.suppress(ArithmeticError, KeyError, TypeError, ValueError):
                settings = meaning(value, given) if meaning else theirs.passed_on(key, value)
        if settings is None:
            left[key] = value
        else:
            ours |= settings
    if project == "verl" and not ours.get("reward.function"):
        theirs.choose_scorer(given, ours, left)
    _drop_unused(ours, left)
    ours.setdefault("run.num_steps", None)  # which the checks refuse: no default takes its place
    return ours, left


def _drop_unused(ours: dict[str, Any], left: dict[str, Any]) -> None:
    """Leave out what has no effect with other settings, and set what they imply."""
    loss, advantage = ours.get("algorithm.loss"), ours.get("algorithm.advantage")
    if loss in ("gspo", "cispo"):
        ours.pop("algorithm.dual_clip", None)
    if loss == "gspo":
        ours["algorithm.aggregation"] = "sequence_mean"
    if advantage != "gae":
        unused = ["critic.", "algorithm.lam"]
        unused += [] if advantage == "reinforce_plus_plus" else ["algorithm.gamma"]
        for key in [key for key in ours if key.startswith(tuple(unused))]:
            del ours[key]
    if ours.get("algorithm.clip_low"):
        ours.setdefault("algorithm.clip_high", ours["algorithm.clip_low"])
        ours["algorithm.clip_low"] = min(1.0, ours["algorithm.clip_low"])  # 1: no lower bound
    if ours.get("eval.interval") and not ours.get("data.eval"):
        left["evaluation every"] = ours.pop("eval.interval")


def _flatten(node: Any, prefix: str) -> dict[str, Any]:
    if not isinstance(node, dict):
        return {prefix: node}
    found: dict[str, Any] = {}
    for key, value in node.items():
        found |= _flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return found


def _expand(command: str, variables: Mapping[str, str]) -> str:
    """Return `command` with the values of $NAME, ${NAME}, ${NAME:-default} and $((1 + NAME)).

    Names that are unknown stay, and so does arithmetic with them, without spaces.
    """

    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[2], match[3]
        known = variables.get(name, os.environ.get(name, default))
        return match[0] if known is None else known

    def result(match: re.Match[str]) -> str:
        names = r"[A-Za-z_]\w*"
        text = re.sub(names, lambda name: variables.get(name[0], name[0]), match[1])
        text = text.replace(" ", "")
        if "**" in text or not re.fullmatch(r"[\d+*/()-]+", text):
            return f"$[{text}]"
        try:
            return str(eval(text.replace("/", "//")))  # digits, operators and parentheses only
        except (ArithmeticError, SyntaxError, TypeError):
            return f"$[{text}]"

    for _ in range(4):  # a default may hold a name
        command = re.sub(r"\$(\w+)|\$\{(\w+)(?::-([^${}]*))?\}", value, command)
    return re.sub(r"\$\(\((.+?)\)\)(?!\))", result, command)


def _spread_arrays(command: str) -> str:
    """Return `command` with the parentheses of arrays as words of their own."""
    return re.sub(r"\)\s*$", " )", command.replace("=(", "=( "))


def _value(words: list[str]) -> Any:
    """Return the value of a setting: a flag without words is on."""
    typed = [_typed(word) for word in words]
    return True if not typed else typed[0] if len(typed) == 1 else typed


def _typed(text: str) -> Any:
    if re.fullmatch(r"[-+]?[\d.]+e[-+]?\d+", text):  # YAML reads 1e-6 as text
        return float(text)
    try:
        return None if text == "None" else yaml.safe_load(text)
    except yaml.YAMLError:
        return text


if __name__ == "__main__":
    raise SystemExit("run it as: tlt migrate")
