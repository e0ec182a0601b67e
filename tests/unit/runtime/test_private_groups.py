"""What makes a private group lost, and what does not.

NCCL is a stand-in here; tests/gpu has the real one.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist

from tlt_megatron.runtime.process_groups import MemberLost, PrivateHandle, form_private_group


class FailingBackend:
    """Fails each reduction with `error`."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def allreduce(self, _tensors: list[torch.Tensor]) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"), True),
        (dist.DistBackendError("NCCL communicator was aborted on rank 1"), True),
        (torch.OutOfMemoryError("CUDA out of memory."), False),
        (RuntimeError("expected a contiguous tensor"), False),
    ],
)
def test_broken_connections_lose_a_member_and_other_errors_do_not(
    error: Exception, is_lost: bool
) -> None:
    message = "private group 3.1" if is_lost else str(error)
    with pytest.raises(MemberLost if is_lost else type(error), match=message) as caught:
        PrivateHandle(FailingBackend(error), "3.1").run("allreduce", [torch.zeros(1)])
    assert isinstance(caught.value, MemberLost) is is_lost


class FakeNccl:
    """Records its communicators; a real one has no timeout while it connects."""

    made: ClassVar[list[tuple[int, int]]] = []

    class Options:
        """Takes any attribute."""

    def __init__(self, _store: dist.Store, rank: int, size: int, _options: Options) -> None:
        self.made.append((rank, size))

    def eager_connect_single_device(self, device: torch.device) -> None:
        """At once."""


def test_no_communicator_is_begun_without_all_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(FakeNccl, "made", [])
    store = dist.HashStore()
    gpu = SimpleNamespace(type="cuda")
    with pytest.raises(MemberLost, match=r"private group 7\.2"):
        form_private_group(store, "7.2", (0, 3), 3, gpu, timeout_s=0.2)
    assert FakeNccl.made == []
    dist.PrefixStore("group/7.3", store).set("here/0", "")
    group = form_private_group(store, "7.3", (0, 3), 3, gpu, timeout_s=5.0)
    assert FakeNccl.made == [(1, 2)]
    assert group.rank == 1
