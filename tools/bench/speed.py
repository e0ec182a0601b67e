"""Measures speed by batch size, and a long-tailed set of requests end to end.

Selectors live as long as the process, as in a training run, so they carry what they learned to the next batch size. The first
round at each batch size is reported separately.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from rich.console import Console

from tlt_megatron.types import Prompt, SamplingParams
from tools.bench.interleaved import PLAIN, Comparison, Variant, mismatch_per_token
from tools.bench.measure import Spread, print_table, spread
from tools.bench.setting import BEG_MAB, COST_MODEL, Setting, adaptive_name, long_prompts

_LEAST_REQUESTS = 4  # of a run
_LONG_TAIL_ROUNDS = 3  # at most, after one warm-up round


def bench_batch_sizes(
    setting: Setting, variants: Mapping[str, Variant], options: argparse.Namespace, console: Console
) -> dict[int, Comparison]:
    """Run every variant at every batch size, with responses of equal length."""
    prompts = long_prompts(setting, options.num_tokens)
    if not prompts:
        raise ValueError(f"--num-tokens {options.num_tokens}: no response is that long")
    num_rounds = max(variant.num_rounds for variant in variants.values()) + 1
    measured: dict[int, Comparison] = {}
    rows = []
    for size in options.batch_sizes:
        comparison = Comparison(setting.policy, variants)
        # Large batches generate many tokens with few passes.
        num_tokens = options.num_tokens if size <= 16 else max(options.num_tokens // 2, 1)
        for index in range(num_rounds):
            params = SamplingParams(
                max_new_tokens=num_tokens, temperature=options.temperature, seed=100 + index
            )
            comparison.run_round(_batches(prompts, size, index), params, index)
        measured[size] = comparison
        cells = [
            f"{record.ratio['median']:.2f} ({statistics.fmean(record.accept_lengths):.1f})"
            for record in comparison.records.values()
        ]
        rows.append([str(size), f"{comparison.plain_tokens_per_s:,.0f}", *cells])
    title = f"(a) speed-up over plain decoding, {setting}"
    print_table(console, title, ["batch", f"{PLAIN} tok/s", *variants], rows, num_names=0)
    console.print("in brackets: tokens out per verify pass")
    return measured


def _batches(prompts: Sequence[Prompt], batch_size: int, round_index: int) -> list[list[Prompt]]:
    """Return other prompts in every round. A small size gets several batches in sequence, as one prompt says little."""
    num_batches = max(_LEAST_REQUESTS // batch_size, 1)
    first = round_index * num_batches * batch_size
    numbers = range(first, first + num_batches * batch_size)
    chosen = [dataclasses.replace(prompts[n % len(prompts)], draw_index=n) for n in numbers]
    return [chosen[i : i + batch_size] for i in range(0, len(chosen), batch_size)]


def bench_long_tail(
    setting: Setting, variants: Mapping[str, Variant], options: argparse.Namespace, console: Console
) -> Comparison:
    """Run a rollout as in training: each response is as long as the policy makes it."""
    prompts = setting.prompts[: max(options.num_requests // options.num_samples, 1)]
    num_rounds = min(options.rounds, _LONG_TAIL_ROUNDS)
    variants = {n: dataclasses.replace(v, num_rounds=num_rounds) for n, v in variants.items()}
    comparison = Comparison(setting.policy, variants)
    for index in range(num_rounds + 1):
        params = setting.policy.params(
            options.max_new_tokens,
            num_samples=options.num_samples,
            temperature=options.temperature,
            seed=200 + index,
        )
        comparison.run_round([prompts], params, index)
    rate = f"plain {comparison.plain_tokens_per_s:,.0f} tok/s"
    print_table(
        console,
        f"(b) {options.num_requests} long-tailed requests, {rate}, {setting}",
        ("variant", "speed-up", "min", "max", "first round", "accept length", "mismatch"),
        (
            [name, *record.ratio.values(), statistics.fmean(record.accept_lengths),
             f"{mismatch_per_token([record]):.1e}"]
            for name, record in comparison.records.items()
        ),
    )  # fmt: skip
    return comparison


def adaptive_minima(
    measured: Mapping[int, Comparison], drafters: Sequence[str], console: Console
) -> dict[str, dict[str, float]]:
    """Return the cost model's smallest median over batch sizes for each drafter, and the smallest of the first rounds."""
    minima, first, rows = {}, {}, []
    for drafter in drafters:
        name = adaptive_name(drafter)
        ratios = {size: each.records[name].ratio for size, each in measured.items()}
        size = min(ratios, key=lambda s, r=ratios: r[s]["median"])
        minima[drafter] = ratios[size]["median"]
        first[drafter] = min(ratio["first_round"] for ratio in ratios.values())
        rows.append([drafter, f"{minima[drafter]:.3f}", str(size), f"{first[drafter]:.3f}"])
    title = "(a) cost_model over plain decoding, smallest over batch sizes"
    print_table(console, title, ("drafter", "median", "at batch", "first round"), rows)
    return {"adaptive_min_ratio": minima, "adaptive_first_round_min_ratio": first}


