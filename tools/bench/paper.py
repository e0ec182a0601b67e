"""Compares the paper's speedups with a roofline of two fitted constants, without a GPU.

    python -m tools.bench paper

The roofline adds the seconds of a pass's bytes and of its operations, at the data sheet's values,
and an overhead for each pass of the target and of the drafter. The two overheads are fitted on the
batch-1 column of table 4; all other cells of table 4 and figure 13 are predicted. Numbers of TLT
(arXiv 2511.16665) are second-hand.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean

import numpy as np

from tlt_megatron.models.config import ModelConfig
from tlt_megatron.models.sizes import ModelSizes
from tools.bench.measure import print_table
from tools.bench.roofline import GPUS, PAPER, QWEN_2_5_32B, Decoding
from tools.gpu.shapes import QWEN_2_5_7B
from tools.planner.steps import Request, stages

_CONTEXT = 2048  # assumed; it hardly matters
_TOPK = 8  # rows of a draft pass
_DEPTH = 10  # of table 4
_VERIFY: Sequence[int] = PAPER["figure_13"]["verify"]
_ACCEPT_LENGTHS: Mapping[int, Sequence[float]] = PAPER["figure_13"]["accept_lengths"]
_TABLE_4: Mapping[int, Sequence[float]] = PAPER["table_4"]["speedups"]
_MODELS = {"7B": QWEN_2_5_7B, "32B": QWEN_2_5_32B}
_LENGTHS = ((2000, 8000), (2000, 16000), (2000, 32000))  # assumed: median, 99th percentile


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Seconds of passes on 4 H100."""

    pass_s: float = 0.0  # overhead of a pass of the target
    draft_s: float = 0.0  # overhead of a pass of the drafter
    model: ModelConfig = QWEN_2_5_32B

    def plain(self, batch: int) -> float:
        """Return the seconds of a plain pass."""
        return self.pass_s + sum(self._decoding(batch).parts_s(GPUS["H100"], 1))

    def speculative(self, batch: int, depth: int, verify: int) -> float:
        """Return the seconds of a speculative pass with its draft passes."""
        gpu, decoding = GPUS["H100"], self._decoding(batch)
        draft_s = self.draft_s + sum(decoding.parts_s(gpu, _TOPK, is_draft=True))
        return self.pass_s + sum(decoding.parts_s(gpu, verify)) + depth * draft_s

    def speedup(self, batch: int, depth: int, verify: int) -> float:
        """Return how much faster speculation is, with the accept length of figure 13."""
        accepted = _ACCEPT_LENGTHS[depth][_VERIFY.index(verify)]
        return accepted * self.plain(batch) / self.speculative(batch, depth, verify)

    def rollout_s(self, lengths: Sequence[int]) -> tuple[float, float]:
        """Return the seconds of a rollout without speculation, and with it below 32 requests."""
        plain_s = tlt_s = 0.0
        for stage in stages([Request(0, length) for length in lengths], len(lengths)):
            seconds = stage.tokens * self.plain(stage.batch_size)
            best = max(self.speedup(stage.batch_size, _DEPTH, verify) for verify in _TABLE_4)
            plain_s += seconds
            tlt_s += seconds / (best if stage.batch_size < PAPER["figure_14"]["below"] else 1.0)
        return plain_s, tlt_s

    def _decoding(self, batch: int) -> Decoding:
        return Decoding(model=self.model, num_gpus=4, batch=batch, context=_CONTEXT)


def fit() -> Fit:
    """Return the overheads with the least squared errors in the batch-1 column of table 4."""
    bare, rows, seconds = Fit(), [], []
    for verify, speedups in _TABLE_4.items():
        # accepted x plain = speedup x speculative, in which both overheads are linear
        factor = _ACCEPT_LENGTHS[_DEPTH][_VERIFY.index(verify)] / speedups[0]
        rows.append([factor - 1.0, -_DEPTH])
        seconds.append(bare.speculative(1, _DEPTH, verify) - factor * bare.plain(1))
    (pass_s, draft_s), *_ = np.linalg.lstsq(np.array(rows), np.array(seconds), rcond=None)
    return Fit(pass_s=float(pass_s), draft_s=float(draft_s))


