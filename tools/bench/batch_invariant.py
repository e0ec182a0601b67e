"""Measures what `rollout.batch_invariant` costs, and that speculation then changes no token in any dtype.

Called by tools/bench/speculation.py for each dtype.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from tlt_megatron.engines.embedded.engine import EmbeddedEngine
from tlt_megatron.engines.embedded.speculate import Speculation
from tlt_megatron.speculation.selector import FixedSelector
from tlt_megatron.speculation.strategy import SpeculationStrategy
from tlt_megatron.types import Prompt, SamplingParams
from tools.bench.interleaved import differences
from tools.bench.measure import cpu_seconds, ratios
from tools.bench.setting import GOOD, Setting, make_drafts, make_setting
from tools.load_engine import VERSION

_BATCH_SIZES = (1, 8, 64)
_NUM_ROUNDS = 2


def bench_batch_invariant(
    setting: Setting,
    options: argparse.Namespace,
    strategies: Sequence[SpeculationStrategy],
    console: Console,
) -> dict[str, object]:
    """Return, by batch size, plain seconds with the mode on over off, and differing tokens per token with it on.

    If the machine's kernels do not allow the mode, return the reason.
    """
    try:
        invariant = make_setting(options, setting.dtype, batch_invariant=True)
    except RuntimeError as error:
        console.print(str(error))
        return {"refused": str(error)}
    draft = make_drafts(invariant, options.drafter, None)[GOOD]
    setting.engine.set_speculation(None)
    table = Table(title=f"rollout.batch_invariant, {setting.dtype}")
    for column in ("batch", "plain seconds on / off", "min", "max", "mismatch per token"):
        table.add_column(column, justify="right")
    cost, mismatch = {}, {}
    for size in _BATCH_SIZES:
        prompts = [
            dataclasses.replace(setting.prompts[i % len(setting.prompts)], draw_index=i)
            for i in range(size)
        ]
        params = SamplingParams(max_new_tokens=max(options.num_tokens // 2, 1), seed=7)
        on: list[float] = []
        off: list[float] = []
        invariant.engine.set_speculation(None)
        for round_index in range(_NUM_ROUNDS + 1):
            spent, _ = _run(setting.engine, prompts, params)
            spent_on, plain = _run(invariant.engine, prompts, params)
            if round_index > 0:  # the first round allocates
                off.append(spent)
                on.append(spent_on)
        num_differing = num_compared = 0
        for strategy in strategies:
            speculation = Speculation(draft, FixedSelector(strategy), [strategy])
            invariant.engine.set_speculation(speculation)
            counts = differences(plain, _run(invariant.engine, prompts, params)[1])
            num_differing, num_compared = num_differing + counts[0], num_compared + counts[1]
        cost[str(size)] = ratios(on, off)
        mismatch[str(size)] = num_differing / num_compared
        cells = [f"{value:.2f}" for value in cost[str(size)].values()]
        table.add_row(str(size), *cells, f"{mismatch[str(size)]:.1e}")
    console.print(table)
    return {"plain_seconds_on_over_off": cost, "mismatch_per_token": mismatch}


def _run(
    engine: EmbeddedEngine, prompts: Sequence[Prompt], params: SamplingParams
) -> tuple[float, list[list[int]]]:
    groups = []
    spent = cpu_seconds(
        lambda: groups.extend(engine.generate(prompts, params, policy_version=VERSION))
    )
    return spent, [r.token_ids.tolist() for g in groups for r in g.rollouts]
