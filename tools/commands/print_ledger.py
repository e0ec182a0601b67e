"""Prints the memory of one rank by phase, for a configuration and a number of GPUs.

    tlt plan examples/qwen2_5_7b_8gpu.yaml --ranks 8 model.path=Qwen/Qwen2.5-7B-Instruct

It needs no GPU, and of the model a folder with config.json alone; of an id of the Hub it fetches
that file. `run.device=cpu` gives the memory of a CPU rank.

    tlt plan my.yaml --ranks 8 --memory 80

says whether it fits a rank with 80 GiB (exit code 0), or which settings would make it fit (1).

    tlt plan my.yaml --ranks 8 --simulate runs/mine

With recorded runs of the same policy and machine it also predicts the seconds of a step by phase,
without speculation, with a frozen drafter and with TLT: see docs/planner.md.
"""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from tlt_megatron.config.hub import CONFIG, load_fetched_config
from tlt_megatron.config.layout import check_layout
from tlt_megatron.config.load import load_config
from tlt_megatron.config.model_folder import check_model
from tlt_megatron.config.own_layer import OWN
from tlt_megatron.config.preflight import check_own, check_trusted
from tlt_megatron.runtime.device import Device
from tlt_megatron.trainer.before.memory_ledger import describe_checkpoint, make_ledger
from tools.planner.computed_machine import ComputedMachine, read_slowness
from tools.planner.fit import Candidate, verdict
from tools.planner.plan import print_plan
from tools.planner.roofline import GPUS
from tools.planner.simulation import Machine

_RANKS = range(1, 1_000_001)


def main(arguments: list[str] | None = None) -> int:
    """Print the table. Return 1 if the memory of a rank is known and no configuration fits, else 0.

    ValueError for settings or a layout that a run would refuse.
    """
    given = _parse(arguments)
    files = [word for word in given.words if "=" not in word]
    overrides = [word for word in given.words if "=" in word]
    candidates = [
        _candidate(files, [*overrides, *shlex.split(text)], given.ranks, text or "as given")
        for text in ("", *given.compare)
    ]
    print("\n".join(candidates[0].ledger.lines()))
    print(describe_checkpoint(candidates[0].config, given.ranks))
    memory_bytes = GPUS[given.machine.upper()].num_bytes if given.machine else 0.0
    if given.memory is not None:
        memory_bytes = given.memory * 2**30
    if memory_bytes:
        make = partial(_candidate, files, ranks=given.ranks)
        print(verdict(candidates[0], int(memory_bytes), lambda more: make([*overrides, *more])))
    else:
        ledger = candidates[0].ledger
        print(
            f"a rank takes {ledger.peak_bytes / 2**20:,.0f} MiB, most in the {ledger.peak_phase} phase:"
            " --memory GIB says whether it fits"
        )
    for run in () if given.trust_run else given.against:
        if (file := Path(run) / "config.yaml").is_file():
            check_trusted(load_config(file), run, (), key="speculation.selector")
    if given.simulate or given.machine:
        print_plan(
            candidates,
            given.simulate,
            lengths=given.lengths,
            computed=_computed(given) if given.machine else None,
            against=given.against,
            memory_bytes=memory_bytes,
            figure=given.figure,
        )
    fits = [not each.problem(memory_bytes) for each in candidates]
    return 0 if any(fits) else 1


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options. ValueError for some that mean nothing, or not together."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    add = parser.add_argument
    add("--ranks", type=int, required=True, help="GPUs (or CPU ranks) of the run")
    add("--simulate", action="append", default=[], metavar="RUN", help="folder; may be repeated")
    add("--lengths", default="", metavar="MEDIAN,P99", help="assumed, in tokens")
    add("--machine", choices=["h100", "h200"], help="computed, where no run is recorded")
    add("--accept-rate", type=float, metavar="SHARE", help="of drafted tokens, with --machine")
    add("--prompt-tokens", type=float, metavar="MEAN", help="of prompts, with --machine")
    add("--gpu-check", default="", metavar="results.jsonl", help="measured, with --machine")
    add("--against", action="append", default=[], metavar="RUN", help="finished; may be repeated")
    add("--trust-run", action="store_true", help="run the selector that a run of --against names")
    add(
        "--compare",
        action="append",
        default=[],
        metavar='"KEY=VALUE ..."',
        help="with these settings too, of which ranks=N is one; may be repeated",
    )
    add("--memory", type=float, metavar="GIB", help="that a rank has: does it fit?")
    add("--figure", default="", metavar="FILE.svg", help="a step over time, seconds by phase")
    add(
        "words",
        nargs="+",
        metavar="CONFIG.yaml | key=value",
        help="model.path: config.json will do",
    )
    given = parser.parse_intermixed_args(arguments)
    if given.ranks not in _RANKS:
        parser.error(f"--ranks {given.ranks}: must be >= 1 and <= {_RANKS[-1]}")
    if given.memory is not None and not 0.0 < given.memory < math.inf:
        raise ValueError(f"--memory {given.memory:g}: must be a number of GiB above 0")
    if given.machine and (given.simulate or given.accept_rate is None or not given.lengths):
        raise ValueError("--machine needs --lengths and --accept-rate, and no --simulate")
    if given.prompt_tokens is not None and not 1.0 <= given.prompt_tokens < math.inf:
        raise ValueError(f"--prompt-tokens {given.prompt_tokens:g}: must be a number >= 1")
    if (given.gpu_check or given.prompt_tokens) and not given.machine:
        raise ValueError("--gpu-check and --prompt-tokens need --machine, which names the GPU")
    needy = given.lengths or given.against or given.compare or given.figure
    if needy and not (given.simulate or given.machine):
        raise ValueError(
            "--lengths, --against, --compare and --figure need --simulate or --machine"
        )
    if all("=" in word for word in given.words):
        parser.error("CONFIG.yaml is missing")
    figure = Path(given.figure)
    if given.figure and (figure.suffix != ".svg" or not figure.parent.is_dir()):
        parser.error(f"--figure {figure}: must end in .svg, in a folder that is there")
    return given


