"""Measures speed by batch size, and a long-tailed set of requests end to end.

Called by tools/bench/speculation.py. Selectors live as long as the process, as in a training run, so they carry what they
learned to the next batch size. The first round at each batch size is reported separately.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from tlt_megatron.types import Prompt, SamplingParams
from tools.bench.interleaved import PLAIN, Comparison, Record, Variant
from tools.bench.setting import COST_MODEL, Setting, adaptive_name, long_prompts

_LEAST_REQUESTS = 4  # of a run
_LONG_TAIL_ROUNDS = 3  # at most, after one warm-up round


def bench_batch_sizes(
    setting: Setting,
    variants: Mapping[str, Variant],
    options: argparse.Namespace,
    console: Console,
) -> dict[int, Comparison]:
    """Run every variant at every batch size, with responses of equal length.

    Adaptive variants with bad drafters run more rounds, because their differences are small.
    """
    prompts = long_prompts(setting, options.num_tokens)
    if not prompts:
        raise ValueError(f"--num-tokens {options.num_tokens}: no response is that long")
    fixed = [name for name, variant in variants.items() if not variant.is_close]
    close = [name for name, variant in variants.items() if variant.is_close]
    unhelped = [name for name in close if name.startswith(f"{COST_MODEL}/")]
    num_rounds = max(options.rounds, options.unhelped_rounds) if unhelped else options.rounds
    measured: dict[int, Comparison] = {}
    table = Table(title=f"(a) speed-up over plain decoding, {_describe(setting)}")
    for column in ("batch", f"{PLAIN} tok/s", *variants):
        table.add_column(column, justify="right")
    for batch_size in options.batch_sizes:
        comparison = Comparison(
            setting.engine, variants, setting.clock, num_warm_ups=setting.num_warm_ups
        )
        measured[batch_size] = comparison
        for round_index in range(num_rounds + 1):
            batches = _batches(prompts, batch_size, round_index)
            params = SamplingParams(
                max_new_tokens=num_tokens_at(batch_size, options.num_tokens),
                temperature=options.temperature,
                seed=100 + round_index,
            )
            names = unhelped
            if round_index <= options.rounds:
                names = fixed + close if round_index <= options.fixed_rounds else close
            comparison.run_round(batches, params, names)
        cells = [_cell(record) for record in comparison.records.values()]
        table.add_row(str(batch_size), f"{comparison.plain_tokens_per_s:,.0f}", *cells)
    console.print(table)
    console.print("in brackets: tokens out per verify pass")
    return measured


def _batches(prompts: Sequence[Prompt], batch_size: int, round_index: int) -> list[list[Prompt]]:
    """Return other prompts in every round. A small size gets several batches in sequence, as one prompt says little."""
    num_batches = max(_LEAST_REQUESTS // batch_size, 1)
    first = round_index * num_batches * batch_size
    numbers = [
        range(first + i * batch_size, first + (i + 1) * batch_size) for i in range(num_batches)
    ]
    return [
        [dataclasses.replace(prompts[n % len(prompts)], draw_index=n) for n in batch]
        for batch in numbers
    ]


def num_tokens_at(batch_size: int, num_tokens: int) -> int:
    """Return the tokens per response: large batches generate many tokens with few passes."""
    return num_tokens if batch_size <= 16 else max(num_tokens // 2, 1)


def bench_long_tail(
    setting: Setting,
    variants: Mapping[str, Variant],
    options: argparse.Namespace,
    console: Console,
) -> Comparison:
    """Run a rollout as in training: each response is as long as the policy makes it."""
    prompts = setting.prompts[: max(options.num_requests // options.num_samples, 1)]
    comparison = Comparison(
        setting.engine, variants, setting.clock, num_warm_ups=setting.num_warm_ups
    )
    for round_index in range(min(options.rounds, _LONG_TAIL_ROUNDS) + 1):
        params = SamplingParams(
            num_samples=options.num_samples,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            stop_token_ids=setting.tokenizer.stop_token_ids,
            seed=200 + round_index,
        )
        comparison.run_round([prompts], params, list(variants))
    rate = f"plain {comparison.plain_tokens_per_s:,.0f} tok/s"
    table = Table(
        title=f"(b) {options.num_requests} long-tailed requests, {rate}, {_describe(setting)}"
    )
    columns = ("variant", "speed-up", "min", "max", "first round", "accept length", "mismatch")
    for column in columns:
        table.add_column(column, justify="left" if column == "variant" else "right")
    for name, record in comparison.records.items():
        cells = [f"{value:.2f}" for value in record.ratio.values()]
        length = f"{statistics.fmean(record.accept_lengths):.2f}"
        table.add_row(name, *cells, length, f"{record.mismatch_per_token:.1e}")
    console.print(table)
    return comparison


def adaptive_minima(
    measured: Mapping[int, Comparison], drafters: Sequence[str], console: Console
) -> dict[str, dict[str, float]]:
    """Return the cost model's smallest median over batch sizes for each drafter, and the smallest of the first rounds."""
    table = Table(title="(a) cost_model over plain decoding, smallest over batch sizes")
    for column in ("drafter", "median", "at batch", "first round"):
        table.add_column(column, justify="left" if column == "drafter" else "right")
    minima, first = {}, {}
    for drafter in drafters:
        name = adaptive_name(drafter)
        ratios = {size: each.records[name].ratio for size, each in measured.items()}
        size = min(ratios, key=lambda s, r=ratios: r[s]["median"])
        minima[drafter] = ratios[size]["median"]
        first[drafter] = min(ratio["first_round"] for ratio in ratios.values())
        cells = (f"{minima[drafter]:.3f}", str(size), f"{first[drafter]:.3f}")
        table.add_row(drafter, *cells)
    console.print(table)
    return {"adaptive_min_ratio": minima, "adaptive_first_round_min_ratio": first}


def _cell(record: Record) -> str:
    return f"{record.ratio['median']:.2f} ({statistics.fmean(record.accept_lengths):.1f})"


def _describe(setting: Setting) -> str:
    return f"{setting.num_layers} layers, {setting.dtype}"
