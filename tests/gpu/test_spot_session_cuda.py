"""Spot training over NCCL: one rank's session with a drafter on the GPU, and its saves; with two
GPUs a session that grows and stops."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from tests.gpu.cuda_ranks import needs_gpus, run_cuda_ranks
from tests.slow_draft import copy_drafter, make_draft_model
from tests.spot_phases import RandomBatches, make_spot
from tlt_megatron.config.schema import DrafterSection
from tlt_megatron.drafter.drafter_trainer import DrafterTrainer
from tlt_megatron.models.draft_model import DraftModel
from tlt_megatron.runtime.device import Device, select_device
from tlt_megatron.runtime.process_groups import init_world
from tlt_megatron.spot.session import GroupPool

pytestmark = needs_gpus()
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}


def make_trainer(
    device: torch.device, dtype: torch.dtype = torch.float32, algorithm: str = "hass"
) -> tuple[DrafterTrainer, DraftModel]:
    """A drafter on the device, and its twin on the CPU, from which data are made."""
    architecture = "eagle3" if algorithm == "eagle3" else "eagle"
    twin = make_draft_model(architecture, dtype=dtype)
    trainer = DrafterTrainer(copy_drafter(twin, device), DrafterSection(algorithm=algorithm))
    return trainer, twin


@pytest.mark.parametrize("algorithm", ["eagle", "hass", "eagle3"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_drafter_learns_the_same_as_on_the_cpu(
    device: Device, algorithm: str, dtype: torch.dtype
) -> None:
    losses = []
    for where in (torch.device("cpu"), device.torch_device):
        trainer, twin = make_trainer(where, dtype, algorithm)
        batches = RandomBatches(twin, 0, device=where)
        losses.append([trainer.step(batches.next_batch()).loss for _ in range(8)])
    torch.testing.assert_close(losses[1], losses[0], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert len(set(losses[1])) == 8


def train_until_all_are_done(
    naps_s: list[float], num_phases: int, shares_gpu: bool = False
) -> dict[str, object]:
    """Phases in which rank i generates for naps_s[i], or for its neighbour's in every second one.

    `shares_gpu`: all ranks use the first GPU and gloo, because NCCL takes one rank per GPU.
    """
    shared = Device(torch_device=torch.device("cuda", 0), backend="gloo")
    device = shared if shares_gpu else select_device("cuda")
    world = init_world(device.backend, 60.0)
    trainer, twin = make_trainer(device.torch_device)
    source = RandomBatches(twin, world.rank, device=device.torch_device)
    spot = make_spot(trainer=trainer, source=source)
    if shares_gpu:
        host = torch.device("cpu")
        spot._groups = GroupPool(spot.ranks, host, max_kept=0)
    reports, checksums = [], []
    for step in range(1, num_phases + 1):
        dist.barrier()
        time.sleep(naps_s[(world.rank + step - 1) % world.size])
        reports.append(spot.run_until_preempted(step))
        checksums.append(spot.sync_newest(world).checksum)
    dist.barrier()
    dist.destroy_process_group()
    return {
        "updates": [len(report.updates) for report in reports],
        "broken": sum(report.num_broken for report in reports),
        "members": [
            next((s.members for s in reversed(report.sessions) if s.stats), ())
            for report in reports
        ],
        "checksums": checksums,
    }


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices")
def test_the_idle_rank_trains_and_both_hold_the_same_afterwards() -> None:
    ranks = run_cuda_ranks(2, train_until_all_are_done, [0.0, 5.0], 2)
    assert [rank["broken"] for rank in ranks] == [0, 0]
    assert ranks[0]["checksums"] == ranks[1]["checksums"]
    assert ranks[0]["updates"][0] > 0 == ranks[1]["updates"][0]
    assert ranks[1]["updates"][1] > 0 == ranks[0]["updates"][1]


@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs 3 CUDA devices")
def test_a_session_over_nccl_grows_and_stops() -> None:
    ranks = run_cuda_ranks(3, train_until_all_are_done, [0.0, 4.0, 10.0], 3)
    assert [rank["broken"] for rank in ranks] == [0, 0, 0]
    assert len({tuple(rank["checksums"]) for rank in ranks}) == 1
    assert ranks[0]["members"][0] == ranks[1]["members"][0] == (0, 1)
    assert ranks[0]["updates"][0] > ranks[1]["updates"][0] > 0 == ranks[2]["updates"][0]


def test_two_members_on_one_gpu_train_in_one_session() -> None:
    ranks = run_cuda_ranks(3, train_until_all_are_done, [0.0, 0.0, 8.0], 1, True)
    assert [rank["broken"] for rank in ranks] == [0, 0, 0]
    assert len({tuple(rank["checksums"]) for rank in ranks}) == 1
    assert ranks[0]["members"] == ranks[1]["members"] == [(0, 1)]
    assert ranks[0]["updates"][0] >= ranks[1]["updates"][0] > 0 == ranks[2]["updates"][0]


def test_one_rank_alone_is_never_idle(device: Device) -> None:
    (rank,) = run_cuda_ranks(1, train_until_all_are_done, [0.0], 2)
    assert (rank["updates"], rank["broken"]) == ([0, 0], 0)
