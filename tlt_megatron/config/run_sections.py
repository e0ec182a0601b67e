"""Sections of the run as a whole: its folder, length, limits and checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from tlt_megatron.config.ranges import NonNegativeInt, Positive, PositiveInt, Section, one_of


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSection(Section):
    """Checkpoints. Written to <run.dir>/checkpoints in Megatron's layout."""

    interval: NonNegativeInt = 0  # steps between checkpoints; 0: only at the end and on SIGTERM
    keep: NonNegativeInt = 2  # newest checkpoints that are kept; 0: all
    at_end: bool = True  # also after the last step
    resume: str = "never"  # auto: from the newest, if any | never | folder of checkpoints, or one
    export_hf: bool = True  # export the final policy as a Hugging Face model to <run.dir>/hf


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection(Section):
    """The run as a whole."""

    dir: str = ""  # run folder; empty: runs/<config name>-<time>
    # if dir holds a run that is not resumed; set_aside renames it
    on_used_dir: Annotated[str, one_of("refuse", "set_aside")] = "refuse"
    num_steps: NonNegativeInt = 10  # RL steps
    seed: int = 0  # of sampling noise
    device: Annotated[str, one_of("auto", "cpu", "cuda")] = "auto"  # auto: cuda if there is one
    group_timeout_s: Positive = 1800.0  # a collective that waits longer fails and names the ranks
    heartbeat_timeout_s: float = 60.0  # a rank silent for this long ends the run; 0: off, else >= 1
    max_bad_updates: PositiveInt = (
        3  # skipped or not finite, in a row; the run then ends, exit code 1
    )

    def check(self) -> None:
        silence_s = self.heartbeat_timeout_s
        is_allowed = silence_s == 0 or 1 <= silence_s < math.inf
        self.require(is_allowed, "heartbeat_timeout_s", "0 (off), or >= 1 and finite")
