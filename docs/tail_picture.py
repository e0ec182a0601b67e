"""Draws one RL step of the quickstart with TLT and, below it, the same step without: `make
figures`.

Both runs draw the same tokens, so the two steps are the same work. What is drawn is measured; its
numbers are in docs/figures/tail.json, with the commit.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.commands.compare_runs import read_run
from tools.run_report.palette import BLUE, GREEN, GREY, INK, ON_DARK, ORANGE
from tools.run_report.trace import Span, Trace

FOLDER = Path(__file__).resolve().parent / "figures"
_WIDTH, _LEFT, _RIGHT = 860, 92, 20
_TOP, _CURVE, _LANE = 58, 150, 20  # heights: title, curve, one rank
_DECODING = ("DECODE", "VERIFY")
_LANES = {"DRAFT-TRAIN": ORANGE, "UPDATE": GREEN}  # drawn besides decoding


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a figure shows of one step, in seconds since its first decode pass."""

    seconds: float
    curve: list[tuple[float, int]]  # requests that still decode, from this moment on
    bars: list[tuple[int, str, float, float]]  # rank, colour, start, end


def main() -> None:
    """Write both pictures and the JSON. ValueError if the runs are not of the same work."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("tlt", type=Path)
    parser.add_argument("plain", type=Path)
    parser.add_argument("--commit", required=True)
    options = parser.parse_args()
    number = longest_tail(options.tlt, options.plain)
    tlt, plain = (read_step(folder, number) for folder in (options.tlt, options.plain))
    measured = {
        "commit": options.commit,
        "step": number,
        "tlt_s": tlt.seconds,
        "plain_s": plain.seconds,
        "tlt_requests": tlt.curve,
        "plain_requests": plain.curve,
    }
    (FOLDER / "tail.json").write_text(json.dumps(measured) + "\n", encoding="utf-8")
    for name, colours in (("light", {}), ("dark", ON_DARK)):
        path = FOLDER / f"tail_{name}.svg"
        path.write_text(draw(tlt, plain, number, colours), encoding="utf-8")
    print(
        f"figures: docs/figures/tail_*.svg, step {number}: {tlt.seconds:.2f} s for {plain.seconds:.2f} s"
    )


def longest_tail(tlt: Path, plain: Path) -> int:
    """Return the step of the second half with the longest response over the median one.

    ValueError if the two runs differ in a token of it.
    """
    one, other = read_run(tlt), read_run(plain)
    half = [step for step in one if step > max(one) / 2]

    def tail(step: int) -> float:
        metrics = one[step].metrics
        return metrics["response_length/max"] / metrics["response_length/median"]

    longest = max(half, key=tail)
    if one[longest].responses != other[longest].responses:
        raise ValueError(f"step {longest}: the tokens of {tlt} and {plain} differ")
    return longest


def read_step(folder: Path, number: int) -> Step:
    """Read a step from the run's trace."""
    trace = Trace(folder / "timeline")
    trace.scan()
    window = trace.window((number, number))
    spans = [span for rank in trace.ranks.values() for span in rank.spans(window)]
    passes = [span for span in spans if span.phase in _DECODING and "batch_size" in span.args]
    passes = [span for span in passes if not _is_evaluation(span, spans)]
    start_s = min(span.start_s for span in passes)
    end_s = max(span.end_s for span in spans if span.name == "UPDATE")
    bars = [(s.rank, BLUE, s.start_s - start_s, s.end_s - start_s) for s in passes]
    bars += [
        (s.rank, _LANES[s.name], s.start_s - start_s, s.end_s - start_s)
        for s in spans
        if s.name in _LANES
    ]
    return Step(seconds=end_s - start_s, curve=_curve(passes, start_s), bars=bars)


def _is_evaluation(span: Span, spans: list[Span]) -> bool:
    """Return whether the pass belongs to an evaluation, which the trace has at the start of a
    step.
    """
    return any(s.name == "EVAL" and s.start_s <= span.start_s < s.end_s for s in spans)


