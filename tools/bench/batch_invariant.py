"""Measures what `rollout.batch_invariant` costs, and that speculation then changes no token in any dtype."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

from rich.console import Console

from tlt_megatron.types import Prompt, SamplingParams
from tools.bench.measure import cpu_seconds, first_differences, interleave, print_table, ratios
from tools.bench.setting import Setting, make_setting, parse_strategies

_BATCH_SIZES = (1, 8, 64)
_NUM_ROUNDS = 6


def bench_batch_invariant(
    setting: Setting, options: argparse.Namespace, console: Console
) -> dict[str, object]:
    """Return, by batch size, plain seconds with the mode on over off, and differing tokens per token with it on.

    If the machine's kernels do not allow the mode, return the reason.
    """
    try:
        invariant = make_setting(options, setting.dtype, batch_invariant=True)
    except RuntimeError as error:
        console.print(str(error))
        return {"refused": str(error)}
    drafter = invariant.policy.load_drafter(options.drafter)
    setting.engine.set_speculation(None)
    params = SamplingParams(max_new_tokens=max(options.num_tokens // 2, 1), seed=7)
    cost, mismatch, rows = {}, {}, []
    for size in _BATCH_SIZES:
        prompts = [
            dataclasses.replace(setting.prompts[i % len(setting.prompts)], draw_index=i)
            for i in range(size)
        ]
        invariant.engine.set_speculation(None)
        runs = {
            "off": lambda p=prompts: setting.policy.generate(p, params),
            "on": lambda p=prompts: invariant.policy.generate(p, params),
        }
        seconds = interleave(runs, _NUM_ROUNDS, cpu_seconds)
        plain = _tokens(invariant, prompts, params)
        pairs = []
        for strategy in parse_strategies(options):
            invariant.policy.speculate(drafter, strategy)
            pairs += zip(plain, _tokens(invariant, prompts, params), strict=True)
        num_differing, num_compared = first_differences(pairs)
        cost[str(size)] = ratios(seconds["on"], seconds["off"])
        mismatch[str(size)] = num_differing / num_compared
        rows.append([str(size), *cost[str(size)].values(), f"{mismatch[str(size)]:.1e}"])
    title = f"rollout.batch_invariant, {setting.dtype}"
    columns = ("batch", "plain seconds on / off", "min", "max", "mismatch per token")
    print_table(console, title, columns, rows, num_names=0)
    return {"plain_seconds_on_over_off": cost, "mismatch_per_token": mismatch}


def _tokens(setting: Setting, prompts: Sequence[Prompt], params: SamplingParams) -> list[list[int]]:
    groups = setting.policy.generate(prompts, params)
    return [rollout.token_ids.tolist() for group in groups for rollout in group.rollouts]
