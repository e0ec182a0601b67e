"""Environment variables of this process and its children.

Used where another program's engine is started.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_ENGINE_OWNER = "TLT_MEGATRON_ENGINE_OWNER"
_PROGRAM = "TLT_MEGATRON_PROGRAM"


def name_program(name: str) -> None:
    """Set the name before the messages of this process and its children."""
    os.environ[_PROGRAM] = name


def program_name() -> str:
    """Return the name before a message: the command that the user typed."""
    return os.environ.get(_PROGRAM, "pretrain_rl")


@contextmanager
def environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables inside the block; None removes one. Children started inside keep them.

    On exit the whole environment is restored, including variables that other code set inside.
    """
    before = dict(os.environ)
    _apply(changes)
    try:
        yield
    finally:
        _apply(dict.fromkeys(os.environ.keys() - before.keys()) | before)


def unless_set(defaults: Mapping[str, str]) -> dict[str, str]:
    """Return the defaults that the user's environment does not set."""
    return {name: value for name, value in defaults.items() if name not in os.environ}


def with_defaults(defaults: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child: the user's, and the defaults that it does not set."""
    return {**defaults, **os.environ}


def owned_engine() -> dict[str, str | None]:
    """Return variables for `environment` that make this process the owner of engine processes
    started inside.
    """
    return {_ENGINE_OWNER: str(os.getpid())}


def engine_owner() -> int | None:
    """Return the pid of the process that owns this engine process; None outside of engines."""
    pid = os.environ.get(_ENGINE_OWNER)
    return None if pid is None else int(pid)


def _apply(changes: Mapping[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
