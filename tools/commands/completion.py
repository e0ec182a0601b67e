"""Prints what makes bash complete commands, files, options, settings and their values of `tlt`.

    tlt completion >> ~/.bashrc

In zsh, `autoload -U bashcompinit && bashcompinit` comes before it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import Any

from tlt_megatron.cli import COMMANDS, launcher_options, source_of
from tools.commands.print_schema import make_schema

_SCRIPT = """_tlt() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} key="" words=""
  # bash splits key=value into three words
  if [ "$word" = "=" ]; then key=${{COMP_WORDS[COMP_CWORD-1]}}; word=""
  elif [ "${{COMP_WORDS[COMP_CWORD-1]}}" = "=" ]; then key=${{COMP_WORDS[COMP_CWORD-2]}}
  elif [[ "$word" = *=* ]]; then key=${{word%%=*}}; fi
  if [ "$COMP_CWORD" = 1 ]; then
    COMPREPLY=($(compgen -W "{commands}" -- "$word"))
    return
  fi
  case "${{key:-${{COMP_WORDS[1]}}}}" in
{cases}
  esac
  if [ -n "$key" ]; then
    [[ "$word" = *=* ]] && words=$(printf "$key=%s " $words)
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    [ -n "$COMPREPLY" ] || COMPREPLY=($(compgen -f -- "${{word#"$key="}}"))
  else
    COMPREPLY=($(compgen -f -- "$word") $(compgen -W "$words {settings}" -- "$word"))
  fi
}}
complete -o filenames -o nospace -F _tlt tlt
"""
_OPTION = re.compile(r"""(?:add|add_argument)\(\s*"(--[a-z][\w-]*)\"""")


def main() -> None:
    """Print the script."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.parse_args()
    properties = make_schema()["properties"]
    values = {
        f"{section}.{key}": _values(setting)
        for section, about in properties.items()
        for key, setting in about["properties"].items()
    }
    options = {name: _options(name) for name in COMMANDS}
    cases = [
        f'    {name}) words="{" ".join(words)}" ;;'
        for name, words in (options | values).items()
        if words
    ]
    settings = " ".join(f"{name}=" for name in values)
    print(
        _SCRIPT.format(commands=" ".join(COMMANDS), cases="\n".join(cases), settings=settings),
        end="",
    )


def _values(setting: Mapping[str, Any]) -> list[str]:
    """Return the named values of a setting; [] where it takes others alone."""
    if setting.get("type") == "boolean":
        return ["true", "false"]
    named = [*setting.get("enum", ())]
    for kind in (*setting.get("anyOf", ()), setting.get("items")):
        named += _values(kind) if kind else []
    return [name for name in named if name]


def _options(command: str) -> list[str]:
    """Return the options of a command, read from its source: nothing is imported."""
    if command == "train":
        known = (*launcher_options(), "--resume", "--print-config", "--dry-run")
        return [*known, "--help"]
    return [*dict.fromkeys(_OPTION.findall(source_of(command))), "--help"]


if __name__ == "__main__":
    raise SystemExit("run it as: tlt completion")
