"""The CPU adapter: what it rewrites in the supported Megatron, and the random states it puts in place."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from tlt_megatron.mcore import cpu

# Matches of each rewrite in all of megatron.core 0.16.1. Another version: look at what changed, then pin anew.
PINNED_VERSION = "0.16.1"
PINNED_COUNTS = (6, 169, 59, 2, 31, 3, 6, 2, 9, 19, 1)


def test_rewrites_match_the_supported_megatron_as_often_as_pinned() -> None:
    cpu.install()
    spec = importlib.util.find_spec("megatron.core")
    folder = Path(spec.origin).parent
    counts = [cpu.rewrite(file.read_text("utf-8"))[1] for file in sorted(folder.rglob("*.py"))]
    totals = tuple(sum(column) for column in zip(*counts, strict=True))
    version = importlib.metadata.version("megatron-core")
    assert (version, totals) == (PINNED_VERSION, PINNED_COUNTS)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x = f'cuda:{torch.cuda.current_device()}'", "x = 'cpu'"),
        ("d = torch.cuda.current_device()", "d = torch.get_default_device()"),
        ('torch.empty(1, device="cuda")', 'torch.empty(1, device="cpu")'),
        ("t.type() == 'torch.cuda.FloatTensor'", "t.type() == 'torch.FloatTensor'"),
        ("weight.data.cuda()", "weight.data.cpu()"),
        ("torch.cuda.is_available()", "torch.cuda.is_available()"),
    ],
)
def test_rewrite_changes_cuda_literals_only(before: str, after: str) -> None:
    assert cpu.rewrite(before)[0] == after


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


def test_forked_rng_state_goes_on_and_leaves_the_default_state_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cpu.install()
    from megatron.core.tensor_parallel import random

    tracker = random.CudaRNGStatesTracker()
    tracker.add("a", 5)
    generator = torch.Generator().manual_seed(5)
    expected = [torch.rand(3, generator=generator) for _ in range(2)]
    torch.manual_seed(9)
    outside = torch.rand(4)
    torch.manual_seed(9)
    with tracker.fork("a"):
        first = torch.rand(3)
    with tracker.fork("a"):
        second = torch.rand(3)
    assert torch.equal(first, expected[0])
    assert torch.equal(second, expected[1])
    assert torch.equal(torch.rand(4), outside)
    assert not caplog.text, "Megatron warns on GPUs where the CPU's state changes inside a fork"
