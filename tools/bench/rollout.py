"""Measures tokens per second of the embedded engine against `transformers` generate, or vLLM.

    python -m tools.bench rollout
    python -m tools.bench rollout --against vllm

Both sides sample, and must do the same work on long-tailed requests. The engine first draws all
responses with the policy's own stop tokens, and the measured runs draw the same ones again.
transformers draws other tokens, so it ignores stop tokens: each of its batches runs up to the
longest drawn response in it. In any batched generate, a row that has ended costs as much as one
that runs.

transformers runs with left-padded batches, KV cache, SDPA and the same dtype and threads, at each
of `--hf-batch-sizes`; its fastest one counts. The ratio is taken per round, in one process.
`against_vllm.py` has the comparison with vLLM.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tlt_megatron.types import RolloutGroup
from tools.bench import against_vllm
from tools.bench.measure import interleave, made, ratios, spread, wall_seconds
from tools.commands.load_engine import LoadedPolicy
from tools.print_tables import print_table


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this benchmark."""
    add("--model", default="build/tiny_policy", type=made, help="folder of a Hugging Face model")
    add("--prompts", default="build/tiny_policy/train.jsonl")
    add("--num-requests", type=int, default=128)
    add("--num-samples", type=int, default=8, help="responses per prompt")
    add("--max-new-tokens", type=int, default=512)
    add("--ignore-stops", action="store_true", help="every response has --max-new-tokens")
    add("--max-batch-size", type=int, default=128, help="of the embedded engine")
    add("--hf-batch-sizes", type=int, nargs="+", default=[16, 32])
    add("--rounds", type=int, default=3)
    add("--dtype", default="float32", choices=["float32", "bfloat16"])
    add("--seed", type=int, default=0)
    add("--against", default="transformers", choices=["transformers", "vllm"])
    add("--peers-python", default=".venv-peers/bin/python", help="`make setup-peers` makes it")
    add(
        "--batch-sizes", type=int, nargs="+", default=[1, 8, 32, 128], help="requests at once, vllm"
    )
    add("--drafter", default="", help="of a comparison with vllm that speculates too")
    add("--strategies", nargs="+", default=["2_1_2", "4_1_4", "8_1_8"])


def run(options: argparse.Namespace) -> dict[str, object]:
    """Measure and print a table. Return the values of the JSON."""
    if options.against == "vllm":
        return against_vllm.run(options)
    policy = LoadedPolicy(
        options.model,
        dtype=options.dtype,
        num_samples=options.num_samples,
        max_new_tokens=options.max_new_tokens,
        max_batch_size=options.max_batch_size,
    )
    num_prompts = max(options.num_requests // options.num_samples, 1)
    prompts = random.Random(options.seed).sample(policy.prompts(options.prompts), num_prompts)
    params = policy.params(
        options.max_new_tokens, num_samples=options.num_samples, seed=options.seed
    )
    if options.ignore_stops:
        params = replace(params, stop_token_ids=())
    groups = policy.generate(prompts, params)
    drawn = _lengths(groups)
    num_tokens, longest = sum(drawn), max(drawn)

    def draw_again() -> None:
        assert _lengths(policy.generate(prompts, params)) == drawn

    hf = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=getattr(torch, options.dtype), attn_implementation="sdpa"
    ).eval()
    runs = {"ours": draw_again}
    runs |= {f"{size}": partial(_run_hf, hf, groups, size) for size in options.hf_batch_sizes}
    seconds = interleave(runs, options.rounds, wall_seconds)
    ours = seconds.pop("ours")
    best = min(seconds, key=lambda size: statistics.median(seconds[size]))
    embedded, other = (spread([num_tokens / each for each in of]) for of in (ours, seconds[best]))
    ratio = ratios(seconds[best], ours)
    median = statistics.median(drawn)
    shape = f"{num_tokens} tokens, median length {median:g}, longest {longest}"
    print_table(
        f"{len(drawn)} requests, {shape}, {options.dtype}",
        ("tokens/s", "median", "min", "max"),
        [
            ["embedded", *map(round, embedded.values())],
            [f"transformers generate, batch {best}", *map(round, other.values())],
            ["ratio", *ratio.values()],
        ],
    )
    return {
        "embedded_tokens_per_s": embedded,
        "transformers_tokens_per_s": other,
        "transformers_batch_size": int(best),
        "ratio": ratio,
        "requests": shape,
        "dtype": options.dtype,
    }


def _lengths(groups: Sequence[RolloutGroup]) -> list[int]:
    """Return the lengths of all responses."""
    return [rollout.token_ids.numel() for group in groups for rollout in group.rollouts]


@torch.inference_mode()
def _run_hf(model: PreTrainedModel, drawn: Sequence[RolloutGroup], batch_size: int) -> None:
    requests = [
        (group.prompt.token_ids, rollout.token_ids.numel())
        for group in drawn
        for rollout in group.rollouts
    ]
    for start in range(0, len(requests), batch_size):
        prompts, lengths = zip(*requests[start : start + batch_size], strict=True)
        longest = max(map(len, prompts))
        pads = [longest - len(ids) for ids in prompts]
        out = model.generate(  # pyright: ignore[reportCallIssue]
            torch.tensor([(0,) * pad + tuple(ids) for pad, ids in zip(pads, prompts, strict=True)]),
            attention_mask=torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads]),
            do_sample=True,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            max_new_tokens=max(lengths),
            use_cache=True,
            pad_token_id=0,
            eos_token_id=None,
        )
        assert out.shape[1] == longest + max(lengths)
