"""Prints what makes bash complete commands, files and settings of `tlt`.

    tlt completion >> ~/.bashrc

In zsh, `autoload -U bashcompinit && bashcompinit` comes before it.
"""

from __future__ import annotations

import argparse
import dataclasses

from tlt_megatron.cli import COMMANDS
from tlt_megatron.config.schema import RunConfig

_SCRIPT = """_tlt() {{
  local word=${{COMP_WORDS[COMP_CWORD]}}
  if [ "$COMP_CWORD" = 1 ]; then
    COMPREPLY=($(compgen -W "{commands}" -- "$word"))
  else
    COMPREPLY=($(compgen -f -- "$word") $(compgen -W "{settings}" -- "$word"))
  fi
}}
complete -o filenames -o nospace -F _tlt tlt
"""


def main() -> None:
    """Print the script."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.parse_args()
    config = RunConfig()
    settings = [
        f"{section.name}.{field.name}="
        for section in dataclasses.fields(config)
        for field in dataclasses.fields(getattr(config, section.name))
    ]
    print(_SCRIPT.format(commands=" ".join(COMMANDS), settings=" ".join(settings)), end="")


if __name__ == "__main__":
    raise SystemExit("run it as: tlt completion")
