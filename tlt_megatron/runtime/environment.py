"""Environment variables of this process and of the children that it starts. Called where another program's engine is launched."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

# The peers of a NCCL communicator must agree on these. SGLang sets them for its own processes.
_COMMUNICATION = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "NCCL_CUMEM_ENABLE",
    "NCCL_GRAPH_MIXING_SUPPORT",
    "NCCL_MNNVL_ENABLE",
    "NCCL_NVLS_ENABLE",
)
_ENGINE_OWNER = "TLT_MEGATRON_ENGINE_OWNER"


@contextmanager
def environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables (None removes one) inside the block; children started inside keep them. Afterwards the whole environment
    is as before, whatever else was set inside."""
    before = dict(os.environ)
    _apply(changes)
    try:
        yield
    finally:
        added = dict.fromkeys(os.environ.keys() - before.keys())
        _apply(added | {name: v for name, v in before.items() if os.environ.get(name) != v})


def unless_set(defaults: Mapping[str, str]) -> dict[str, str]:
    """Those of the defaults that the user's environment does not set."""
    return {name: value for name, value in defaults.items() if name not in os.environ}


def owned_engine() -> dict[str, str | None]:
    """For `environment`: engine processes started inside belong to this process."""
    return {_ENGINE_OWNER: str(os.getpid())}


def engine_owner() -> int | None:
    """Pid of the process that this engine process belongs to; None outside of engines."""
    pid = os.environ.get(_ENGINE_OWNER)
    return None if pid is None else int(pid)


def communication_settings() -> dict[str, str | None]:
    """The variables that all ranks must hold alike before the first NCCL communicator; None: not set."""
    return {name: os.environ.get(name) for name in _COMMUNICATION}


def _apply(changes: Mapping[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
