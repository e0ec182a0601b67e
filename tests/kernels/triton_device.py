"""The device that the tests of the Triton kernels run on. Where there is none, the test file that
imports it is skipped.

`make test-sglang` runs them on a CPU, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch.utils._pytree import tree_map

from tools.gpu.pretend_cuda import PretendTensor

pytest.importorskip(
    "triton", reason="the CPU build of torch comes without triton: make test-sglang"
)
if torch.cuda.is_available():
    DEVICE = "cuda"
elif os.environ.get("TRITON_INTERPRET") == "1":
    DEVICE = "cpu"
else:
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)


def launch_on_host(monkeypatch: pytest.MonkeyPatch, note: Callable[[], None]) -> None:
    """Launch kernels of a pretended GPU on its tensors in place, and call `note` before each.

    The interpreter copies tensors of a GPU to the host, which a captured pass must not do.
    """
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def on_host(self: GridExecutor, *args: object, **kwargs: object) -> None:
        note()
        inner = tree_map(lambda x: x.inner if isinstance(x, PretendTensor) else x, args)
        launch(self, *inner, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", on_host)
