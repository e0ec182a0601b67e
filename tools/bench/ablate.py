"""Which parts of speculation pay: the throughput with each part and without it, over recorded
passes.

    python -m tools.bench ablate --seeds 51 52 53

Each seed makes a small policy and a drafter. Every strategy then decodes at every batch size, with
that drafter and with an untrained one. The trace has what each pass accepted and the median CPU
seconds of its kind, so that the load of the machine does not matter. Selectors choose again over
it, and see these seconds with seeded noise: two rollouts whose batch halves, two with the untrained
drafter, and one with the good drafter again. Selectors and parts must not be tuned on these seeds.
Folders and traces that are there are kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

from tlt_megatron.config.strategy import OFF, SpeculationStrategy
from tlt_megatron.engines.embedded.speculate import Speculation
from tlt_megatron.speculation.beg_mab import BegMabSelector
from tlt_megatron.speculation.cost_model import CostModelSelector
from tlt_megatron.speculation.selector import Decision, FixedSelector, StrategySelector
from tlt_megatron.types import SamplingParams
from tools.bench.measure import cpu_seconds, print_table, spread
from tools.bench.replay import PassTrace, RecordingSelector, TraceTable, replay
from tools.bench.speed import GOOD, RANDOM, long_prompts, make_drafts
from tools.commands import warmup_drafter
from tools.commands.load_engine import LoadedPolicy
from tools.tiny_models import make_tiny_policy

_TEXTS = ("2_1_2", "4_1_4", "8_1_8", "4_2_8", "6_4_16", "ngram_8")
_STRATEGIES = [SpeculationStrategy.parse(text) for text in _TEXTS]
_PHASES = {"first": GOOD, "later": GOOD, "collapse": RANDOM, "useless": RANDOM, "again": GOOD}
_LEAST_GAIN = 0.01
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


SELECTORS: dict[str, Callable[[], StrategySelector]] = {
    **{f"{s}": partial(FixedSelector, s) for s in (OFF, *_STRATEGIES)},
    "beg_mab": partial(BegMabSelector, [*_STRATEGIES, OFF]),
    "cost_model": partial(CostModelSelector, _STRATEGIES),
}
# What takes the place of the cost model where a part is missing.
PARTS: dict[str, Callable[[], StrategySelector]] = {
    "the cost model, against BEG-MAB": SELECTORS["beg_mab"],
    "probes": partial(_NoProbes, _STRATEGIES),
    "learned width of trees": partial(_UsualWidths, _STRATEGIES),
    "n-gram strategies": partial(CostModelSelector, [s for s in _STRATEGIES if s.is_learned]),
    "trees beside chains": partial(CostModelSelector, [s for s in _STRATEGIES if s.is_chain]),
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


def run(options: argparse.Namespace) -> dict[str, object]:
    """Record what is missing, and print the tables of selectors and of parts. Return the values of
    the JSON.
    """
    traces = {seed: _trace(options, seed) for seed in options.seeds}

    def shares_of(make: Callable[[], StrategySelector]) -> dict[int, list[float]]:
        return {seed: phase_shares(make(), of, seed, options) for seed, of in traces.items()}

    shares = {name: shares_of(make) for name, make in SELECTORS.items()}
    rows = []
    for name, by_seed in shares.items():
        by_phase = zip(*by_seed.values(), strict=True)
        rows.append([name, *(f"{statistics.median(of):.3f}" for of in by_phase)])
    title = f"throughput over the oracle's, median of seeds {options.seeds}"
    print_table(title, ["", *_PHASES], rows)
    gains, rows = {}, []
    for part, make in PARTS.items():
        pairs = zip(shares["cost_model"].values(), shares_of(make).values(), strict=True)
        found = spread([statistics.fmean(whole) / statistics.fmean(rest) for whole, rest in pairs])
        gains[part] = found
        stays = found["median"] > 1.0 + _LEAST_GAIN and found["min"] > 1.0
        rows.append([part, *(f"{x:.3f}" for x in found.values()), "stays" if stays else "-"])
    columns = ("part", "with / without, median", "min", "max", "verdict")
    print_table("parts, all phases with equal weight", columns, rows)
    return {"shares": shares, "gains": gains}


def phase_shares(
    selector: StrategySelector, tables: Tables, seed: int, options: argparse.Namespace
) -> list[float]:
    """Return the throughput over the oracle's by phase. The selector lives through all of them."""
    sizes, left = [], float(max(options.batch_sizes))
    while left >= 1.0:
        sizes.append(int(left))
        left *= 0.5 ** (1.0 / options.halving)
    shares = []
    for number, (phase, drafter) in enumerate(_PHASES.items()):
        if phase == "again":
            selector.drafter_changed()
        noise = 10 * seed + number
        shares.append(replay(selector, tables[drafter], sizes, noise))
    return shares


def _trace(options: argparse.Namespace, seed: int) -> Tables:
    """Return the recorded passes of the policy of `seed`, and write those that are missing."""
    folder: Path = options.folder / str(seed)
    path, model, drafter = folder / "trace.json", folder / "policy", folder / "drafter"
    if not path.is_file():
        if not model.is_dir():
            steps = str(options.pretraining_steps)
            make_tiny_policy.main(["--out", str(model), "--seed", str(seed), "--steps", steps])
        if not drafter.is_dir():
            words = [f"data.train={model}/train.jsonl", f"data.eval={model}/eval.jsonl"]
            words += ["--steps", str(options.drafter_steps), "--num-prompts", "96"]
            warmup_drafter.main(["--model", str(model), "--out", str(drafter), *words])
        path.write_text(json.dumps(_record(options, model, drafter)), encoding="utf-8")
    recorded = json.loads(path.read_text(encoding="utf-8"))
    return {
        name: TraceTable((PassTrace(*row) for row in rows), options.batch_sizes)
        for name, rows in recorded.items()
    }


def _record(options: argparse.Namespace, model: Path, drafter: Path) -> dict[str, list[PassTrace]]:
    """Return the passes of all strategies by drafter. N-grams find an earlier epoch in their
    index.
    """
    policy = LoadedPolicy(
        model, dtype=options.dtype, num_identity_layers=options.deepen, max_new_tokens=600
    )
    drafts = make_drafts(policy, str(drafter))
    prompts = long_prompts(policy, policy.prompts(model / "eval.jsonl"), options.num_tokens)
    params = SamplingParams(max_new_tokens=options.num_tokens, seed=1)
    passes: dict[str, list[PassTrace]] = {GOOD: [], RANDOM: []}
    for size in options.batch_sizes:
        for number in range(max(options.num_requests // size, 1)):
            chosen = [prompts[(number * size + i) % len(prompts)] for i in range(size)]
            batch = [dataclasses.replace(each, draw_index=i) for i, each in enumerate(chosen)]
            for (name, found), strategy in product(passes.items(), (OFF, *_STRATEGIES)):
                recorder = RecordingSelector(strategy)
                policy.engine.set_speculation(Speculation(drafts[name], recorder, _STRATEGIES))
                if strategy.num_retrieved:
                    policy.generate(batch, dataclasses.replace(params, seed=2))
                    recorder.passes.clear()
                seconds = cpu_seconds(partial(policy.generate, batch, params))
                each_s = seconds / sum(each.batch_size for each in recorder.passes) * size
                found += [each._replace(seconds=each_s) for each in recorder.passes]
    return passes
