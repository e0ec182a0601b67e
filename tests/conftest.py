"""Shared fixtures. One OpenMP thread, set before torch is imported: forked ranks need it
(tests/ranks.py).
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Take back the threads that a tool in a test asked for: a process forked later would wait for
    them forever.
    """
    yield
    torch.set_num_threads(1)
