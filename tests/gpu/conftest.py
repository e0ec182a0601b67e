"""The GPU of these tests. Run them by `make test-gpu` or `make gpu-check`; without a GPU each is
skipped with the reason.
"""

from __future__ import annotations

import pytest
import torch

from tlt_megatron.runtime.device import Device, select_device


@pytest.fixture
def device() -> Device:
    """With float32 products in full precision, which is torch's default."""
    torch.backends.cuda.matmul.allow_tf32 = False
    return select_device("cuda")
