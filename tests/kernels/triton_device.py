"""The device that the tests of the Triton kernels run on. Where there is none, the test file that
imports it is skipped.

`make test-sglang` runs them on a CPU, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip(
    "triton", reason="the CPU build of torch comes without triton: make test-sglang"
)
if torch.cuda.is_available():
    DEVICE = "cuda"
elif os.environ.get("TRITON_INTERPRET") == "1":
    DEVICE = "cpu"
else:
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)
