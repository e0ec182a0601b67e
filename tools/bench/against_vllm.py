"""The part of `rollout.py` that compares with vLLM's CPU build, by number of requests at once.

Both engines run in one thread and answer the same prompts with responses of the same lengths, which
the embedded engine draws first. They take turns in every round. Seconds are CPU seconds of each
engine's process. vLLM compiles its model and returns no log-probs, the embedded engine does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tlt_megatron.config.schema import SpeculationSection
from tlt_megatron.engines.embedded.speculate import Speculation
from tlt_megatron.models.draft_inference import DraftInference
from tlt_megatron.speculation.cost_model import CostModelSelector
from tlt_megatron.types import Prompt, RolloutGroup
from tools.bench.measure import cpu_seconds, ratios, spread, told
from tools.bench.speed import parse_strategies
from tools.bench.step import turned
from tools.commands.load_engine import LoadedPolicy
from tools.print_tables import print_table

PLAIN, SPECULATIVE, VLLM = "embedded", "with speculation", "vLLM"
_LEAST_REQUESTS = 4  # in a run of small batches
Batch = list[tuple[tuple[int, ...], int]]  # token ids of the prompt, length of the response
Ask = Callable[[Batch], float]


@contextmanager
def vllm_of(options: argparse.Namespace, num_positions: int) -> Iterator[Ask]:
    """Yield a function that lets vLLM answer a batch and returns its CPU seconds."""
    python = Path(options.peers_python)
    if not python.is_file():
        raise SystemExit(f"--peers-python {python}: no such file; `make setup-peers` makes it")
    packages = python.parent.parent / "lib"
    preloaded = [
        *Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"),
        *packages.glob("libiomp5.so"),
    ]
    environment = {
        **os.environ,
        "LD_PRELOAD": ":".join(map(str, preloaded)),  # as vLLM's documentation asks
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that the process's CPU seconds are all
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    settings = {
        "model": options.model,
        "dtype": options.dtype,
        "max_model_len": num_positions,
        "max_num_seqs": max(options.batch_sizes),
        "skip_tokenizer_init": True,
    }
    command = [str(python), "-P", str(Path(__file__).with_name("vllm_peer.py"))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        questions, answers = process.stdin, process.stdout
        assert questions is not None
        assert answers is not None
        questions.write(json.dumps(settings) + "\n")

        def ask(batch: Batch) -> float:
            questions.write(json.dumps(batch) + "\n")
            answer = answers.readline()
            if not answer:
                raise RuntimeError(f"vLLM has ended with {process.wait()}; its output says why")
            return float(answer)

        yield ask
        questions.close()


def run(options: argparse.Namespace) -> dict[str, object]:
    """Measure and print a table. Return the values of the JSON."""
    policy = LoadedPolicy(
        options.model,
        dtype=options.dtype,
        max_new_tokens=options.max_new_tokens,
        max_batch_size=max(options.batch_sizes),
        num_samples=1,  # no two requests share a prompt, so the KV holds a prompt for each
    )
    prompts = policy.prompts(options.prompts)
    speculation = _speculation(policy, options)
    cells: dict[str, dict[str, object]] = {}
    rows = []
    longest = max(len(prompt.token_ids) for prompt in prompts)
    with vllm_of(options, longest + options.max_new_tokens) as ask:
        for size in options.batch_sizes:
            seconds, num_tokens = _measure(policy, speculation, ask, prompts, size, options)
            found = {name: ratios(seconds[VLLM], seconds[name]) for name in seconds}
            speeds = {name: spread([num_tokens / s for s in of]) for name, of in seconds.items()}
            cells[str(size)] = {"tokens_per_s": speeds, "over_vllm": found}
            names = [name for name in seconds if name != VLLM]
            ours = (text for n in names for text in (speeds[n]["median"], told(found[n])))
            rows.append([str(size), num_tokens, speeds[VLLM]["median"], *ours])
    columns = ["requests", "tokens", "vLLM tokens/s"]
    for name in [PLAIN, SPECULATIVE] if speculation else [PLAIN]:
        columns += [f"{name} tokens/s", "over vLLM"]
    print_table(f"{options.model}, {options.dtype}", columns, rows, num_names=0)
    return {"model": options.model, "dtype": options.dtype, "cells": cells}


def _speculation(policy: LoadedPolicy, options: argparse.Namespace) -> Speculation | None:
    if not options.drafter:
        return None
    model, strategies = policy.load_drafter(options.drafter), parse_strategies(options)
    num_ids = SpeculationSection().num_draft_ids(model.config.vocab_size)
    draft = DraftInference(model, num_ids=num_ids)
    return Speculation(draft, CostModelSelector(strategies), strategies)


def _measure(
    policy: LoadedPolicy,
    speculation: Speculation | None,
    ask: Ask,
    prompts: Sequence[Prompt],
    size: int,
    options: argparse.Namespace,
) -> tuple[dict[str, list[float]], int]:
    """Return the seconds of each engine by round, and the tokens of a round."""
    num_requests = max(size, _LEAST_REQUESTS)
    chosen = [
        replace(prompts[number % len(prompts)], draw_index=number) for number in range(num_requests)
    ]
    parts = [chosen[start : start + size] for start in range(0, num_requests, size)]
    params = policy.params(options.max_new_tokens, seed=options.seed)
    if options.ignore_stops:
        params = replace(params, stop_token_ids=())

    def draw() -> list[list[RolloutGroup]]:
        return [policy.generate(part, params) for part in parts]

    policy.engine.set_speculation(None)
    batches: list[Batch] = [
        [(g.prompt.token_ids, r.token_ids.numel()) for g in groups for r in g.rollouts]
        for groups in draw()
    ]

    def ours(speculation: Speculation | None) -> float:
        policy.engine.set_speculation(speculation)
        policy.generate(parts[0], replace(params, max_new_tokens=1))  # allocates the KV
        return cpu_seconds(draw)

    runs: dict[str, Callable[[], float]] = {PLAIN: lambda: ours(None)}
    if speculation is not None:
        runs[SPECULATIVE] = lambda: ours(speculation)
    runs[VLLM] = lambda: sum(map(ask, batches))
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(options.rounds + 1):
        for name in turned(list(runs), number):
            found = runs[name]()
            if number:  # the first round warms up
                seconds[name].append(found)
    return seconds, sum(length for batch in batches for _, length in batch)
