"""Private NCCL groups: made by their members alone, kept by member set, closed without the
world.
"""

from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist

from tests.gpu.cuda_ranks import needs_gpus, run_cuda_ranks
from tlt_megatron.runtime.device import Device, select_device
from tlt_megatron.runtime.job_store import open_job_store
from tlt_megatron.runtime.process_groups import (
    MemberLost,
    PrivateHandle,
    _form_nccl,
    form_private_group,
    init_world,
)

pytestmark = needs_gpus()


def test_one_member_reduces_broadcasts_and_closes(device: Device) -> None:
    store = dist.HashStore()
    timeout = datetime.timedelta(seconds=20)
    for name in ("1.1", "1.2"):  # one after the other, as sessions are
        backend = _form_nccl(dist.PrefixStore(name, store), 0, 1, device.torch_device, timeout)
        handle = PrivateHandle(backend, name)
        x = torch.arange(5.0, device=device.torch_device)
        handle.run("allreduce", [x])
        handle.run("broadcast", x, 0)
        assert x.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
        handle.close()
        with pytest.raises(MemberLost, match=f"private group {name} is closed"):
            handle.run("allreduce", [x])


def lose_the_other(timeout_s: float) -> str:
    """Rank 1 forms the group and leaves; rank 0 finds out."""
    device = select_device("cuda")
    world = init_world(device.backend, 60.0)
    store = open_job_store(world, 60.0).part("test")
    group = form_private_group(store, "1.1", (0, 1), world.rank, device.torch_device, timeout_s)
    x = torch.ones(3, device=device.torch_device)
    group.all_reduce(x)
    found = ""
    if world.rank == 0:
        try:
            group.all_reduce(x)
        except MemberLost as error:
            found = str(error)
        group.handle.close()
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices")
def test_a_silent_member_is_lost_after_the_timeout_and_the_process_lives() -> None:
    found, _ = run_cuda_ranks(2, lose_the_other, 5.0)
    assert found.startswith("private group 1.1: ")
