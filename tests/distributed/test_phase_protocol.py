"""Two ranks that share one SGLang engine (tp_size 2) on pretended GPUs: who allocates, releases and
waits when, rank by rank.

The engine and its follower are the real ones; tests/unit/trainer/test_phase_order.py has the order
of the trainer's loop. `sglang` is a stand-in that notes what it is asked and changes the
environment as the real one does. All events go to one file, in the order in which they happen.

A whole run with a policy and a critic, from its start over a resume to its end: no engine is awake
while an optimizer is on the device, and no gradients while an engine gets weights.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from launch.pretrain_rl import main
from tests.distributed.test_offload import gradient_bytes
from tests.ranks import run_ranks
from tests.tiny_task import make_tiny_task
from tests.unit.engines.test_sglang_connection import install, pretend_module
from tlt_megatron.config.load import load_config
from tlt_megatron.engines.embedded.embedded_engine import EmbeddedEngine
from tlt_megatron.mcore.optimizer import PolicyOptimizer
from tlt_megatron.mcore.policy_model import McorePolicyModel
from tlt_megatron.runtime.device import Device
from tlt_megatron.runtime.process_groups import Group, group_of
from tlt_megatron.trainer import build, loop
from tlt_megatron.trainer.build_sglang import build_sglang_engine

SLOW_S = 0.2  # a rank must wait so long: without waiting it would be too early
SET_BY_SGLANG = {
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "CUDA_DEVICE_MAX_CONNECTIONS": "8",
}


class Events:
    """Lines in one file, written by all ranks."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def note(self, event: str) -> None:
        with self._path.open("a") as file:
            file.write(event + "\n")

    def by_engine(self) -> tuple[list[str], list[list[str]]]:
        """The engine's events, and what the ranks did between them, sorted."""
        engine: list[str] = []
        between: list[list[str]] = []
        for event in self._path.read_text().splitlines():
            if event.startswith("engine: "):
                engine.append(event.removeprefix("engine: "))
                between.append([])
            else:
                between[-1].append(event)
        return engine, [sorted(events) for events in between]


