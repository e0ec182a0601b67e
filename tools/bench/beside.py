"""Times a rank that decodes while the next core rests, trains the drafter, or only adds.

    python -m tools.bench beside

One process decodes the same requests in every round, with a chain and plain. A second process does
the work of a neighbour, and is frozen while another neighbour has its turn: `training` trains the
drafter on packed responses, as an idle rank does. `adding` adds numbers, which takes no memory. The
ratios are CPU seconds over those beside a resting core, taken within a round.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.synchronize import Event

import torch

from tlt_megatron.config.schema import DrafterSection
from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.drafter.drafter_trainer import DrafterTrainer
from tlt_megatron.drafter.packing import pack_sequences
from tools.bench.measure import add_policy_options, cpu_seconds, interleave, ratios, told
from tools.commands.load_engine import LoadedPolicy
from tools.print_tables import print_table

RESTING, TRAINING, ADDING = "resting", "training", "adding"
_PR_SET_PDEATHSIG = 1


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this benchmark."""
    add_policy_options(add, "eval")
    add("--strategy", type=SpeculationStrategy.parse, default="14_1_14")
    add("--batch-sizes", type=int, nargs="+", default=[1, 4, 16])
    add("--num-tokens", type=int, default=200, help="at most, of each response")
    add("--rounds", type=int, default=7)


def run(options: argparse.Namespace) -> dict[str, object]:
    """Measure and print a table. Return the values of the JSON."""
    policy = LoadedPolicy(options.model, max_new_tokens=options.num_tokens)
    drafter = policy.load_drafter(options.drafter)
    prompts = policy.prompts(options.prompts)
    params = policy.params(options.num_tokens, seed=1)
    slower, rows = {}, []
    with neighbours(options) as pids:
        for size in options.batch_sizes:
            batch = [
                dataclasses.replace(prompts[n % len(prompts)], draw_index=n) for n in range(size)
            ]
            for name in ("plain", str(options.strategy)):
                policy.engine.set_speculation(None)
                if name != "plain":
                    policy.speculate(drafter, options.strategy)
                runs = {
                    each: partial(_beside, pid, partial(policy.generate, batch, params))
                    for each, pid in pids.items()
                }
                seconds = interleave(runs, options.rounds, cpu_seconds)
                found = {each: ratios(seconds[each], seconds[RESTING]) for each in pids}
                slower[f"{name}/{size}"] = found
                rows.append([str(size), name, *(told(found[each]) for each in pids)])
    columns = ("batch", "decoding", *pids)
    print_table("CPU seconds over those beside a resting core", columns, rows)
    return {"seconds_over_resting": slower}


def _beside(pid: int, decode: Callable[[], object]) -> None:
    """Decode while a neighbour works. Process 0 is none."""
    if pid:
        os.kill(pid, signal.SIGCONT)
    decode()
    if pid:
        os.kill(pid, signal.SIGSTOP)


@contextmanager
def neighbours(options: argparse.Namespace) -> Iterator[dict[str, int]]:
    """Yield the process of each neighbour, frozen, and 0 for the one that rests."""
    spawn = multiprocessing.get_context("spawn")
    pids, started = {RESTING: 0}, []
    try:
        for name, work in ((TRAINING, train_forever), (ADDING, add_forever)):
            ready = spawn.Event()
            process = spawn.Process(target=work, args=(options, ready), daemon=True)
            process.start()
            started.append(process)
            while not ready.wait(timeout=1.0):
                if not process.is_alive():
                    raise RuntimeError(f"the neighbour '{name}' ended with {process.exitcode}")
            assert process.pid is not None
            pids[name] = process.pid
            os.kill(process.pid, signal.SIGSTOP)
        yield pids
    finally:
        for process in started:
            process.kill()
            process.join()


def train_forever(options: argparse.Namespace, ready: Event) -> None:
    """Train the drafter on the policy's responses, in batches like the quickstart's."""
    _end_with_parent()
    torch.set_num_threads(1)
    policy = LoadedPolicy(options.model, max_new_tokens=options.num_tokens)
    prompts = policy.prompts(options.prompts, 16)
    sequences = policy.draft_sequences(prompts, policy.params(options.num_tokens, num_samples=4))
    section = DrafterSection(algorithm="hass", batch_tokens=512)
    trainer = DrafterTrainer(policy.load_drafter(options.drafter), section)
    while True:
        for batch in pack_sequences(sequences, section.batch_tokens):
            trainer.step(batch)
        ready.set()


def add_forever(_: argparse.Namespace, ready: Event) -> None:
    """Add numbers, which takes no memory."""
    _end_with_parent()
    ready.set()
    number = 0
    while True:
        number += 1


def _end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, also while it is frozen."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
