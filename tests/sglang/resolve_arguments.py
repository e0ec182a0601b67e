"""Prints how SGLang itself resolves the options of an engine: `python -m
tests.sglang.resolve_arguments FILE`.

FILE holds the options as JSON. A process of its own: SGLang caches what it asks the machine, and
here the answers are those of an H100. No engine is started and no weights are read.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

_H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    total_memory=85_520_809_984,
    multi_processor_count=132,
)
_TOTAL_MIB = 81_559  # what nvidia-smi says


def pretend_h100() -> None:
    """Make torch and SGLang report H100s. SGLang's modules must be imported first: as on a CPU."""
    import sgl_kernel
    from sglang.srt.utils import common

    def missing(name: str) -> None:  # kernels that SGLang imports and nobody here runs
        if name.startswith("__"):
            raise AttributeError(name)

    sgl_kernel.__getattr__ = missing
    torch.version.cuda = "13.0"
    for name, answer in {
        "is_available": True,
        "device_count": 8,
        "current_device": 0,
        "get_device_capability": (9, 0),
        "get_device_name": _H100.name,
        "get_device_properties": _H100,
        "mem_get_info": (_H100.total_memory, _H100.total_memory),
    }.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    common.get_nvgpu_memory_capacity = lambda: _TOTAL_MIB
    for module in list(sys.modules.values()):
        for function in list(vars(module).values()):
            if getattr(function, "__module__", "") == common.__name__:
                getattr(function, "cache_clear", lambda: None)()


def main() -> None:
    """See the module's docstring."""
    importlib.import_module("sglang.srt.arg_groups.pipeline")
    from sglang.srt.server_args import ServerArgs

    pretend_h100()
    arguments = ServerArgs(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    arguments.resolve_once()
    arguments.check_server_args()
    print(json.dumps(arguments.resolved_dict(), default=str))


if __name__ == "__main__":
    main()