def _computed(given: argparse.Namespace) -> Callable[[Candidate], Machine]:
    """Return what makes the machine of a candidate from the options."""
    gpu = GPUS[given.machine.upper()]
    slowness = read_slowness(Path(given.gpu_check), gpu) if given.gpu_check else {}

    def make(candidate: Candidate) -> Machine:
        return ComputedMachine(
            gpu,
            candidate.config,
            candidate.ranks,
            accept_rate=given.accept_rate,
            slowness=slowness,
            prompt_tokens=given.prompt_tokens,
        )

    return make


def _candidate(files: list[str], words: list[str], ranks: int, name: str = "") -> Candidate:
    """Return a checked configuration with its ledger. `ranks=N` among the words replaces
    `ranks`.
    """
    overrides = []
    for word in words:
        key, _, value = word.partition("=")
        if key != "ranks":
            overrides.append(word)
        else:
            ranks = int(value) if value.isdecimal() and len(value) < 9 else 0
            if ranks not in _RANKS:
                raise ValueError(f"--compare {word}: must be >= 1 and <= {_RANKS[-1]}")
    config, _ = load_fetched_config(files, overrides, patterns=CONFIG)
    lacks = {"needs_weights": False, "needs_tokenizer": False}
    policy, drafts = check_model("model.path", config.model.path, **lacks), config.speculation
    for key, path, is_used in (
        ("critic.path", config.critic_path, config.has_critic),
        ("reference.path", config.reference.path, bool(config.second_path)),
    ):
        if is_used and path:
            check_model(key, path, **lacks)
    if drafts.enabled and drafts.is_learned and drafts.drafter == OWN:
        check_own(config, policy, needs_weights=False)
    check_layout(config, ranks)
    kind = "cpu" if config.run.device == "cpu" else "cuda"
    device = Device(torch_device=torch.device(kind, 0), backend="gloo")  # nothing communicates
    ledger = make_ledger(config, ranks, device)
    return Candidate(name=name, config=config, ranks=ranks, ledger=ledger)


if __name__ == "__main__":
    raise SystemExit("run it as: tlt plan")
