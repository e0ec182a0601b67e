"""Marks for tests that need GPUs, and ranks with a GPU each.

Ranks are spawned: CUDA that has been used in the parent cannot be used after a fork. So their
function must be of a module's top level. They join a world of their own.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.ranks import run_ranks

run_cuda_ranks = partial(run_ranks, has_world=False, method="spawn")


def needs_gpus(count: int = 1) -> list[pytest.MarkDecorator]:
    """For `pytestmark`, or for one test."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    what = "a CUDA device" if count == 1 else f"{count} CUDA devices"
    return [
        pytest.mark.gpu,
        pytest.mark.skipif(found < count, reason=f"needs {what}: torch sees {found}"),
    ]
