"""Measures accept length by kind of tree, the target's entropy and temperature: same drafter, same token budget.

It measures no time, so a busy machine does not matter.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

import torch
from rich.console import Console

from tlt_megatron.speculation.strategy import SpeculationStrategy
from tlt_megatron.speculation.tree import Ranking
from tools.bench.measure import print_table
from tools.bench.policies import Policy
from tools.load_engine import LoadedPolicy, accept_length

NOISE, PROBABILITY = "tree by noise", "tree by probability"
# All verify 16 drafted tokens.
KINDS: dict[str, tuple[str, Ranking]] = {
    NOISE: ("6_4_16", Ranking.NOISE),
    PROBABILITY: ("6_4_16", Ranking.PROBABILITY),
    "chain by noise": ("16_1_16", Ranking.NOISE),
    "chain by probability": ("16_1_16", Ranking.PROBABILITY),
    "n-gram": ("ngram_16", Ranking.NOISE),
    "tree and n-gram": ("6_4_12+ngram_4", Ranking.NOISE),
}
_NUM_WARM_UP = 16  # prompts for the calibration of draft logits to converge


def bench_accept_lengths(
    policies: Sequence[Policy], options: argparse.Namespace, console: Console
) -> dict[str, object]:
    """Return kind -> temperature -> entropy (nats per token at temperature 1, two digits) -> tokens out per verify pass."""
    lengths: dict[str, dict[str, dict[str, float]]] = {kind: {} for kind in KINDS}
    gains: dict[str, dict[str, float]] = {}
    rows = []
    for policy in policies:
        entropy, by_temperature = _measure(policy, options)
        for temperature, row in by_temperature.items():
            for kind, value in row.items():
                lengths[kind].setdefault(temperature, {})[entropy] = value
            gain = row[NOISE] / row[PROBABILITY]
            gains.setdefault(temperature, {})[entropy] = gain
            rows.append([entropy, temperature, *row.values(), gain])
    title = "(c) tokens out per verify pass of 16 drafted tokens"
    columns = ("entropy", "temperature", *KINDS, "noise/probability")
    print_table(console, title, columns, rows, num_names=0)
    return {"accept_length": lengths, "accept_length_noise_over_probability": gains}


def _measure(
    folders: Policy, options: argparse.Namespace
) -> tuple[str, dict[str, dict[str, float]]]:
    """Return the policy's entropy, and temperature -> kind -> accept length.

    Entropy is minus the mean log-probability of what the policy draws at temperature 1. Calibration converges on warm-up
    prompts. No prompt is used twice by one kind.
    """
    limit = options.accept_max_new_tokens
    policy = LoadedPolicy(folders.model, max_new_tokens=limit)
    model = policy.load_drafter(folders.drafter)
    prompts = policy.prompts(folders.data / "eval.jsonl", options.accept_prompts)
    warm_up = policy.prompts(folders.data / "train.jsonl")[-_NUM_WARM_UP:]
    params = policy.params(limit, num_samples=2, seed=3)
    groups = policy.generate(prompts, params)
    logprobs = torch.cat([r.policy_logprobs for group in groups for r in group.rollouts])
    result: dict[str, dict[str, float]] = {}
    for temperature in options.temperatures:
        params = dataclasses.replace(params, temperature=temperature)
        row = result[str(temperature)] = {}
        for kind, (text, ranking) in KINDS.items():
            policy.speculate(model, SpeculationStrategy.parse(text), ranking)
            policy.generate(warm_up, params)
            row[kind] = accept_length(policy.generate(prompts, params))
    return f"{-float(logprobs.mean()):.2f}", result
