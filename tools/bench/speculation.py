"""Measures what speculation gains on this machine, in four tables.

    python -m tools.bench speculation

- (a) speed by batch size, for fixed strategies and both selectors, and for the cost model with an
  untrained drafter
- (b) speed on a set of long-tailed requests, end to end
- (c) accept length by kind of tree and temperature
- (d) the selectors against the strategy that is best over all batch sizes

It also measures what `rollout.batch_invariant` costs.

`--deepen N` adds N identity layers (attention and MLP output zero) after the policy's own. Its
tokens do not change, and its cost is that of a model N layers deeper: the drafter's one layer
should be small beside its target. The tables say so.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from tlt_megatron.config.strategy import SpeculationStrategy
from tools.bench.interleaved import mismatch_per_token
from tools.bench.measure import add_policy_options
from tools.bench.speed import (
    BEG_MAB,
    COST_MODEL,
    bench_batch_invariant,
    bench_batch_sizes,
    bench_long_tail,
    best_fixed,
    compare_selectors,
    load_policy,
    make_variants,
)
from tools.commands.load_engine import LoadedPolicy, accept_length
from tools.print_tables import print_table

_KINDS = {"tree": "6_4_16", "chain": "16_1_16", "n-gram": "ngram_16"}  # each drafts 16 tokens


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this benchmark."""
    add_policy_options(add, "eval")
    add("--deepen", type=int, default=20, help="identity layers behind the policy's own")
    add("--strategies", nargs="+", default=["3_1_3", "6_1_6", "10_1_10", "14_1_14", "4_2_8"])
    add("--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    add("--num-tokens", type=int, default=120, help="of each response, by batch size")
    add("--max-new-tokens", type=int, default=600)
    add("--temperature", type=float, default=1.0)
    add("--rounds", type=int, default=4, help="after one that warms up")
    add("--num-requests", type=int, default=128)
    add("--num-samples", type=int, default=8)
    add("--temperatures", type=float, nargs="+", default=[0.0, 0.6, 1.0])
    add("--accept-prompts", type=int, default=32)
    add("--accept-max-new-tokens", type=int, default=200)
    add("--dtype", default="bfloat16", choices=("float32", "bfloat16"))


def run(options: argparse.Namespace) -> dict[str, object]:
    """Measure and print the tables. Return the values of the JSON."""
    policy = load_policy(options, options.dtype)
    prompts = policy.prompts(options.prompts)
    variants = make_variants(policy, options)
    by_batch = bench_batch_sizes(policy, prompts, variants, options)
    best = best_fixed(by_batch, options.strategies)
    in_tail = {name: variants[name] for name in (best, BEG_MAB, COST_MODEL)}
    tail = bench_long_tail(policy, prompts, in_tail, options)
    comparisons = [*by_batch.values(), tail]
    return {
        "dtype": options.dtype,
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
        **_bench_accept_lengths(options),
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
