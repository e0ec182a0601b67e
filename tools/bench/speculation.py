"""Measures what speculation gains on this machine, in four tables.

    python -m tools.bench speculation --dtype both

(a) speed by batch size, for fixed strategies and both selectors; the cost model also with a useless
drafter (b) a long-tailed set of requests end to end (c) accept length by kind of tree and
temperature (d) the selectors against the strategy that is best over all batch sizes; `tools.bench
ablate` judges them without noise

It also measures what `rollout.batch_invariant` costs.

`--deepen N` adds N identity layers (attention and MLP output zero) after the policy's own. Its
tokens do not change, and its cost is that of a model N layers deeper: the drafter's one layer
should be small beside its target. The tables say so. In the JSON of `--dtype both`, bfloat16 is at
the top level and float32 under its name.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from tlt_megatron.config.strategy import SpeculationStrategy
from tools.bench.interleaved import mismatch_per_token
from tools.bench.measure import print_table
from tools.bench.setting import (
    BEG_MAB,
    COST_MODEL,
    add_setting_options,
    load_policy,
    make_drafts,
    make_variants,
)
from tools.bench.speed import (
    bench_batch_invariant,
    bench_batch_sizes,
    bench_long_tail,
    best_fixed,
    compare_selectors,
)
from tools.load_engine import LoadedPolicy, accept_length

_KINDS = {"tree": "6_4_16", "chain": "16_1_16", "n-gram": "ngram_16"}  # of 16 drafted tokens


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this benchmark."""
    add_setting_options(add)
    add("--num-requests", type=int, default=128)
    add("--num-samples", type=int, default=8)
    add("--temperatures", type=float, nargs="+", default=[0.0, 0.6, 1.0])
    add("--accept-prompts", type=int, default=32)
    add("--accept-max-new-tokens", type=int, default=200)
    add("--dtype", default="bfloat16", choices=("float32", "bfloat16", "both"))


def run(options: argparse.Namespace) -> dict[str, object]:
    """Measure and print the tables. Return the values of the JSON."""
    dtypes = ("bfloat16", "float32") if options.dtype == "both" else (options.dtype,)
    result: dict[str, object] = {}
    for dtype in dtypes:
        measured = _bench_one_dtype(options, dtype)
        result |= {dtype: measured} if result else measured
    return result | _bench_accept_lengths(options)


def _bench_one_dtype(options: argparse.Namespace, dtype: str) -> dict[str, object]:
    """Run all tables except (c) in one dtype."""
    policy = load_policy(options, dtype)
    prompts = policy.prompts(options.prompts)
    drafts = make_drafts(policy, options.drafter)
    variants = make_variants(drafts, options)
    by_batch = bench_batch_sizes(policy, prompts, variants, options)
    best = best_fixed(by_batch, options.strategies)
    in_tail = {name: variants[name] for name in (best, BEG_MAB, COST_MODEL)}
    tail = bench_long_tail(policy, prompts, in_tail, options)
    comparisons = [*by_batch.values(), tail]
    return {
        "dtype": dtype,
        "num_layers": policy.num_layers,
        "rounds": options.rounds,
        "speedup_by_batch": {
            str(size): {name: record.ratio for name, record in each.records.items()}
            for size, each in by_batch.items()
        },
        "over_best_single": compare_selectors(by_batch, best),
        "long_tail_speedup": {name: record.ratio for name, record in tail.records.items()},
        "mismatch_per_token": {
            name: mismatch_per_token([c.records[name] for c in comparisons if name in c.records])
            for name in variants
        },
        "batch_invariant": bench_batch_invariant(policy, prompts, options),
    }


def _bench_accept_lengths(options: argparse.Namespace) -> dict[str, object]:
    """Return temperature -> kind -> tokens out per verify pass, and the entropy at temperature 1 in
    nats per token.

    Entropy is minus the mean log-probability of what the policy draws.
    """
    limit = options.accept_max_new_tokens
    policy = LoadedPolicy(options.model, max_new_tokens=limit)
    model = policy.load_drafter(options.drafter)
    prompts = policy.prompts(options.prompts, options.accept_prompts)
    groups = policy.generate(prompts, policy.params(limit, num_samples=2, seed=3))
    logprobs = torch.cat([r.policy_logprobs for group in groups for r in group.rollouts])
    lengths: dict[str, dict[str, float]] = {}
    for temperature in options.temperatures:
        params = policy.params(limit, num_samples=2, seed=3, temperature=temperature)
        row = lengths[str(temperature)] = {}
        for kind, text in _KINDS.items():
            policy.speculate(model, SpeculationStrategy.parse(text))
            row[kind] = accept_length(policy.generate(prompts, params))
    entropy = -float(logprobs.mean())
    title = f"(c) tokens out per verify pass of 16 drafted tokens, {entropy:.2f} nats of entropy"
    rows = ([name, *row.values()] for name, row in lengths.items())
    print_table(title, ("temperature", *_KINDS), rows, num_names=0)
    return {"accept_length": lengths, "entropy": entropy}
