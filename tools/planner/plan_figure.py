"""Draws a prediction as an SVG: replicas of one step over time, and the seconds of a step by
phase.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from itertools import groupby

from tools.planner.simulation import PHASES, Lane, Prediction
from tools.run_report.palette import BLUE, GREEN, GREY, INK, ORANGE, OTHER, PURPLE, SKY, VERMILLION

_WIDTH, _LEFT, _RIGHT, _LANE, _BAR = 860, 190, 20, 26, 20
# Colours of the timeline, where the height of a pass is its number of running requests.
_DECODING = {
    "plain passes": BLUE,
    "speculative passes": SKY,
    "idle": GREY,
    "idle, trains the drafter": ORANGE,
}
# Colours of the bars.
_COLOURS = {
    "gen": BLUE,
    "old_log_prob": PURPLE,
    "update_actor": GREEN,
    "update_weights": VERMILLION,
    "other": OTHER,
}


def draw(
    title: str, timelines: Mapping[str, Prediction], bars: Mapping[str, Mapping[str, float]]
) -> str:
    """Return the SVG. Of `timelines` the last step is drawn; `bars` are seconds of a step by
    phase.
    """
    longest_s = max(sum(found.last_phases.values()) for found in timelines.values())
    parts = [_text(_LEFT, 20, title, bold=True), *_legend(_DECODING, 40)]
    top = 56
    for name, found in timelines.items():
        parts += [_text(_LEFT - 8, top + 18, name, end=True)]
        num_lanes = len(found.last_rounds[0])
        parts += _timeline(found, top, (_WIDTH - _LEFT - _RIGHT) / longest_s)
        top += num_lanes * _LANE + 18
    parts.append(_text(_LEFT, top, f"0 to {longest_s:.2f} s"))
    parts += _legend(_COLOURS, top + 28)
    top += 44
    scale = (_WIDTH - _LEFT - _RIGHT - 60) / max(sum(each.values()) for each in bars.values())
    for name, seconds in bars.items():
        parts.append(_text(_LEFT - 8, top + 14, name, end=True))
        at = float(_LEFT)
        for phase, value in _few(seconds).items():
            parts.append(_rect(at, top, scale * value, _BAR - 4, _COLOURS[phase]))
            at += scale * value
        parts.append(_text(at + 6, top + 14, f"{sum(seconds.values()):.2f} s"))
        top += _BAR
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top + 8}" font-family="sans-serif" font-size="12" fill="{INK}">'
    ground = f'<rect width="{_WIDTH}" height="{top + 8}" fill="#fff"/>'
    return "\n".join([head, ground, *parts, "</svg>", ""])


def _few(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of the phases that have a colour, and of all others."""
    found = {phase: seconds.get(phase, 0.0) for phase in _COLOURS}
    return found | {"other": sum(seconds.values()) - sum(found.values())}


def _timeline(found: Prediction, top: float, scale: float) -> Iterator[str]:
    """Yield a lane for each replica that was simulated pass by pass, and the phases after."""
    rounds = [max(map(_seconds, lanes)) for lanes in found.last_rounds]
    start_s = found.last_phases["gen"] - sum(rounds)  # the rest of the rollout comes first
    most = max(each.batch_size for lanes in found.last_rounds for lane in lanes for each in lane)
    for lanes, round_s in zip(found.last_rounds, rounds, strict=True):
        for number, lane in enumerate(lanes):
            at, floor = start_s, top + (number + 1) * _LANE - 2
            for (size, is_off), own in groupby(lane, lambda p: (p.batch_size, p.strategy.is_off)):
                seconds = _seconds(list(own))
                height = (_LANE - 4) * size / most
                colour = BLUE if is_off else SKY
                yield _rect(_LEFT + scale * at, floor - height, scale * seconds, height, colour)
                at += seconds
            rest_s, colour = start_s + round_s - at, ORANGE if found.trains_drafter else GREY
            yield _rect(_LEFT + scale * at, floor - 4, scale * rest_s, 4, colour)
        start_s += round_s
    height = len(found.last_rounds[0]) * _LANE - 4
    for phase in PHASES:
        seconds = found.last_phases.get(phase, 0.0)
        colour = _COLOURS.get(phase, OTHER)
        yield _rect(_LEFT + scale * start_s, top + 2, scale * seconds, height, colour)
        start_s += seconds


def _seconds(lane: Lane) -> float:
    return sum(each.seconds for each in lane)


def _legend(colours: Mapping[str, str], y: float) -> Iterator[str]:
    x = float(_LEFT)
    for name, colour in colours.items():
        yield _rect(x, y - 10, 12, 12, colour)
        yield _text(x + 17, y, name)
        x += 36 + 7 * len(name)


def _rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'
    )


def _text(x: float, y: float, text: str, *, bold: bool = False, end: bool = False) -> str:
    more = ' font-weight="bold"' * bold + ' text-anchor="end"' * end
    return f'<text x="{x:.1f}" y="{y:.1f}"{more}>{escape(text)}</text>'
