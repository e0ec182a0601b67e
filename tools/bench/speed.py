"""Measures speed by batch size and on long-tailed requests, and the price of batch invariance.

It also makes what it compares: a policy, drafters from good to useless, and a variant for each
strategy and selector. Selectors live as long as the process, as in a training run, so they carry
what they learned to the next batch size.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tlt_megatron.config.schema import SpeculationSection
from tlt_megatron.config.strategy import OFF, SpeculationStrategy
from tlt_megatron.engines.embedded.speculate import Speculation
from tlt_megatron.models.draft_inference import DraftInference
from tlt_megatron.speculation.beg_mab import BegMabSelector
from tlt_megatron.speculation.cost_model import CostModelSelector
from tlt_megatron.speculation.selector import FixedSelector
from tlt_megatron.types import FinishReason, Prompt, SamplingParams
from tools.bench.interleaved import PLAIN, Comparison, mismatch_per_token
from tools.bench.measure import cpu_seconds, first_differences, interleave, ratios, told
from tools.commands.load_engine import LoadedPolicy
from tools.print_tables import print_table

GOOD, RANDOM = "good", "random"
COST_MODEL, BEG_MAB = "cost_model", "beg_mab"
UNHELPED = f"{COST_MODEL}/{RANDOM}"
_LEAST_REQUESTS = 4  # in a run
_LONG_TAIL_ROUNDS = 3  # at most, after one warm-up round
_INVARIANT_ROUNDS = 6


def load_policy(options: argparse.Namespace, dtype: str, **settings: Any) -> LoadedPolicy:
    """Return the policy of `options.model` with `options.deepen` identity layers. `settings` go to
    RolloutSection.
    """
    return LoadedPolicy(
        options.model,
        dtype=dtype,
        num_identity_layers=options.deepen,
        max_new_tokens=options.max_new_tokens,
        **settings,
    )


def make_drafts(policy: LoadedPolicy, drafter: str) -> dict[str, DraftInference]:
    """Return drafters by name: the policy's own in the folder `drafter`, and an untrained one."""
    models = {GOOD: policy.load_drafter(drafter), RANDOM: policy.new_drafter(seed=1)}
    num_ids = SpeculationSection().num_draft_ids(models[GOOD].config.vocab_size)
    return {name: DraftInference(model, num_ids=num_ids) for name, model in models.items()}


def make_variants(policy: LoadedPolicy, options: argparse.Namespace) -> dict[str, Speculation]:
    """Return every strategy and both selectors with the good drafter, and the cost model with the
    untrained one.
    """
    drafts, strategies = make_drafts(policy, options.drafter), parse_strategies(options)
    good = drafts[GOOD]
    return {
        **{str(s): Speculation(good, FixedSelector(s), [s]) for s in strategies},
        BEG_MAB: Speculation(good, BegMabSelector([*strategies, OFF]), strategies),
        COST_MODEL: Speculation(good, CostModelSelector(strategies), strategies),
        UNHELPED: Speculation(drafts[RANDOM], CostModelSelector(strategies), strategies),
    }


def parse_strategies(options: argparse.Namespace) -> list[SpeculationStrategy]:
    """Return the strategies of the options."""
    return [SpeculationStrategy.parse(text) for text in options.strategies]


def long_prompts(policy: LoadedPolicy, prompts: Sequence[Prompt], num_tokens: int) -> list[Prompt]:
    """Return prompts that the policy itself answers at length.

    Text forced after its end would not be representative.
    """
    groups = policy.generate(prompts, policy.params(num_tokens, seed=1))
    ends = [group.rollouts[0].finish_reason for group in groups]
    return [p for p, end in zip(prompts, ends, strict=True) if end == FinishReason.LENGTH]


