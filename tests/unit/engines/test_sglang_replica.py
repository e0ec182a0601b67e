"""The ranks of one engine in step, without SGLang: when ranks enter, leave and fail, and whose
weights are sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.ranks import run_ranks
from tests.unit.engines.test_sglang_connection import pretend_module
from tlt_megatron.config.schema import RolloutSection, SglangSection
from tlt_megatron.engines.sglang.connection import TARGET
from tlt_megatron.engines.sglang.replica import in_step
from tlt_megatron.engines.sglang.sglang_engine import SglangEngine
from tlt_megatron.engines.sglang.weights import WeightSender
from tlt_megatron.runtime.device import select_device
from tlt_megatron.runtime.process_groups import SINGLE, Group, group_of
from tlt_megatron.types import SamplingParams


def world() -> Group:
    return group_of(torch.distributed.group.WORLD)


def test_a_follower_waits_while_the_engine_takes_or_gives_back_memory(tmp_path: Path) -> None:
    released, ready, taken = (tmp_path / name for name in ("released", "ready", "taken"))

    def leader(replica: Group) -> bool:
        with in_step("sleep", replica):
            released.touch()
        with in_step("wake", replica):
            saw_ready = ready.exists()
            taken.touch()
        return saw_ready

    def follower(replica: Group) -> bool:
        engine = SglangEngine(
            "policy",
            RolloutSection(),
            SglangSection(),
            select_device("cpu"),
            rank=1,
            replica=replica,
        )
        engine.wake()  # awake already: nothing to wait for
        engine.sleep()
        engine.sleep()
        saw_released = released.exists()
        ready.touch()
        engine.wake()
        assert engine.generate([], SamplingParams(), policy_version=1) == engine.take_passes() == []
        engine.load_state_dict(engine.state_dict())
        return saw_released and taken.exists()

    def run() -> bool:
        replica = world()
        return leader(replica) if replica.is_first else follower(replica)

    assert run_ranks(2, run) == [True, True]


def test_a_failure_of_the_leader_is_an_error_of_all_its_ranks() -> None:
    def wake(replica: Group) -> None:
        with in_step("waking the engine", replica):
            if replica.is_first:
                raise RuntimeError("out of memory")

    def run() -> str:
        with pytest.raises(RuntimeError) as caught:
            wake(world())
        return str(caught.value)

    others = "waking the engine failed on rank 0: out of memory"
    assert run_ranks(3, run) == ["out of memory", others, others]


# ---- weights

CPU = (torch.device("cpu"), torch.float32)


class FakeConnection:
    """Notes the calls that SGLang's engine would get."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, SimpleNamespace]] = []

    def call(self, method: str, request: SimpleNamespace) -> None:
        self.calls.append((method, request))


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `WeightSender` takes from SGLang: requests as namespaces, a payload that names rank and
    tensors.
    """

    class Bucket(SimpleNamespace):
        def get_flattened_tensor(self) -> torch.Tensor:
            return torch.cat([tensor.flatten() for _, tensor in self.named_tensors])

        def get_metadata(self) -> list[str]:
            return [name for name, _ in self.named_tensors]

    def serialize(content: dict) -> str:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return f"rank {rank}: {' '.join(content['metadata'])}"

    def pretend(name: str, **content: object) -> None:
        pretend_module(f"sglang.srt.{name}", monkeypatch, **content)

    kinds = ("BeginWeightUpdate", "EndWeightUpdate", "UpdateWeightsFromTensor")
    requests = {f"{kind}ReqInput": SimpleNamespace for kind in kinds}
    pretend("managers.io_struct", **requests)
    pretend("utils", MultiprocessingSerializer=SimpleNamespace(serialize=serialize))
    pretend("weight_sync.tensor_bucket", FlattenedTensorBucket=Bucket)


def export() -> Iterator[tuple[str, torch.Tensor]]:
    for name in ("a", "b", "c"):
        yield name, torch.zeros(2)  # 8 bytes: two fill a bucket


def send(offers_own: bool) -> list[tuple[str, dict]]:
    replica = world()
    connection = FakeConnection() if replica.is_first else None
    sender = WeightSender(
        connection, replica, *CPU, num_ranks=2, offers_own=offers_own, bucket_bytes=16
    )
    sender.send(export(), role=TARGET, version="3")
    return [(method, vars(request)) for method, request in connection.calls] if connection else []


def test_a_drafters_embedding_and_head_stay_the_same_tensors() -> None:
    sender = WeightSender(None, SINGLE, *CPU, num_ranks=1, offers_own=False, has_drafter=True)
    with pytest.raises(RuntimeError, match="needs a learned drafter"):
        sender.target_tensors()
    policy = {"model.embed_tokens.weight": torch.arange(6.0).view(3, 2)}
    list(sender.cast(policy.items()))
    embedding, tied_head = sender.target_tensors()
    assert tied_head is embedding
    list(sender.cast((name, tensor + 1) for name, tensor in policy.items()))
    assert torch.equal(embedding, policy["model.embed_tokens.weight"] + 1)


def payloads(calls: list[tuple[str, dict]]) -> list[list[str]]:
    return [r["serialized_named_tensors"] for m, r in calls if m == "update_weights_from_tensor"]


def test_every_rank_offers_its_own_weights_in_one_session(messages: None) -> None:
    leader, follower = run_ranks(2, send, True)
    assert follower == []
    methods = [method for method, _ in leader]
    update = "update_weights_from_tensor"
    assert methods == ["begin_weight_update", update, update, "end_weight_update"]
    assert payloads(leader) == [["rank 0: a b", "rank 1: a b"], ["rank 0: c", "rank 1: c"]]
    requests = [request for method, request in leader if method == update]
    assert [request["flush_cache"] for request in requests] == [False, True]
    assert [request["weight_version"] for request in requests] == [None, "3"]


def test_on_a_cpu_the_leaders_copy_serves_all(messages: None) -> None:
    leader, _ = run_ranks(2, send, False)
    assert payloads(leader) == [["rank 0: a b", "rank 0: a b"], ["rank 0: c", "rank 0: c"]]


def test_one_process_with_an_engine_of_several_ranks_offers_a_copy_for_each(messages: None) -> None:
    connection = FakeConnection()
    sender = WeightSender(connection, SINGLE, *CPU, num_ranks=2, offers_own=True)
    sender.send(export(), role=TARGET, version="3")
    calls = [(method, vars(request)) for method, request in connection.calls]
    assert payloads(calls) == [["rank 0: a b c", "rank 0: a b c"]]


def test_weights_that_sglang_refuses_are_an_error_of_all_ranks(messages: None) -> None:
    class Refusing(FakeConnection):
        def call(self, method: str, request: SimpleNamespace) -> None:
            super().call(method, request)
            if method == "update_weights_from_tensor":
                raise RuntimeError("sglang refused it: shapes")

    def run() -> tuple[str, list[str]]:
        replica = world()
        connection = Refusing() if replica.is_first else None
        sender = WeightSender(connection, replica, *CPU, num_ranks=2, offers_own=True)
        with pytest.raises(RuntimeError) as caught:
            sender.send(export(), role=TARGET, version="3")
        return str(caught.value), [m for m, _ in connection.calls] if connection else []

    (leader, calls), (follower, _) = run_ranks(2, run)
    assert leader == "sglang refused it: shapes"
    assert follower == "sending target weights failed on rank 0: sglang refused it: shapes"
    assert calls[-1] == "end_weight_update"
