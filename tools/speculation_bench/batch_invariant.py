"""What `rollout.batch_invariant` costs, and that tokens with and without speculation are then the same in any dtype.

Called by tools/bench_speculation.py with `--batch-invariant`.
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
from tools.load_engine import VERSION
from tools.measure import cpu_seconds, ratios
from tools.speculation_bench.interleaved import PLAIN, differences
from tools.speculation_bench.setting import GOOD, Setting, make_drafts, make_setting

_BATCH_SIZES = (1, 8, 64)


def bench_batch_invariant(
    setting: Setting, options: argparse.Namespace, strategy: SpeculationStrategy, console: Console
) -> dict[str, object]:
    """Seconds with the mode on over seconds with it off, and differing tokens per token, by batch size."""
    invariant = make_setting(options, setting.dtype, batch_invariant=True)
    draft = make_drafts(invariant, options.drafter, None)[GOOD]
    speculation = Speculation(draft, FixedSelector(strategy), [strategy])
    setting.engine.set_speculation(None)
    table = Table(title=f"rollout.batch_invariant, {setting.dtype}")
    for column in ("batch", "seconds on / off", "min", "max", f"mismatch of {strategy}"):
        table.add_column(column, justify="right")
    cost, mismatch = {}, {}
    for size in _BATCH_SIZES:
        prompts = [
            dataclasses.replace(setting.prompts[i % len(setting.prompts)], draw_index=i)
            for i in range(size)
        ]
        params = SamplingParams(max_new_tokens=options.num_tokens, seed=7)
        on: list[float] = []
        off: list[float] = []
        for round_index in range(options.rounds + 1):
            spent, _ = _run(setting.engine, prompts, params)
            invariant.engine.set_speculation(None)
            spent_on, plain = _run(invariant.engine, prompts, params)
            if round_index > 0:  # the first allocates
                off.append(spent)
                on.append(spent_on)
        invariant.engine.set_speculation(speculation)
        num_differing, num_compared = differences(plain, _run(invariant.engine, prompts, params)[1])
        cost[str(size)] = ratios(on, off)
        mismatch[str(size)] = num_differing / num_compared
        cells = [f"{value:.2f}" for value in cost[str(size)].values()]
        table.add_row(str(size), *cells, f"{mismatch[str(size)]:.1e}")
    console.print(table)
    return {"seconds_on_over_off": {PLAIN: cost}, "mismatch_per_token": mismatch}


def _run(
    engine: EmbeddedEngine, prompts: Sequence[Prompt], params: SamplingParams
) -> tuple[float, list[list[int]]]:
    groups = []
    spent = cpu_seconds(
        lambda: groups.extend(engine.generate(prompts, params, policy_version=VERSION))
    )
    return spent, [r.token_ids.tolist() for g in groups for r in g.rollouts]
