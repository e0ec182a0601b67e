"""The command `tlt`: it starts the programs of launch/ and tools/, which a checkout has beside the
package and a wheel in it.

`tlt train` is `launch/torchrun.py ... launch/pretrain_rl.py ...`. The other commands are the
`main()` of one tool each.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tlt_megatron.runtime.environment_variables import name_program
from tlt_megatron.runtime.typed_command import note_command
from tlt_megatron.version import __version__

_PACKAGE = Path(__file__).resolve().parent
_IN_WHEEL = _PACKAGE / "programs"  # setup.py copies launch/, tools/ and examples/ there
ROOT = _IN_WHEEL if _IN_WHEEL.is_dir() else _PACKAGE.parent


COMMANDS = {  # the word after `tlt`: the module whose `main()` it calls
    "doctor": "tlt_megatron.doctor",
    "init": "tools.commands.init_run",
    "migrate": "tools.commands.migrate",
    "train": "tlt_megatron.cli",
    "plan": "tools.commands.print_ledger",
    "schema": "tools.commands.print_schema",
    "completion": "tools.commands.completion",
    "report": "tools.commands.report",
    "watch": "tools.commands.watch",
    "compare": "tools.commands.compare_runs",
    "evaluate": "tools.commands.evaluate",
    "chat": "tools.commands.chat",
    "serve": "tools.commands.serve",
    "convert": "tools.commands.convert_checkpoint",
    "train-drafter": "tools.commands.warmup_drafter",
    "export-drafter": "tools.commands.export_drafter",
}
# Options of torchrun, without dashes: those that take a value, and those that take none.
_VALUES = [
    "nnodes",
    "nproc-per-node",
    "rdzv-backend",
    "rdzv-endpoint",
    "rdzv-id",
    "rdzv-conf",
    "max-restarts",
    "monitor-interval",
    "start-method",
    "event-log-handler",
    "role",
    "log-dir",
    "r",
    "redirects",
    "t",
    "tee",
    "local-ranks-filter",
    "duplicate-stdout-filters",
    "duplicate-stderr-filters",
    "node-rank",
    "master-addr",
    "master-port",
    "local-addr",
    "logs-specs",
    "numa-binding",
    "signals-to-handle",
    "shutdown-timeout",
]
_FLAGS = ["standalone", "virtual-local-rank"]
_TRAIN_HELP = """Trains a policy: one torchrun program.

    tlt train my.yaml --nproc-per-node 8 run.num_steps=100 --resume auto

usage: tlt train CONFIG.yaml ... [section.key=value ...] [--resume auto|never|FOLDER] [--print-config | --dry-run] [options of torchrun]

  section.key=value   settings over the file's
  --resume            sets checkpoint.resume; needs run.dir
  --print-config      print every setting and end
  --dry-run           check files, versions, layout, memory, disk, ports and clocks on every node and end; 2 if one fails
  --nproc-per-node N  ranks of this node, one per GPU; default 1
  --nnodes N          machines; each needs --node-rank (default: SLURM_NODEID) and --master-addr; default this one only"""


class Help(NamedTuple):
    """What the docstring of a command's module says first."""

    summary: str
    example: str


def help_of(name: str) -> Help:
    """Return the first line and the first example of a command's help, without importing its
    module.
    """
    text = _TRAIN_HELP if name == "train" else source_of(name).split('"""')[1]
    summary, *lines = text.splitlines()
    return Help(summary, next(line.strip() for line in lines if line.startswith("    tlt ")))


