"""Measures accept length by kind of draft and temperature: same drafter, same token budget.

It measures no time, so a busy machine does not matter.
"""

from __future__ import annotations

import argparse

import torch
from rich.console import Console

from tlt_megatron.config.strategy import SpeculationStrategy
from tools.bench.measure import print_table
from tools.load_engine import LoadedPolicy, accept_length

KINDS = {"tree": "6_4_16", "chain": "16_1_16", "n-gram": "ngram_16"}  # all verify 16 drafted tokens


def bench_accept_lengths(options: argparse.Namespace, console: Console) -> dict[str, object]:
    """Return temperature -> kind -> tokens out per verify pass, and the entropy at temperature 1 in nats per token.

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
        for kind, text in KINDS.items():
            policy.speculate(model, SpeculationStrategy.parse(text))
            row[kind] = accept_length(policy.generate(prompts, params))
    entropy = -float(logprobs.mean())
    title = f"(c) tokens out per verify pass of 16 drafted tokens, {entropy:.2f} nats of entropy"
    rows = ([name, *row.values()] for name, row in lengths.items())
    print_table(console, title, ("temperature", *KINDS), rows, num_names=0)
    return {"accept_length": lengths, "entropy": entropy}
