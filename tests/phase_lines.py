"""Views of a rollout phase with spot training, made of the lines of its log."""

from __future__ import annotations

from tlt_megatron.spot.rank_state import PhaseView, ReplicaLayout

FOUR = ReplicaLayout(4)
MACHINE = "m"


def make_view(*lines: str, layout: ReplicaLayout = FOUR) -> PhaseView:
    view = PhaseView(layout, MACHINE)
    for line in lines:
        apply(view, line)
    return view


def apply(view: PhaseView, line: str) -> None:
    """`finished RANK TIME` stands for a rank of this machine that is ready at once."""
    kind, *words = line.split()
    if kind == "finished":
        rank, time = words
        view.apply([kind, rank, MACHINE, time], now=1000.0)
        kind, words = "ready", [rank]
    view.apply([kind, *words], now=1000.0)
