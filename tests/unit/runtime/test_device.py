"""The device value: what is chosen, what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tlt_megatron.runtime import device as device_module
from tlt_megatron.runtime.device import select_device


@pytest.mark.skipif(torch.cuda.is_available(), reason="the refusal needs a machine without CUDA")
def test_cuda_without_a_card_is_refused_and_auto_is_the_cpu() -> None:
    with pytest.raises(ValueError, match=r"run\.device='cuda': torch sees no CUDA device"):
        select_device("cuda")
    assert select_device("auto") == select_device("cpu")


def test_files_that_the_host_keeps_in_memory_do_not_count_against_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each control group around the process limits it: here the job's, not the user's or the
    root.
    """
    job = tmp_path / "user" / "job"
    job.mkdir(parents=True)
    for folder, limit in ((tmp_path / "user", "max"), (job, str(6 << 30))):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{5 << 30}\n")
        files = f"anon {1 << 30}\ninactive_file {3 << 30}\nactive_file {1 << 30}\n"
        (folder / "memory.stat").write_text(files)
    own = tmp_path / "own"
    own.write_text("1:name=systemd:/other\n0::/user/job\n")
    monkeypatch.setattr(device_module, "_CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(device_module, "_OWN_CONTROL_GROUP", own)
    memory = SimpleNamespace(available=100 << 30)
    monkeypatch.setattr(device_module.psutil, "virtual_memory", lambda: memory)
    assert device_module.host_available_bytes() == 5 << 30
    memory.available = 1 << 30
    assert device_module.host_available_bytes() == 1 << 30


@pytest.mark.parametrize("rank", ["0", "2"])
def test_more_ranks_than_cards_are_refused_on_every_rank(
    rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a run ends before its log begins, the first rank of a node says why."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(
        ValueError, match="--nproc-per-node=3: must be at most 2, the GPUs that torch"
    ):
        select_device("auto")


@pytest.mark.parametrize("has_proc", [True, False])
def test_a_system_that_tells_no_peak_costs_the_number_and_not_the_run(
    has_proc: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sandbox has no VmHWM, and clear_refs refuses to be written. macOS has no /proc."""
    if has_proc:
        (tmp_path / "status").write_text("Name:\tpython\nVmRSS:\t    2048 kB\n")
        (tmp_path / "clear_refs").mkdir()
    monkeypatch.setattr(device_module, "_STATUS", tmp_path / "status")
    monkeypatch.setattr(device_module, "_CLEAR_PEAK", tmp_path / "clear_refs")
    device = select_device("cpu")
    device.reset_peak()
    assert device.peak_bytes() == 0
    assert device.process_bytes() > 1 << 20
