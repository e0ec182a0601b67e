"""Which parts of speculation pay: the throughput with each part and without it, over recorded passes.

    python -m tools.bench ablate --seeds 51 52 53

Each seed makes a small policy and a drafter. Every strategy then decodes at every batch size, with that drafter and with an
untrained one. The trace has what each pass accepted and the median CPU seconds of its kind, so that the load of the machine
does not matter. Selectors choose again over it, and see these seconds with seeded noise: two rollouts whose batch halves, two
with the untrained drafter, and one with the good drafter again. Selectors and parts must not be tuned on these seeds. Folders
and traces that are there are kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from tlt_megatron.config.strategy import OFF, SpeculationStrategy
from tlt_megatron.engines.embedded.speculate import Speculation
from tlt_megatron.speculation.beg_mab import BegMabSelector
from tlt_megatron.speculation.cost_model import CostModelSelector
from tlt_megatron.speculation.selector import Decision, FixedSelector, StrategySelector
from tlt_megatron.types import SamplingParams
from tools import make_tiny_policy, warmup_drafter
from tools.bench.measure import cpu_seconds, print_table, spread
from tools.bench.replay import PassTrace, RecordingSelector, TraceTable, replay
from tools.bench.setting import GOOD, RANDOM, Setting, long_prompts, make_drafts, make_setting

QUICK = {"batch_sizes": [1, 4], "num_tokens": 8, "num_requests": 4, "halving": 10}
_STRATEGIES = ("2_1_2", "4_1_4", "8_1_8", "4_2_8", "6_4_16", "ngram_8")
_PHASES = {"first": GOOD, "later": GOOD, "collapse": RANDOM, "useless": RANDOM, "again": GOOD}
_NOISE, _SLOWDOWN, _SLOW_SHARE = 0.05, 4.0, 0.01  # relative noise of seconds; rare slow passes
_LEAST_GAIN = 0.01
Strategies = Sequence[SpeculationStrategy]
Tables = dict[str, TraceTable]  # by drafter


class _NoProbes(CostModelSelector):
    """Runs the best known strategy instead of a probe."""

    def choose(self, batch_size: int) -> Decision:
        chosen = super().choose(batch_size)
        return Decision(strategy=self._current, reason="best") if self._probe else chosen


class _UsualWidths(CostModelSelector):
    """Takes all trees for as wide as usual."""

    def observe(self, *args: object, **kwargs: object) -> None:
        super().observe(*args, **kwargs)  # pyright: ignore[reportArgumentType]
        for kind in self._kinds:
            kind.widths.clear()


PARTS: dict[str, Callable[[Strategies], StrategySelector]] = {
    "the cost model, against BEG-MAB": lambda all_: BegMabSelector([*all_, OFF]),
    "probes": _NoProbes,
    "learned width of trees": _UsualWidths,
    "n-gram strategies": lambda all_: CostModelSelector([s for s in all_ if s.is_learned]),
    "trees beside chains": lambda all_: CostModelSelector([s for s in all_ if s.is_chain]),
}


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this benchmark."""
    add("--seeds", type=int, nargs="+", default=[51, 52, 53])
    add("--folder", type=Path, default=Path("build/ablate"))
    add("--pretraining-steps", type=int, default=600, help="of a policy; fewer: more entropy")
    add("--drafter-steps", type=int, default=200)
    add("--deepen", type=int, default=20, help="identity layers behind the policy's own")
    add("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    add("--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    add("--num-tokens", type=int, default=80, help="of each response")
    add("--num-requests", type=int, default=8, help="at least, per batch size")
    add("--halving", type=int, default=60, help="passes in which the batch of a rollout halves")


def run(options: argparse.Namespace, console: Console) -> dict[str, object]:
    """Record what is missing, and print the tables of selectors and of parts. Return the values of the JSON."""
    traces = {seed: _trace(options, seed) for seed in options.seeds}
    strategies = [SpeculationStrategy.parse(text) for text in _STRATEGIES]
    makers: dict[str, Callable[[], StrategySelector]] = {
        **{f"{s}": partial(FixedSelector, s) for s in (OFF, *strategies)},
        "beg_mab": partial(BegMabSelector, [*strategies, OFF]),
        "cost_model": partial(CostModelSelector, strategies),
    }
    shares = {
        name: {seed: phase_shares(make(), traces[seed], options) for seed in traces}
        for name, make in makers.items()
    }
    rows = [[name, *map(_medians, zip(*of.values(), strict=True))] for name, of in shares.items()]
    title = f"throughput over the oracle's, median of seeds {options.seeds}"
    print_table(console, title, ["", *_PHASES], rows)
    whole = {seed: statistics.fmean(of) for seed, of in shares["cost_model"].items()}
    gains, rows = {}, []
    for part, make in PARTS.items():
        found = [
            whole[seed] / statistics.fmean(phase_shares(make(strategies), traces[seed], options))
            for seed in traces
        ]
        gains[part] = spread(found)
        stays = gains[part]["median"] > 1.0 + _LEAST_GAIN and gains[part]["min"] > 1.0
        rows.append([part, *(f"{x:.3f}" for x in gains[part].values()), "stays" if stays else "-"])
    columns = ("part", "with / without, median", "min", "max", "verdict")
    print_table(console, "parts, all phases with equal weight", columns, rows)
    return {"shares": shares, "gains": gains}


def phase_shares(
    selector: StrategySelector, tables: Tables, options: argparse.Namespace
) -> list[float]:
    """Return the throughput over the oracle's by phase. The selector lives through all of them."""
    sizes, left = [], float(max(options.batch_sizes))
    while left >= 1.0:
        sizes.append(int(left))
        left *= 0.5 ** (1.0 / options.halving)
    shares, draws = [], {name: table.draws() for name, table in tables.items()}
    for phase, drafter in _PHASES.items():
        if phase == "again":
            selector.drafter_changed()
        shares.append(replay(selector, tables[drafter], sizes, draws[drafter]).of_oracle)
    return shares


def _medians(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f}"


def _trace(options: argparse.Namespace, seed: int) -> Tables:
    """Return the recorded passes of the policy of `seed`, and write those that are missing."""
    folder = options.folder / str(seed)
    path = folder / "trace.json"
    if not path.is_file():
        policy, drafter = str(folder / "policy"), str(folder / "drafter")
        if not Path(policy).is_dir():
            steps = str(options.pretraining_steps)
            make_tiny_policy.main(["--out", policy, "--seed", str(seed), "--steps", steps])
        settings = argparse.Namespace(
            model=policy, prompts=f"{policy}/eval.jsonl", deepen=options.deepen, max_new_tokens=600
        )
        if not Path(drafter).is_dir():
            files = ("--prompts", f"{policy}/train.jsonl", "--eval", settings.prompts)
            few = ("--steps", str(options.drafter_steps), "--num-prompts", "96")
            warmup_drafter.main(["--model", policy, "--out", drafter, *files, *few])
        setting = make_setting(settings, options.dtype)
        passes = _record(options, setting, drafter)
        rows = {name: [each.to_json() for each in found] for name, found in passes.items()}
        path.write_text(json.dumps(rows), encoding="utf-8")
    recorded = json.loads(path.read_text(encoding="utf-8"))
    return {
        name: TraceTable(fixed_seconds(map(PassTrace.from_json, rows), seed), options.batch_sizes)
        for name, rows in recorded.items()
    }


def _record(
    options: argparse.Namespace, setting: Setting, drafter: str
) -> dict[str, list[PassTrace]]:
    """Return the passes of all strategies by drafter. N-grams find an earlier epoch in their index."""
    drafts = make_drafts(setting, drafter)
    strategies = [SpeculationStrategy.parse(text) for text in _STRATEGIES]
    prompts = long_prompts(setting, options.num_tokens)
    passes: dict[str, list[PassTrace]] = {GOOD: [], RANDOM: []}
    for size in options.batch_sizes:
        for number in range(max(options.num_requests // size, 1)):
            chosen = [prompts[(number * size + i) % len(prompts)] for i in range(size)]
            batch = [dataclasses.replace(each, draw_index=i) for i, each in enumerate(chosen)]
            for name, found in passes.items():
                for strategy in (OFF, *strategies):
                    recorder = RecordingSelector(strategy)
                    speculation = Speculation(drafts[name], recorder, strategies)
                    setting.engine.set_speculation(speculation)
                    params = SamplingParams(max_new_tokens=options.num_tokens, seed=1)
                    if strategy.num_retrieved:
                        setting.policy.generate(batch, dataclasses.replace(params, seed=2))
                        recorder.passes.clear()
                    seconds = cpu_seconds(partial(setting.policy.generate, batch, params))
                    each_s = seconds / sum(each.batch_size for each in recorder.passes) * size
                    found += [dataclasses.replace(p, seconds=each_s) for p in recorder.passes]
    return passes


def fixed_seconds(passes: Iterable[PassTrace], seed: int) -> list[PassTrace]:
    """Replace seconds by the median of the pass's strategy and batch size, times seeded noise."""
    rng, passes = random.Random(seed), list(passes)
    cells: dict[tuple[SpeculationStrategy, int], list[float]] = {}
    for each in passes:
        cells.setdefault((each.strategy, each.batch_size), []).append(each.seconds)
    medians = {cell: statistics.median(seconds) for cell, seconds in cells.items()}
    noisy = []
    for each in passes:
        factor = math.exp(rng.gauss(0.0, _NOISE))
        factor *= _SLOWDOWN if rng.random() < _SLOW_SHARE else 1.0
        seconds = medians[each.strategy, each.batch_size] * factor
        noisy.append(dataclasses.replace(each, seconds=seconds))
    return noisy