def bench_batch_sizes(
    policy: LoadedPolicy,
    prompts: Sequence[Prompt],
    variants: Mapping[str, Speculation],
    options: argparse.Namespace,
) -> dict[int, Comparison]:
    """Run every variant at every batch size, with responses of equal length."""
    prompts = long_prompts(policy, prompts, options.num_tokens)
    if not prompts:
        raise ValueError(f"--num-tokens {options.num_tokens}: no response is that long")
    measured: dict[int, Comparison] = {}
    rows = []
    for size in options.batch_sizes:
        comparison = measured[size] = Comparison(policy, variants)
        # Large batches generate many tokens with few passes.
        num_tokens = options.num_tokens if size <= 16 else max(options.num_tokens // 2, 1)
        for index in range(options.rounds + 1):
            params = SamplingParams(
                max_new_tokens=num_tokens, temperature=options.temperature, seed=100 + index
            )
            comparison.run_round(_batches(prompts, size, index), params)
        cells = [
            f"{record.ratio['median']:.2f} ({statistics.fmean(record.accept_lengths):.1f})"
            for record in comparison.records.values()
        ]
        rows.append([str(size), f"{comparison.plain_tokens_per_s:,.0f}", *cells])
    title = f"(a) speed-up over plain decoding (tokens out per verify pass), {policy}"
    print_table(title, ["batch", f"{PLAIN} tok/s", *variants], rows, num_names=0)
    return measured


def _batches(prompts: Sequence[Prompt], batch_size: int, round_index: int) -> list[list[Prompt]]:
    """Return other prompts in every round.

    A small size gets several batches in sequence, as one prompt says little.
    """
    num_requests = max(_LEAST_REQUESTS // batch_size, 1) * batch_size
    numbers = range(round_index * num_requests, (round_index + 1) * num_requests)
    chosen = [dataclasses.replace(prompts[n % len(prompts)], draw_index=n) for n in numbers]
    return [chosen[i : i + batch_size] for i in range(0, len(chosen), batch_size)]


def bench_long_tail(
    policy: LoadedPolicy,
    prompts: Sequence[Prompt],
    variants: Mapping[str, Speculation],
    options: argparse.Namespace,
) -> Comparison:
    """Run a rollout as in training: each response is as long as the policy makes it."""
    prompts = prompts[: max(options.num_requests // options.num_samples, 1)]
    comparison = Comparison(policy, variants)
    for index in range(min(options.rounds, _LONG_TAIL_ROUNDS) + 1):
        params = policy.params(
            options.max_new_tokens,
            num_samples=options.num_samples,
            temperature=options.temperature,
            seed=200 + index,
        )
        comparison.run_round([prompts], params)
    print_table(
        f"(b) {options.num_requests} long-tailed requests, plain"
        f" {comparison.plain_tokens_per_s:,.0f} tok/s, {policy}",
        ("variant", "speed-up", "accept length", "mismatch"),
        (
            [name, told(record.ratio), statistics.fmean(record.accept_lengths),
             f"{mismatch_per_token([record]):.1e}"]
            for name, record in comparison.records.items()
        ),
    )  # fmt: skip
    return comparison


def best_fixed(measured: Mapping[int, Comparison], fixed: Sequence[str]) -> str:
    """Return the strategy that is fastest over all batch sizes, with equal weight for each."""
    rates = {
        name: [each.records[name].ratio["median"] for each in measured.values()] for name in fixed
    }
    return max(fixed, key=lambda name: statistics.harmonic_mean(rates[name]))


def compare_selectors(measured: Mapping[int, Comparison], best: str) -> dict[str, float]:
    """Return the speed of each selector over that of the strategy `best`, with equal weight for
    each batch size.

    Ratios are of the same round, because rounds have other prompts. Noise counts against the
    selectors: the best of several strategies is partly the luckiest.
    """
    found = {}
    for name in (COST_MODEL, BEG_MAB):
        shares = [
            statistics.median(
                a / b for a, b in zip(r[name].ratios[1:], r[best].ratios[1:], strict=True)
            )
            for r in (each.records for each in measured.values())
        ]
        found[name] = statistics.harmonic_mean(shares)
        print(f"(d) {name}: {found[name]:.3f} of {best}, the best over all batch sizes")
    return found


def bench_batch_invariant(
    plain: LoadedPolicy, prompts: Sequence[Prompt], options: argparse.Namespace
) -> dict[str, object]:
    """Return, by batch size, plain seconds with rollout.batch_invariant over those without, and
    differing tokens with it.

    If the machine's kernels do not allow the mode, return the reason.
    """
    try:
        policy = load_policy(options, plain.dtype, batch_invariant=True)
    except RuntimeError as error:
        print(str(error))
        return {"refused": str(error)}
    drafter = policy.load_drafter(options.drafter)
    plain.engine.set_speculation(None)
    params = SamplingParams(max_new_tokens=max(options.num_tokens // 2, 1), seed=7)
    cost, mismatch, rows = {}, {}, []

    def tokens(prompts: Sequence[Prompt]) -> list[list[int]]:
        groups = policy.generate(prompts, params)
        return [rollout.token_ids.tolist() for group in groups for rollout in group.rollouts]

    for size in (1, 8, 64):
        batch = _batches(prompts, max(size, _LEAST_REQUESTS), 0)[0][:size]
        policy.engine.set_speculation(None)
        runs = {
            "off": lambda p=batch: plain.generate(p, params),
            "on": lambda p=batch: policy.generate(p, params),
        }
        seconds = interleave(runs, _INVARIANT_ROUNDS, cpu_seconds)
        expected, pairs = tokens(batch), []
        for strategy in parse_strategies(options):
            policy.speculate(drafter, strategy)
            pairs += zip(expected, tokens(batch), strict=True)
        num_differing, num_compared = first_differences(pairs)
        cost[str(size)] = ratios(seconds["on"], seconds["off"])
        mismatch[str(size)] = num_differing / num_compared
        rows.append([str(size), told(cost[str(size)]), f"{mismatch[str(size)]:.1e}"])
    title = f"rollout.batch_invariant, {plain.dtype}"
    columns = ("batch", "plain seconds on / off", "mismatch per token")
    print_table(title, columns, rows, num_names=0)
    return {"plain_seconds_on_over_off": cost, "mismatch_per_token": mismatch}
