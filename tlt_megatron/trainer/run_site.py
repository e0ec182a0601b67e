"""The site of a run: settings, folder, ranks, device and what watches over them. The launcher opens
it, build.py builds on it.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tlt_megatron.config.schema import RunConfig
from tlt_megatron.runtime.device import Device
from tlt_megatron.runtime.heartbeat import running_heartbeat
from tlt_megatron.runtime.job_store import open_job_store
from tlt_megatron.runtime.memory_claim import MemoryLedger
from tlt_megatron.runtime.process_groups import Group
from tlt_megatron.runtime.stop import StopRequest


@dataclass
class Site:
    """What building needs everywhere. It opens the job's store and starts the heartbeat: a
    collective of all ranks.
    """

    config: RunConfig
    run_dir: Path
    world: Group
    device: Device
    stack: ExitStack  # closes what is built, also after a failed build
    stop: StopRequest
    ledger: MemoryLedger | None = None  # the planned memory
    given: Collection[str] = ()  # the settings of the command line

    def __post_init__(self) -> None:
        limits_s = self.config.run.heartbeat_timeout_s, self.config.run.group_timeout_s
        self.store = open_job_store(self.world, limits_s[0])
        heartbeat = running_heartbeat(self.store, self.world, *limits_s, self.stop)
        self.heartbeat = self.stack.enter_context(heartbeat)
