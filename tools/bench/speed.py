"""Measures speed by batch size and on long-tailed requests, and the price of batch invariance.

Selectors live as long as the process, as in a training run, so they carry what they learned to the
next batch size.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from tlt_megatron.engines.embedded.speculate import Speculation
from tlt_megatron.types import Prompt, SamplingParams
from tools.bench.interleaved import PLAIN, Comparison, mismatch_per_token
from tools.bench.measure import (
    cpu_seconds,
    first_differences,
    interleave,
    print_table,
    ratios,
    told,
)
from tools.bench.setting import BEG_MAB, COST_MODEL, load_policy, long_prompts, parse_strategies
from tools.load_engine import LoadedPolicy

_LEAST_REQUESTS = 4  # of a run
_LONG_TAIL_ROUNDS = 3  # at most, after one warm-up round
_INVARIANT_ROUNDS = 6


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
