"""Measures accept length by kind of tree, the target's entropy and temperature: same drafter, same token budget.

Called by tools/bench/speculation.py. It measures no time, so a busy machine does not matter.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from tlt_megatron.config.schema import DataSection
from tlt_megatron.data.prompts import load_prompts
from tlt_megatron.data.tokenizer import load_tokenizer
from tlt_megatron.drafter.checkpoint import load_drafter
from tlt_megatron.engines.embedded.engine import EmbeddedEngine
from tlt_megatron.engines.embedded.speculate import Speculation
from tlt_megatron.models.draft_inference import DraftInference
from tlt_megatron.speculation.selector import FixedSelector
from tlt_megatron.speculation.strategy import SpeculationStrategy
from tlt_megatron.speculation.tree import Ranking
from tlt_megatron.types import Prompt, SamplingParams
from tools.bench.policies import Policy
from tools.load_engine import MAX_PROMPT_TOKENS, VERSION, load_engine
from tools.warmup_drafter import accept_length

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bench:
    engine: EmbeddedEngine
    draft: DraftInference
    eval: Sequence[Prompt]
    warm_up: Sequence[Prompt]
    params: SamplingParams


def bench_accept_lengths(
    policies: Sequence[Policy], options: argparse.Namespace, console: Console
) -> dict[str, object]:
    """Return kind -> temperature -> entropy (nats per token at temperature 1, two digits) -> tokens out per verify pass."""
    lengths: dict[str, dict[str, dict[str, float]]] = {kind: {} for kind in KINDS}
    gains: dict[str, dict[str, float]] = {}
    table = Table(title="(c) tokens out per verify pass of 16 drafted tokens")
    for column in ("entropy", "temperature", *KINDS, "noise/probability"):
        table.add_column(column, justify="right")
    for policy in policies:
        bench = _load(policy, options)
        entropy = f"{_entropy(bench):.2f}"
        for temperature in options.temperatures:
            row = {kind: _measure(bench, kind, temperature) for kind in KINDS}
            gain = row[NOISE] / row[PROBABILITY]
            for kind, value in row.items():
                lengths[kind].setdefault(str(temperature), {})[entropy] = value
            gains.setdefault(str(temperature), {})[entropy] = gain
            cells = [f"{value:.2f}" for value in row.values()]
            table.add_row(entropy, str(temperature), *cells, f"{gain:.2f}")
    console.print(table)
    return {"accept_length": lengths, "accept_length_noise_over_probability": gains}


def _load(policy: Policy, options: argparse.Namespace) -> _Bench:
    limit = options.accept_max_new_tokens
    engine = load_engine(policy.model, dtype="float32", max_new_tokens=limit)
    tokenizer = load_tokenizer(policy.model)
    embedding, head = engine.target_tensors()
    model = load_drafter(policy.drafter, embedding_VD=embedding, lm_head_VD=head)
    section = DataSection(max_prompt_tokens=MAX_PROMPT_TOKENS)
    return _Bench(
        engine=engine,
        draft=DraftInference(model, embedding.dtype),
        eval=load_prompts(str(policy.eval), tokenizer, section).prompts(options.accept_prompts),
        warm_up=load_prompts(str(policy.train), tokenizer, section).prompts()[-_NUM_WARM_UP:],
        params=SamplingParams(
            num_samples=2,
            max_new_tokens=limit,
            stop_token_ids=tokenizer.stop_token_ids,
            seed=3,
        ),
    )


def _entropy(bench: _Bench) -> float:
    """Return nats per token: minus the mean log-probability of what the policy draws at temperature 1."""
    bench.engine.set_speculation(None)
    groups = bench.engine.generate(bench.eval, bench.params, policy_version=VERSION)
    logprobs = torch.cat([r.policy_logprobs for g in groups for r in g.rollouts])
    return -float(logprobs.mean())


def _measure(bench: _Bench, kind: str, temperature: float) -> float:
    """Return the accept length after a few warm-up prompts, so that calibration has converged. No prompt is used twice."""
    text, ranking = KINDS[kind]
    strategy = SpeculationStrategy.parse(text)
    params = dataclasses.replace(bench.params, temperature=temperature)
    speculation = Speculation(bench.draft, FixedSelector(strategy), [strategy], ranking=ranking)
    bench.engine.set_speculation(speculation)
    bench.engine.generate(bench.warm_up, params, policy_version=VERSION)
    return accept_length(bench.engine.generate(bench.eval, params, policy_version=VERSION))