def speedup_by_batch(by_batch: Mapping[int, Comparison]) -> dict[str, dict[str, Spread]]:
    """Return batch size -> variant -> spread of its speed over plain decoding, for JSON."""
    return {
        str(size): {name: record.ratio for name, record in each.records.items()}
        for size, each in by_batch.items()
    }


def best_fixed(comparison: Comparison, fixed: Sequence[str]) -> tuple[str, float]:
    """Return the fixed strategy with the highest median speed over plain decoding, which may itself be the best."""
    medians = {name: comparison.records[name].ratio["median"] for name in fixed} | {PLAIN: 1.0}
    return max(medians.items(), key=lambda item: item[1])


def print_oracle(
    measured: Mapping[int, Comparison], fixed: Sequence[str], console: Console
) -> dict[str, object]:
    """Compare selectors with fixed strategies, found best by running all of them: of each batch size, and of all sizes together.

    Ratios are of the same round, because rounds have other prompts. Noise counts against the selectors: the best of several
    strategies is partly the luckiest.
    """
    live: dict[str, dict[str, Spread]] = {COST_MODEL: {}, BEG_MAB: {}}
    single = max(fixed, key=lambda name: _overall(measured, name))
    over_single: dict[str, list[float]] = {name: [] for name in live}
    rows = []
    for size, comparison in measured.items():
        best, ratio = best_fixed(comparison, fixed)
        for name, by_size in live.items():
            by_size[str(size)] = spread(_paired(comparison, name, best))
            over_single[name].append(statistics.median(_paired(comparison, name, single)))
        spreads = [by_size[str(size)] for by_size in live.values()]
        cells = [f"{s['median']:.3f} ({s['min']:.2f}-{s['max']:.2f})" for s in spreads]
        rows.append([str(size), best, ratio, *cells])
    # Equal weight for each batch size: the harmonic mean of rates over equal work.
    overall = {
        name: statistics.harmonic_mean([each["median"] for each in by_size.values()])
        for name, by_size in live.items()
    }
    against_single = {name: statistics.harmonic_mean(each) for name, each in over_single.items()}
    rows.append(["all", "each size's", "", *(f"{value:.3f}" for value in overall.values())])
    rows.append(["all", single, "", *(f"{value:.3f}" for value in against_single.values())])
    title = "(d) selectors over the best fixed strategy, by batch size and over all"
    print_table(console, title, ("batch", "best", "speed-up", *live), rows, num_names=0)
    return {
        "by_batch": live,
        "overall": overall,
        "best_single": single,
        "over_best_single": against_single,
    }


def _paired(comparison: Comparison, name: str, best: str) -> list[float]:
    """Return the speed of a variant over that of another, by round; the first round is left out if there are others."""
    ratios = comparison.records[name].ratios
    others = [1.0] * len(ratios) if best == PLAIN else comparison.records[best].ratios
    paired = [mine / other for mine, other in zip(ratios, others, strict=True)]
    return paired[1:] or paired


def _overall(measured: Mapping[int, Comparison], name: str) -> float:
    """Return the speed of a fixed strategy over plain decoding, with equal weight for each batch size."""
    return statistics.harmonic_mean(
        [comparison.records[name].ratio["median"] for comparison in measured.values()]
    )
