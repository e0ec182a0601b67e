"""Evaluates a model or a finished run: pass@k, avg@k, maj@k and mean reward by data source.

    tlt evaluate runs/mine --data math.jsonl gsm8k.jsonl --samples 16
    tlt evaluate /models/mine --data test.jsonl --nproc-per-node 8 reward.function=my.py:score
    tlt evaluate runs/mine --data math.jsonl --drafter runs/mine/hf_drafter

An evaluation is a run of 0 RL steps, with the settings of the finished run or of `--config`.
Speculation is off unless --drafter or a setting turns it on. The result is printed, a row per file,
and is in evaluation.json of the new run folder. Functions that the finished run names run only with
--trust-run, or if the command line names them again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path

from tlt_megatron.cli import train_command
from tlt_megatron.config.load import load_config
from tlt_megatron.config.preflight import check_trusted
from tlt_megatron.runtime.environment_variables import name_program
from tools.commands.saved_run import model_and_drafter

_SETTING = re.compile(r"[a-z_]+(\.\w+)+=")


def main() -> None:
    """Become the run that evaluates. ValueError for bad input."""
    command = evaluation_command(sys.argv[1:])
    name_program("tlt evaluate")
    os.execv(command[0], command)


def evaluation_command(arguments: list[str]) -> list[str]:
    """Return the command line of the run."""
    options, rest = _parse(arguments)
    source, _ = model_and_drafter(options.source)
    config = options.config
    is_of_run = config is None and source != options.source
    if is_of_run:
        config = Path(options.source) / "config.yaml"
    out = options.out or Path(f"runs/evaluation-{time.strftime('%Y%m%d-%H%M%S')}")
    # a setting may follow the files
    own = [word for word in options.data if _SETTING.match(word)]
    files = [word for word in options.data if word not in own]
    given = [*own, *(word for word in rest if not word.startswith("-") and "=" in word)]
    data = json.dumps(files) if len(files) > 1 else "".join(files)
    drafting = ("speculation.enabled=true", f"speculation.drafter={options.drafter}")
    drafting = drafting if options.drafter else ()
    settings = [
        *(f"model.path={source}", f"data.train={''.join(files[:1])}", f"data.eval={data}"),
        *(f"eval.num_samples={options.samples}", f"eval.temperature={options.temperature}"),
        *("eval.num_prompts=0", "eval.interval=0", "run.num_steps=0", f"run.dir={out}"),
        *("speculation.enabled=false", "spot.enabled=false", "checkpoint.resume=never"),
        "checkpoint.export_hf=false",
        *drafting,
        *given,
    ]
    found = load_config(config, settings)
    if is_of_run and not options.trust_run:
        check_trusted(found, options.source, [word.partition("=")[0] for word in given])
    parallel = found.parallel
    ranks = options.nproc_per_node or str(parallel.tensor * parallel.context * parallel.pipeline)
    launcher = [word for word in rest if word not in settings]
    command = ["--nproc-per-node", ranks, *launcher, *settings]
    return train_command([str(config), *command] if config else command)


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0],
        epilog="Further words are settings (section.key=value) and options of torchrun (as --name=value).",
    )
    add = parser.add_argument
    add("source", metavar="MODEL_OR_RUN")
    add(
        "--data",
        required=True,
        nargs="+",
        action="extend",
        metavar="FILE",
        help=".jsonl or .parquet, as data.eval",
    )
    add("--samples", type=int, default=8, help="responses per prompt; default 8")
    add("--temperature", type=float, default=1.0, help="0: greedy; default 1")
    add("--config", type=Path, help="default: the run's, or the default settings")
    add("--out", type=Path, help="new run folder; default runs/evaluation-<time>")
    add("--drafter", metavar="FOLDER", help="default: none; own is the model's MTP layer")
    add("--trust-run", action="store_true", help="run the functions that the run's settings name")
    add("--nproc-per-node", metavar="N", help="ranks; default tensor x pipeline")
    return parser.parse_known_args(arguments)


if __name__ == "__main__":
    raise SystemExit("run it as: tlt evaluate")
