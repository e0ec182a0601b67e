"""Names of our settings in verl, slime and TRL, read from other_names.txt.

Errors of unknown keys quote them, docs/coming_from.md shows them, and `tlt migrate` takes over what
has the same values.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

PROJECTS = ("verl", "slime", "TRL")
_EPOCHS = (
    "run.num_steps (there epochs; one is the prompts of data.train / rollout.num_prompts steps)"
)
# Names that no row has: those of earlier versions, of another meaning, of launcher options.
_FURTHER = {
    "drafter.path": ["speculation.drafter"],
    "model.drafter": ["speculation.drafter"],
    "optimizer.epsilon": ["optimizer.eps"],
    "trainer.total_epochs": [_EPOCHS],
    "num_epoch": [_EPOCHS],
    "trainer.n_gpus_per_node": ["--nproc-per-node of tlt train"],
    "actor_num_gpus_per_node": ["--nproc-per-node of tlt train"],
    "sequence_parallel": ["parallel.tensor (above 1 sequence parallelism is always on)"],
    "trainer.nnodes": ["--nnodes of tlt train"],
    "actor_num_nodes": ["--nnodes of tlt train"],
}
# Last parts of dotted keys that say too little without the parts before them.
_VAGUE = ("name", "path", "len", "enable", "metric", "timeout", "sglang")


class Row(NamedTuple):
    """One row of the table."""

    ours: str  # section.key, or section.key.entry of a setting that is a table
    theirs: tuple[str, ...]  # verl's key, slime's flag, TRL's argument; empty: none
    note: str  # what differs besides the name


@functools.cache
def rows() -> list[Row]:
    """Return the table."""
    found: list[Row] = []
    section = ""
    text = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
    for line in text.splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            ours, verl, *others, note = [*line.split(maxsplit=4), ""][:5]
            if verl.startswith(("actor.", "model.", "rollout.")):
                verl = f"actor_rollout_ref.{verl}"
            names = tuple("" if name == "-" else name for name in (verl, *others))
            found.append(Row(f"{section}.{ours}", names, note))
    return found


def our_name(key: str) -> str | None:
    """Return our name of their `key`, by the whole key or else by its end; None if it is unknown.

    Dashes count as underscores: a key may be a flag of slime.
    """
    parts = key.replace("-", "_").split(".")
    for start in range(len(parts)):
        if answers := by_their_name().get(".".join(parts[start:])):
            return " and ".join(dict.fromkeys(answers))
    return None


@functools.cache
def by_their_name() -> dict[str, list[str]]:
    """Return what to say of each of their names and of each end of one, with _ for -."""
    whole: dict[str, list[str]] = {}
    ends: dict[str, list[str]] = {}
    for row in rows():
        answer = f"{row.ours} ({row.note})" if row.note else row.ours
        for name in filter(None, row.theirs):
            parts = name.replace("-", "_").split(".")
            whole.setdefault(".".join(parts), []).append(answer)
            for start in range(1, len(parts)):
                ends.setdefault(".".join(parts[start:]), []).append(answer)
    return {key: ends[key] for key in ends if key not in _VAGUE} | whole | _FURTHER
