"""The CPU adapter: what it rewrites in the supported Megatron."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

import pytest

from tlt_megatron.mcore import cpu

# Matches of each rewrite in all of megatron.core. Another version: look at what changed, then pin
# anew.
PINNED_COUNTS = {
    "0.16.1": (6, 169, 59, 2, 31, 3, 6, 2, 9, 19, 1, 1, 1),
    "0.19.2": (6, 193, 68, 2, 41, 3, 6, 2, 9, 19, 6, 1, 1),
}


def test_rewrites_match_the_supported_megatron_as_often_as_pinned() -> None:
    cpu.install()
    spec = importlib.util.find_spec("megatron.core")
    folder = Path(spec.origin).parent
    counts = [cpu.rewrite(file.read_text("utf-8"))[1] for file in sorted(folder.rglob("*.py"))]
    totals = tuple(sum(column) for column in zip(*counts, strict=True))
    assert totals == PINNED_COUNTS[importlib.metadata.version("megatron-core")]


def test_install_twice_adds_one_hook() -> None:
    cpu.install()
    before = list(sys.meta_path)
    cpu.install()
    assert sys.meta_path == before


def test_install_refuses_where_megatron_was_imported_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others = [f for f in sys.meta_path if not type(f).__module__.startswith("tlt_megatron")]
    monkeypatch.setattr(sys, "meta_path", others)
    monkeypatch.setitem(sys.modules, "megatron.core", sys)
    with pytest.raises(RuntimeError, match="must come first"):
        cpu.install()
