"""Ranks of spot training, and views of a rollout phase made of the lines of its log."""

from __future__ import annotations

from typing import Any

from torch.distributed import HashStore

from tlt_megatron.spot.rank_state import PhaseView, ReplicaLayout, SpotRanks

FOUR = ReplicaLayout(4)
MACHINE = "m"


def make_ranks(rank: int, layout: ReplicaLayout, **settings: Any) -> SpotRanks:
    return SpotRanks(store=HashStore(), layout=layout, rank=rank, phase_timeout_s=180.0, **settings)


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
