"""Commands that a message prints for the user to paste: they run as they are printed, in the folder
in which the program was started.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

_TYPED = "TLT_MEGATRON_TYPED"


def note_command(words: Sequence[str]) -> None:
    """Remember the `tlt` command that was typed, for this process and its children."""
    os.environ[_TYPED] = tlt_command(*words)


def tlt_command(*words: object) -> str:
    """Return a command of this environment's `tlt`, which need not be on PATH."""
    program, found = Path(sys.executable).with_name("tlt"), shutil.which("tlt")
    if not program.is_file():
        return _join(_nearby(Path(sys.executable)), "-m", "tlt_megatron.cli", *words)
    is_on_path = found is not None and Path(found).samefile(program)
    return _join("tlt" if is_on_path else _nearby(program), *words)


def pip_command(*words: object) -> str:
    """Return a command that installs packages into this environment."""
    return _join(_nearby(Path(sys.executable)), "-m", "pip", "install", *words)


def resume_command(run_dir: Path) -> str:
    """Return the command that started this run, or the arguments of `Trainer`, with a resume from
    the run folder's newest checkpoint.
    """
    from tlt_megatron.runtime.parent import TRAINER_PID  # doctor needs no psutil

    if TRAINER_PID in os.environ:
        again = {"run.dir": str(run_dir), "checkpoint.resume": "auto"}
        return f"overrides={json.dumps(again, ensure_ascii=False)}"
    kept, words = [], iter(_typed_words())
    for word in words:
        if word == "--resume":
            next(words, None)
        elif not word.startswith(("--resume=", "checkpoint.resume=", "run.dir=")):
            kept.append(word)
    others = int(os.environ.get("GROUP_WORLD_SIZE", "1")) - 1  # torchrun's name for all nodes
    note = f"   # and its like on {others} other node{'s' * (others > 1)}" if others else ""
    return _join(*kept, "--resume", "auto", f"run.dir={run_dir}") + note


def _typed_words() -> list[str]:
    """Return what was typed: `tlt train`, or the torchrun that started this rank, or this program
    alone.
    """
    if _TYPED in os.environ:
        return shlex.split(os.environ[_TYPED])
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return list(sys.orig_argv)
    from tlt_megatron.runtime.parent import AGENT_PID

    agent = os.environ.get(AGENT_PID, os.getppid())
    return os.fsdecode(Path(f"/proc/{agent}/cmdline").read_bytes()).rstrip("\0").split("\0")


def _nearby(program: Path) -> str:
    """Return a path below this folder as it would be typed."""
    folder = Path.cwd()
    return str(program.relative_to(folder) if program.is_relative_to(folder) else program)


def _join(*words: object) -> str:
    return shlex.join(map(str, words))