def pretend_sglang(events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    """An SGLang whose engine answers at once and frees memory slowly, its second scheduler after
    the answer.
    """

    class Manager:
        _subprocess_watchdog = SimpleNamespace(stop=lambda: None)
        last_receive_tstamp = 0.0
        released = ""  # what the second scheduler still releases

        def auto_create_handle_loop(self) -> None:
            """SGLang's begins to read answers."""

        async def flush_cache(self, timeout_s: float) -> SimpleNamespace:
            return SimpleNamespace(success=True)

        async def release_memory_occupation(self, request: SimpleNamespace, _: None) -> None:
            self.released = f"engine: release {' '.join(request.tags)}"

        async def resume_memory_occupation(self, request: SimpleNamespace, _: None) -> None:
            events.note(f"engine: allocate {' '.join(request.tags)}")
            time.sleep(SLOW_S)

        async def check_weights(self, request: SimpleNamespace, _: None) -> tuple:
            """All schedulers answer, in the order of their requests."""
            if self.released:
                time.sleep(SLOW_S)
                events.note(self.released)
                self.released = ""
            return True, "", [{"checksums": defaultdict(lambda: "[]")}], None  # no hook is missing

    class Engine:
        def __init__(self, **_: object) -> None:
            os.environ.update(SET_BY_SGLANG)
            self.loop = asyncio.new_event_loop()
            self.tokenizer_manager = Manager()
            events.note("engine: start")

        def shutdown(self) -> None:
            """Not used: it would end the rank's other children too."""

    kinds = ("CheckWeights", "ReleaseMemoryOccupation", "ResumeMemoryOccupation")
    messages = {f"{kind}ReqInput": SimpleNamespace for kind in kinds}
    pretend_module("sglang.srt.managers.io_struct", monkeypatch, **messages)
    pretend_module("sglang.srt.managers", monkeypatch, io_struct=SimpleNamespace(**messages))
    pretend_module("sglang", monkeypatch, Engine=Engine)


def both(*events: str) -> list[str]:
    return sorted(f"rank {rank}: {event}" for rank in (0, 1) for event in events)


def test_memory_changes_hands_only_when_both_ranks_have_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = Events(tmp_path / "events")
    install(tmp_path, "0.5.23", monkeypatch)
    pretend_sglang(events, monkeypatch)
    gpu = Device(torch_device=torch.device("cuda", 0), backend="cpu:gloo,cuda:nccl")
    settings = [
        "rollout.engine=sglang",
        "rollout.dtype=bfloat16",
        "sglang.engine_args={tp_size: 2}",
    ]
    config = load_config(None, [f"model.path={tmp_path}", *settings])

    def note(phase: str, world: Group) -> None:
        events.note(f"rank {world.rank}: {phase}")

    def run() -> list[dict[str, str]]:
        world = group_of(torch.distributed.group.WORLD)
        before = dict(os.environ)
        engine = build_sglang_engine(config, gpu, tmp_path, world)
        after = dict(os.environ)
        for _ in range(2):
            note("rollout", world)
            engine.sleep()
            time.sleep(SLOW_S * world.rank)
            note("update", world)
            engine.wake()
            note("weight_sync", world)
        engine.close()
        return [before, after]

    for before, after in run_ranks(2, run):
        assert after == before
    taken, given = "allocate kv_cache weights cuda_graph", "release kv_cache weights cuda_graph"
    engine, between = events.by_engine()
    assert engine == ["start", given, taken, given, taken]
    assert between == [
        both("rollout"),
        both("update"),
        both("weight_sync", "rollout"),
        both("update"),
        both("weight_sync"),
    ]


def _run_noting(config: Path, run_dir: Path, *arguments: str) -> list[str]:
    """Run the program on this rank. Return the order in which its engine sleeps and wakes, and in
    which its optimizers arrive on the device and leave it.
    """
    events: list[str] = []
    number: dict[int, int] = {}  # by optimizer
    push = build.push_policy

    def checked_push(policy: McorePolicyModel, *args: Any, **kwargs: Any) -> dict[str, float]:
        assert gradient_bytes(policy) == 0, "gradients are there while an engine gets weights"
        events.append("weights sent")
        return push(policy, *args, **kwargs)

    build.push_policy = loop.push_policy = checked_push

    def note(owner: type, method: str, event: str, *, before: bool = False) -> None:
        original: Callable[..., Any] = getattr(owner, method)

        def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
            of = "engine"
            if owner is PolicyOptimizer:
                of = f"optimizer {number.setdefault(id(self), len(number))}"
            if before:
                events.append(f"{of} {event}")
            result = original(self, *args, **kwargs)
            if not before:
                events.append(f"{of} {event}")
            return result

        setattr(owner, method, noting)

    note(EmbeddedEngine, "__init__", "arrives", before=True)
    note(EmbeddedEngine, "wake", "arrives", before=True)
    note(EmbeddedEngine, "sleep", "leaves")
    note(PolicyOptimizer, "__init__", "arrives", before=True)
    note(PolicyOptimizer, "reload", "arrives", before=True)
    note(PolicyOptimizer, "offload", "leaves")
    settings = ("model.dtype=bfloat16", "data.eval=", "mcore.offload_in_rollouts=true", *arguments)
    assert main(["--config", str(config), f"run.dir={run_dir}", *settings]) == 0
    return events


def test_no_engine_is_awake_and_no_second_optimizer_is_there_beside_an_optimizer(
    tmp_path: Path,
) -> None:
    config, run_dir = make_tiny_task(tmp_path), tmp_path / "run"
    for arguments in (["run.num_steps=1"], ["run.num_steps=2", "--resume=auto"]):
        words = ("algorithm.advantage=gae", *arguments)
        (events,) = run_ranks(1, _run_noting, config, run_dir, *words, has_world=False)
        there: set[str] = set()
        assert events.count("weights sent") == 2  # before the step and after it
        for event in events:
            owner, _, verb = event.rpartition(" ")
            if verb != "sent":
                (there.add if verb == "arrives" else there.discard)(owner)
            assert len(there) <= 1, f"{sorted(there)} are on the device together: {events}"
        assert there == {"engine"}
        assert sum(event.endswith("arrives") for event in events) >= 6