def source_of(name: str) -> str:
    """Return the source of a command's module."""
    module = COMMANDS[name]
    root = _PACKAGE.parent if module.startswith("tlt_megatron") else ROOT
    return (root / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")


def launcher_options() -> list[str]:
    """Return the long options of torchrun, which `tlt train` takes too."""
    return [f"--{name}" for name in (*_VALUES, *_FLAGS) if len(name) > 1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. 2: bad input, said in one line."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help", "--version"):
        print(f"tlt_megatron {__version__}" if name == "--version" else _help())
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        advice = f"did you mean {near[0]}?" if near else "tlt --help lists them"
        print(f"tlt: {name!r} is no command; {advice}", file=sys.stderr)
        return 2
    if {"-h", "--help"} & set(rest):
        about = f"tlt {name}: {help_of(name).summary}\nexample: {help_of(name).example}"
        print(_TRAIN_HELP if name == "train" else about, flush=True)
        if name in ("train", "doctor"):  # the others go on with their options
            return 0
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # deprecations inside of torch and Megatron
    try:
        return _train(rest) if name == "train" else run_tool(name, rest)
    except (OSError, ValueError) as error:
        print(f"tlt {name}: {error}", file=sys.stderr)
        return 2


def run_tool(name: str, arguments: Sequence[str]) -> int:
    """Run a command other than `train` in this process. It raises its own errors: ValueError for
    bad input.
    """
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))  # `tools` is no package of site-packages
    before = list(sys.argv)
    sys.argv[:] = [f"tlt {name}", *arguments]  # argparse names the program after it
    try:
        return importlib.import_module(COMMANDS[name]).main() or 0
    finally:
        sys.argv[:] = before


def train_command(arguments: Sequence[str]) -> list[str]:
    """Return the command line that runs `tlt train` with `arguments`.

    ValueError for one that means nothing.
    """
    launcher: list[str] = []
    program: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0).removeprefix("--config=")
        is_option = word.startswith("-")
        is_setting = not is_option and "=" in word and "." in word.partition("=")[0]
        last = launcher[-1] if launcher else ""
        has_open_option = last.startswith("-") and "=" not in last and _name(last) not in _FLAGS
        if word.endswith((".yaml", ".yml")) and not is_setting:
            program += ["--config", word]
        elif word == "--config":  # an option of launch/pretrain_rl.py: the file follows
            continue
        elif word == "--resume":
            program += [word, *rest[:1]]
            rest = rest[1:]
        elif is_setting or word in ("--print-config", "--dry-run") or word.startswith("--resume="):
            program.append(word)
        elif (_name(word) in (*_VALUES, *_FLAGS)) if is_option else has_open_option:
            launcher.append(word)
        else:
            raise ValueError(_unknown(word, rest))
    start = [sys.executable, str(ROOT / "launch" / "pretrain_rl.py")]
    if "--print-config" in program:
        return [*start, *program]
    meets_others = any(w.startswith(("--nnodes", "--rdzv", "--master", "--node")) for w in launcher)
    standalone = [] if meets_others or "--standalone" in launcher else ["--standalone"]
    start.insert(1, str(ROOT / "launch" / "torchrun.py"))
    return [*start[:2], *standalone, *launcher, *start[2:], *program]


def _name(option: str) -> str:
    """Return the name of an option of torchrun as its lists have it."""
    return option.partition("=")[0].lstrip("-").replace("_", "-")


def _unknown(word: str, rest: Sequence[str]) -> str:
    """Return the message about a word of `tlt train` that means nothing, with the setting that was
    meant, of ours or by another trainer's name.
    """
    from tlt_megatron.config.load import nearest_setting  # not before a command needs it

    name, equals, value = word.lstrip("-").partition("=")
    value = value if equals or not rest or rest[0].startswith("-") else rest[0]
    is_meant = word.startswith("-") or bool(equals)
    meant = nearest_setting(name) if is_meant else ""
    advice = f"; did you mean {meant}{f'={value}' if value and '(' not in meant else ''}?"
    return f"{word!r} is no section.key=value and no option{advice if meant else ''}"


def _train(arguments: Sequence[str]) -> int:
    """Become the launcher, which then receives the signals itself."""
    command = train_command(arguments)
    if "--config" not in command:
        raise ValueError("CONFIG is missing: name a .yaml file (tlt init writes one)")
    name_program("tlt train")
    note_command(["train", *arguments])
    return os.execv(command[0], command)


def _help() -> str:
    lines = ["usage: tlt COMMAND ...", ""]
    for name in COMMANDS:
        summary, example = help_of(name)
        lines += [f"  {name:<16}{summary}", f"{'':18}{example}"]
    return "\n".join([*lines, "", "tlt COMMAND --help says more; tlt --version"])


if __name__ == "__main__":
    sys.exit(main())