def run(options: argparse.Namespace) -> dict[str, object]:  # noqa: ARG001
    """Compute and print the tables. Return the values of the JSON."""
    found = fit()
    print(
        f"fitted: {1e3 * found.pass_s:.2f} ms beside a pass, {1e3 * found.draft_s:.2f} ms beside a draft pass"
    )
    batches = PAPER["table_4"]["batches"]
    table_4 = {
        verify: _errors([found.speedup(batch, _DEPTH, verify) for batch in batches], papers)
        for verify, papers in _TABLE_4.items()
    }
    _print_errors("table 4 by tokens to verify and batch; batch 1 is fitted", batches, table_4)
    others = [abs(error) for row in table_4.values() for error in row[1:]]
    figure_13 = {
        depth: _errors([found.speedup(1, depth, verify) for verify in _VERIFY], papers)
        for depth, papers in PAPER["figure_13"]["speedups"].items()
    }
    _print_errors("figure 13 by draft depth and tokens to verify", _VERIFY, figure_13)
    fresh = [abs(error) for depth, row in figure_13.items() if depth != _DEPTH for error in row]
    for name, errors in (("table 4, other batches", others), ("figure 13, other depths", fresh)):
        print(f"{name}: {fmean(errors):.1%} in the mean, {max(errors):.1%} at worst")
    return {
        "fit": {"pass_s": found.pass_s, "draft_s": found.draft_s},
        "table_4_errors": table_4,
        "figure_13_errors": figure_13,
        "table_2": _table_2(),
        "lengths_assumed": _assumed(found),
    }


def _errors(computed: Sequence[float], measured: Sequence[float]) -> list[float]:
    return [one / other - 1.0 for one, other in zip(computed, measured, strict=True)]


def _print_errors(
    title: str, columns: Sequence[int], errors: Mapping[int, Sequence[float]]
) -> None:
    rows = [[str(name), *(f"{error:+.1%}" for error in row)] for name, row in errors.items()]
    print_table(f"computed against TLT: {title}", ["", *map(str, columns)], rows)


def _table_2() -> dict[str, float]:
    """Print plain tokens per second with one overhead of all GPUs, and return the errors."""
    decoding = Decoding(model=QWEN_2_5_7B, num_gpus=1, batch=1, context=_CONTEXT)
    num_bytes = decoding.parts_s(GPUS["H100"], 1)[0] * GPUS["H100"].bandwidth
    bare_s = {name: num_bytes / each for name, each in PAPER["table_2"]["bandwidth"].items()}
    speeds: Mapping[str, float] = PAPER["table_2"]["tokens_per_s"]
    # least relative errors of the seconds: the sum of ((bare + overhead) x speed - 1) squared
    rest = sum((1.0 - bare_s[name] * speed) * speed for name, speed in speeds.items())
    overhead_s = rest / sum(speed**2 for speed in speeds.values())
    computed = {name: 1.0 / (bare_s[name] + overhead_s) for name in speeds}
    rows = [
        [n, computed[n], speed, f"{computed[n] / speed - 1:+.1%}"] for n, speed in speeds.items()
    ]
    title = f"table 2, 7B, batch 1, plain tokens/s; fitted: {1e3 * overhead_s:.2f} ms of any GPU"
    print_table(title, ["", "computed", "TLT", "error"], rows)
    return {name: computed[name] / speed - 1.0 for name, speed in speeds.items()}


def _lognormal(count: int, median: int, p99: int) -> list[int]:
    """Return the lengths at equally spaced quantiles, the shortest first."""
    normal = NormalDist()
    sigma = math.log(p99 / median) / normal.inv_cdf(0.99)
    quantiles = ((k + 0.5) / count for k in range(count))
    return [round(median * math.exp(sigma * normal.inv_cdf(q))) for q in quantiles]


def _assumed(found: Fit) -> list[list[str | float]]:
    """Print and return the speedups of figure 14 and table 3 for assumed lengths.

    The update of table 3 takes four forward passes' operations of all weights at the peak.
    """
    rows: list[list[str | float]] = []
    figure, table = PAPER["figure_14"], PAPER["table_3"]
    cases = [_lognormal(figure["requests"], *each) for each in _LENGTHS]
    speedups = [plain_s / tlt_s for plain_s, tlt_s in map(found.rollout_s, cases)]
    rows.append(["figure 14, rollout", figure["rollout_speedup"], *speedups])
    for name, papers in table["speedups"].items():
        machine = replace(found, model=_MODELS[name])
        for nodes, paper in papers.items():
            speedups = []
            for each in _LENGTHS:
                lengths = _lognormal(table["responses"], *each)
                # of the engine with the longest response
                own = lengths[:: -table["engines_of_node"] * nodes]
                plain_s, tlt_s = machine.rollout_s(own)
                operations = 8 * ModelSizes(machine.model).total * sum(lengths)
                update_s = operations / (GPUS["H100"].peak * 8 * nodes)
                speedups.append((plain_s + update_s) / (tlt_s + update_s))
            rows.append([f"table 3, {name} on {nodes} nodes, step", paper, *speedups])
    names = [f"{median:,}, {p99:,}" for median, p99 in _LENGTHS]
    title = "speedups, lengths assumed: median, 99th percentile"
    print_table(title, ["", "TLT", *names], rows)
    return rows
