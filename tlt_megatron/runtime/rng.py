"""Seeds the global random generators of this process, which functions of the user may draw from.

Each RL step seeds them, so a resumed run needs no saved states: it draws in a step what a straight
run draws. Sampling noise is not from these generators: it is counter-based. Megatron draws nothing:
there is no dropout.
"""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_everything(seed: int, step: int = 0) -> None:
    """Seed python, numpy and torch (all devices) for RL step `step`, counted from 1. 0: the
    set-up.
    """
    number = (seed + step) % 2**32  # numpy takes no more
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
