"""What is settled before an SGLang engine starts, without SGLang: its release and environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tlt_megatron.config.schema import RolloutSection, SglangSection
from tlt_megatron.engines.sglang.connection import Connection, _environment
from tlt_megatron.engines.sglang.sglang_engine import SglangEngine
from tlt_megatron.runtime.device import select_device
from tlt_megatron.runtime.environment_variables import engine_owner, environment


def install(folder: Path, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write what `importlib.metadata` reads of a package."""
    about = folder / f"sglang-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    monkeypatch.syspath_prepend(folder)


def pretend_module(name: str, monkeypatch: pytest.MonkeyPatch, **content: object) -> None:
    """`import name` finds this content, in packages without any."""
    while name:
        module = ModuleType(name)
        vars(module).update(content or vars(sys.modules.get(name, module)))
        monkeypatch.setitem(sys.modules, name, module)
        name, content = name.rpartition(".")[0], {}


def test_another_release_is_refused_before_the_engine_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "0.5.24", monkeypatch)
    text = r"rollout.engine='sglang' needs sglang==0.5.23; installed: 0.5.24"
    with pytest.raises(ValueError, match=text):
        SglangEngine(
            "models/policy", RolloutSection(), SglangSection(), select_device("cpu"), rank=9
        )
    with pytest.raises(ValueError, match=text):
        Connection({}, SglangSection(), rank=9, is_cpu=True, num_ranks=1)


def test_a_start_that_fails_closes_contexts_at_addresses_of_former_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An open context waits, when it is collected, until ended processes take its messages."""

    class Context:
        def __init__(self) -> None:
            self.closed = False

        def destroy(self, linger: int) -> None:
            assert linger == 0
            self.closed = True

    former, started = [Context()], []

    def start(**arguments: object) -> None:
        address = id(former.pop())  # collected while the engine starts
        while not started or id(started[-1]) != address:
            started.append(Context())
        raise RuntimeError("no scheduler")

    install(tmp_path, "0.5.23", monkeypatch)
    pretend_module("zmq", monkeypatch, Context=Context)
    pretend_module("sglang", monkeypatch, Engine=start)
    with pytest.raises(RuntimeError, match="the sglang engine did not start: no scheduler"):
        Connection({}, SglangSection(), rank=0, is_cpu=True, num_ranks=1)
    assert all(context.closed for context in started)


def test_whatever_a_start_that_fails_has_set_is_as_before_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TLT_CHANGED", "before")
    monkeypatch.setenv("TLT_REMOVED", "before")
    before = dict(os.environ)

    def start_and_fail() -> None:
        with environment({"TLT_REMOVED": None, "TLT_GIVEN": "inside"}):
            assert "TLT_REMOVED" not in os.environ
            os.environ["NCCL_CUMEM_ENABLE"] = "0"
            os.environ["TLT_CHANGED"] = "inside"
            del os.environ["TLT_GIVEN"]
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        start_and_fail()
    assert dict(os.environ) == before


def test_engine_processes_know_their_owner_and_release_graphs_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They do not get the trainer's allocator either, because the memory saver cannot release
    expandable segments.
    """
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "expandable_segments:True")
    monkeypatch.delenv("SGLANG_MEMORY_SAVER_CUDA_GRAPH", raising=False)
    assert engine_owner() is None
    with environment(_environment(is_cpu=False, num_ranks=1)):
        assert engine_owner() == os.getpid()
        assert not [name for name in os.environ if name.endswith("ALLOC_CONF")]
        assert os.environ["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] == "1"
    monkeypatch.setenv("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "0")
    with environment(_environment(is_cpu=False, num_ranks=1)):
        assert os.environ["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] == "0"  # the user's