def _curve(passes: list[Span], start_s: float) -> list[tuple[float, int]]:
    """Return the running requests of all ranks at each moment at which they change."""
    events: list[tuple[float, int, int]] = []  # moment, rank, requests from then on
    for rank in {span.rank for span in passes}:
        own = [span for span in passes if span.rank == rank]
        events += [(span.start_s - start_s, rank, span.args["batch_size"]) for span in own]
        events.append((own[-1].end_s - start_s, rank, 0))
    running: dict[int, int] = {}
    curve = []
    for moment, rank, requests in sorted(events):
        running[rank] = requests
        curve.append((moment, sum(running.values())))
    return curve


def draw(tlt: Step, plain: Step, number: int, colours: dict[str, str]) -> str:
    """Return the SVG. `colours` replaces those of the light page."""
    scale = (_WIDTH - _LEFT - _RIGHT) / plain.seconds
    most = max(requests for _, requests in plain.curve)
    floor = _TOP + _CURVE

    def x(seconds: float) -> float:
        return _LEFT + scale * seconds

    def y(requests: int) -> float:
        return floor - _CURVE * requests / most

    def steps(curve: list[tuple[float, int]]) -> str:
        points = f"M{x(curve[0][0]):.1f},{y(curve[0][1]):.1f}"
        return points + "".join(f"H{x(t):.1f}V{y(n):.1f}" for t, n in curve[1:])

    ranks = sorted({rank for rank, *_ in plain.bars})
    height = floor + 2 * (len(ranks) * _LANE + 30) + 26
    ink = colours.get(INK, INK)
    saved = x(plain.seconds) - x(tlt.seconds)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12" fill="{ink}">',
        f'<text x="{_LEFT}" y="20" font-size="15" font-weight="bold">Step {number} of the quickstart: {tlt.seconds:.1f} s with TLT, {plain.seconds:.1f} s without, the same tokens</text>',
        f'<text x="{_LEFT}" y="40">requests that still decode: <tspan fill="{colours.get(BLUE, BLUE)}" font-weight="bold">with TLT</tspan>, <tspan fill="{colours.get(GREY, "#6B7178")}" font-weight="bold">without</tspan>; shaded: the time saved</text>',
        f'<rect x="{x(tlt.seconds):.1f}" y="{_TOP}" width="{saved:.1f}" height="{height - _TOP - 24}" fill="{GREEN}" opacity="0.14"/>',
        f'<path d="{steps(plain.curve)}L{x(plain.curve[-1][0]):.1f},{floor}H{x(0):.1f}Z" fill="{colours.get(GREY, GREY)}" opacity="0.45"/>',
        f'<path d="{steps(tlt.curve)}" fill="none" stroke="{colours.get(BLUE, BLUE)}" stroke-width="2.5"/>',
        f'<text x="{_LEFT - 8}" y="{_TOP + 10}" text-anchor="end">{most}</text>',
        f'<text x="{_LEFT - 8}" y="{floor}" text-anchor="end">0</text>',
    ]
    top = floor + 24
    for name, step in (("with TLT", tlt), ("without", plain)):
        parts.append(f'<text x="8" y="{top - 6}" font-weight="bold">{name}</text>')
        for rank in ranks:
            parts.append(
                f'<text x="{_LEFT - 8}" y="{top + 13}" text-anchor="end">rank {rank}</text>'
            )
            for own, colour, start, end in step.bars:
                if own == rank:
                    width = max(x(end) - x(start), 0.5)
                    parts.append(
                        f'<rect x="{x(start):.1f}" y="{top}" width="{width:.1f}" height="{_LANE - 4}" fill="{colours.get(colour, colour)}"/>'
                    )
            top += _LANE
        top += 30
    legend = ((BLUE, "rollout"), (ORANGE, "drafter training on the idle rank"), (GREEN, "update"))
    at = _LEFT
    for colour, label in legend:
        parts.append(
            f'<rect x="{at}" y="{height - 16}" width="12" height="12" fill="{colours.get(colour, colour)}"/>'
        )
        parts.append(f'<text x="{at + 18}" y="{height - 6}">{label}</text>')
        at += 40 + 7 * len(label)
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    main()
