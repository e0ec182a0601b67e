"""The site of a run: settings, folder, ranks, device and what watches over them. The launcher opens
it, build.py builds on it.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from tlt_megatron.config.schema import RunConfig
from tlt_megatron.runtime.device import Device
from tlt_megatron.runtime.heartbeat import Heartbeat, running_heartbeat
from tlt_megatron.runtime.job_store import JobStore, open_job_store
from tlt_megatron.runtime.memory_claim import MemoryLedger
from tlt_megatron.runtime.process_groups import Group
from tlt_megatron.runtime.stop import StopRequest


class Site(NamedTuple):
    """What building needs everywhere. `stack` closes what is built, also after a failed build."""

    config: RunConfig
    run_dir: Path
    world: Group
    device: Device
    store: JobStore
    heartbeat: Heartbeat
    stop: StopRequest
    stack: ExitStack
    ledger: MemoryLedger | None  # the planned memory


def open_site(
    config: RunConfig,
    run_dir: Path,
    world: Group,
    device: Device,
    stack: ExitStack,
    stop: StopRequest,
    ledger: MemoryLedger | None = None,
) -> Site:
    """Open the job's store and start the heartbeat. A collective of all ranks."""
    limits_s = config.run.heartbeat_timeout_s, config.run.group_timeout_s
    store = open_job_store(world, config.run.heartbeat_timeout_s)
    heartbeat = stack.enter_context(running_heartbeat(store, world, *limits_s, stop))
    return Site(config, run_dir, world, device, store, heartbeat, stop, stack, ledger)
