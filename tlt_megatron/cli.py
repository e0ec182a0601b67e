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

from tlt_megatron.version import __version__

_PACKAGE = Path(__file__).resolve().parent
_IN_WHEEL = _PACKAGE / "programs"  # setup.py copies launch/, tools/ and examples/ there
ROOT = _IN_WHEEL if _IN_WHEEL.is_dir() else _PACKAGE.parent


class Command(NamedTuple):
    """One word after `tlt`: what it does, an example, and the module whose `main()` it calls."""

    summary: str
    example: str
    module: str


COMMANDS = {
    "doctor": Command(
        "say what this machine can run, what is missing and how to get it",
        "tlt doctor",
        "tlt_megatron.doctor",
    ),
    "init": Command(
        "write a config, a reward file and a Slurm script for a model, a data file and GPUs",
        "tlt init --model Qwen/Qwen2.5-7B-Instruct --data train.jsonl --gpus 8 --out mine",
        "tools.init_run",
    ),
    "migrate": Command(
        "write a config from a YAML or script of verl, or a script of slime",
        "tlt migrate run_qwen3_grpo.sh --out my.yaml",
        "tools.migrate",
    ),
    "train": Command(
        "train a policy: one torchrun program",
        "tlt train my.yaml --nproc-per-node 8 run.num_steps=100 --resume auto",
        "",
    ),
    "plan": Command(
        "print the memory of a rank by phase, before a run and without a GPU",
        "tlt plan my.yaml --ranks 8 parallel.tensor=4",
        "tools.print_ledger",
    ),
    "report": Command(
        "write a report of a run: one HTML page",
        "tlt report runs/mine --steps 40-41",
        "tools.report",
    ),
    "watch": Command(
        "serve a live page of one run or several on this machine",
        "tlt watch runs/mine --port 8017",
        "tools.watch",
    ),
    "compare": Command(
        "check that two runs drew the same tokens and got the same rewards",
        "tlt compare runs/plain runs/speculative",
        "tools.compare_runs",
    ),
    "evaluate": Command(
        "measure a model or a finished run: pass@k, avg@k, maj@k",
        "tlt evaluate runs/mine --data test.jsonl --samples 16",
        "tools.evaluate",
    ),
    "convert": Command(
        "write the policy of a run or a checkpoint as a Hugging Face folder",
        "tlt convert --from runs/mine --to exported",
        "tools.convert_checkpoint",
    ),
    "train-drafter": Command(
        "train a drafter for a model on the model's own responses",
        "tlt train-drafter --model Qwen/Qwen3-0.6B --prompts train.jsonl --out drafter",
        "tools.warmup_drafter",
    ),
    "export-drafter": Command(
        "write a drafter in the format of SGLang or vLLM",
        "tlt export-drafter --from runs/mine --to drafter --format sglang",
        "tools.export_drafter",
    ),
}
_FLAGS = ("--standalone",)  # options of torchrun that take no value
_TRAIN_HELP = """
usage: tlt train CONFIG.yaml ... [section.key=value ...] [--resume auto|never|FOLDER] [--print-config] [options of torchrun]

  section.key=value   settings over the file's
  --resume            sets checkpoint.resume; needs run.dir
  --print-config      print every setting and end
  --nproc-per-node N  ranks of this node, one per GPU; default 1
  --nnodes N          machines; each needs --node-rank (default: SLURM_NODEID) and --master-addr; default this one only"""


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
    command = COMMANDS[name]
    is_help = bool({"-h", "--help"} & set(rest))
    if is_help:
        print(f"tlt {name}: {command.summary}\nexample: {command.example}", flush=True)
    if not command.module:
        return _train(rest, is_help=is_help)
    if is_help and name == "doctor":  # has no options
        return 0
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # deprecations inside of torch and Megatron
    try:
        return run_tool(name, rest)
    except (OSError, ValueError) as error:
        print(f"tlt {name}: {error}", file=sys.stderr)
        return 2


def run_tool(name: str, arguments: Sequence[str]) -> int:
    """Run a command other than `train` in this process. It raises its own errors: ValueError for bad input."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))  # `tools` is no package of site-packages
    before = list(sys.argv)
    sys.argv[:] = [f"tlt {name}", *arguments]  # argparse names the program after it
    try:
        return importlib.import_module(COMMANDS[name].module).main() or 0
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
        has_open_option = last.startswith("-") and "=" not in last and last not in _FLAGS
        if word.endswith((".yaml", ".yml")) and not is_setting:
            program += ["--config", word]
        elif word == "--config":  # of launch/pretrain_rl.py: the file follows
            continue
        elif word == "--resume":
            program += [word, *rest[:1]]
            rest = rest[1:]
        elif is_setting or word == "--print-config" or word.startswith("--resume="):
            program.append(word)
        elif is_option or has_open_option:
            launcher.append(word)
        else:
            raise ValueError(f"{word!r} is no section.key=value and no option")
    start = [sys.executable, str(ROOT / "launch" / "pretrain_rl.py")]
    if "--print-config" in program:
        return [*start, *program]
    meets_others = any(w.startswith(("--nnodes", "--rdzv", "--master", "--node")) for w in launcher)
    standalone = [] if meets_others or "--standalone" in launcher else ["--standalone"]
    start.insert(1, str(ROOT / "launch" / "torchrun.py"))
    return [*start[:2], *standalone, *launcher, *start[2:], *program]


def _train(arguments: Sequence[str], *, is_help: bool) -> int:
    """Become the launcher, which then receives the signals itself. Return a code otherwise."""
    if is_help:
        print(_TRAIN_HELP)
        return 0
    try:
        command = train_command(arguments)
        if "--config" not in command:
            raise ValueError("CONFIG is missing: name a .yaml file (tlt init writes one)")
    except ValueError as error:
        print(f"tlt train: {error}", file=sys.stderr)
        return 2
    return os.execv(command[0], command)


def _help() -> str:
    lines = ["usage: tlt COMMAND ...", ""]
    for name, command in COMMANDS.items():
        lines += [f"  {name:<16}{command.summary}", f"{'':18}{command.example}"]
    return "\n".join([*lines, "", "tlt COMMAND --help says more; tlt --version"])


if __name__ == "__main__":
    sys.exit(main())
