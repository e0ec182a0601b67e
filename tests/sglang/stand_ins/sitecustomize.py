"""Runs at the start of every Python process that has this folder on its path: lets torchvision's
wheel import beside CPU torch, and SGLang's models with a layer for MTP run on a CPU.

Its compiled half needs CUDA, so operators that its Python half refers to at import are never
registered. Declaring them is enough: nobody here runs one.
"""

import sys
from importlib.abc import MetaPathFinder

_OPERATORS = ("nms", "qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _DeclareBeforeImport(MetaPathFinder):
    """Finds nothing; the first question about torchvision is the moment to act."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """See `importlib.abc.MetaPathFinder`."""
        if fullname != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        if not torch.cuda.is_available():  # GLM's models call it when they share their embedding
            torch.cuda.synchronize = lambda *_: None
        for name in _OPERATORS:
            if not hasattr(torch.ops.torchvision, name):
                torch.library.define(f"torchvision::{name}", _SCHEMA)


sys.meta_path.insert(0, _DeclareBeforeImport())
