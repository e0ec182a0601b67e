"""The trainer's entry: `python launch/torchrun.py --nproc-per-node 2 launch/pretrain_rl.py --config
my.yaml [a.b=v ...]`.

Plain `torchrun` also starts it; `python launch/pretrain_rl.py ...` runs one rank. Bad input ends
with exit code 2 before torch is imported.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")  # spinning threads of one rank starve the others
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron overlaps by launch order
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else a lost rank prints 30 lines of C++

from tlt_megatron.config.layout import check_layout
from tlt_megatron.config.load import dump_config
from tlt_megatron.config.schema import RunConfig
from tlt_megatron.runtime.environment_variables import program_name
from tlt_megatron.runtime.log import FILE_ONLY, configure_logging, log_file
from tlt_megatron.runtime.parent import end_with_parent
from tlt_megatron.runtime.stop import StopRequest, describe_failure
from tlt_megatron.trainer.before.command_line import read_command
from tlt_megatron.trainer.saving.run_folder import RunFolder, how_to_go_on

if TYPE_CHECKING:
    from tlt_megatron.trainer.run import Run

log = logging.getLogger("launch.pretrain_rl")


def main(arguments: list[str] | None = None) -> int:
    """Run the trainer and return the exit code.

    0: done, or stopped on request and saved. 1: a rank failed. 2: bad input. 128 + signal: stopped
    during set-up.
    """
    end_with_parent()
    try:
        config, options = read_command(arguments)
        if options.print_config:
            print(dump_config(config), end="")
            return 0
        if options.dry_run:
            raise ValueError("--dry-run: must be started by tlt train or launch/torchrun.py")
        check_layout(config, int(os.environ.get("WORLD_SIZE", "1")))
        folder = _claim_run_folder(config, name=Path((options.config or ["defaults"])[-1]).stem)
    except ValueError as error:  # every rank finds it in the same files
        if os.environ.get("RANK", "0") == "0":
            print(f"{program_name()}: {error}", file=sys.stderr)
        return 2
    rank = int(os.environ.get("RANK", "0"))
    configure_logging(rank, None)
    is_first_of_node = os.environ.get("LOCAL_RANK", "0") == "0"
    stop = StopRequest(rank, is_first_of_node=is_first_of_node)
    stop.listen()
    with closing(folder) if folder else nullcontext():  # this run's until the process ends
        given = [word.partition("=")[0] for word in options.overrides]
        code = _Launch(config, stop, rank, given).run(folder)
        if folder is not None and code == 2:
            folder.withdraw()
        return code


def _claim_run_folder(config: RunConfig, name: str) -> RunFolder | None:
    """Return the run folder, locked for this run, on rank 0; None elsewhere."""
    if os.environ.get("RANK", "0") != "0":
        return None
    path = Path(config.run.dir or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    return RunFolder(path, resume=config.checkpoint.resume)


class _Launch:
    """One rank of one run, including its error report."""

    def __init__(
        self, config: RunConfig, stop: StopRequest, rank: int, given: Sequence[str]
    ) -> None:
        self._config = config
        self._given = given
        self._stop = stop
        self._rank = rank
        self._run_dir: Path | None = None
        self._run: Run | None = None  # set when it is built

    def run(self, folder: RunFolder | None) -> int:
        """Run and return the exit code.

        A failure is sent to the other ranks before the slow closing.
        """
        code = 0
        try:
            with ExitStack() as stack:
                try:
                    self._train(stack, folder)
                except Exception as error:
                    code = self._report(error)
                    raise
            import torch.distributed as dist

            self._stop.close()
            dist.destroy_process_group()
        except Exception as error:
            return code or self._report(error)  # reported already, or raised while closing
        return 0

    def _train(self, stack: ExitStack, folder: RunFolder | None) -> None:
        from tlt_megatron.runtime.collectives import broadcast_object
        from tlt_megatron.runtime.device import select_device
        from tlt_megatron.runtime.process_groups import init_world
        from tlt_megatron.trainer.before.memory_ledger import (
            check_memory,
            describe_checkpoint,
            make_ledger,
        )
        from tlt_megatron.trainer.build import build_run
        from tlt_megatron.trainer.finish import finish_run
        from tlt_megatron.trainer.run_site import Site

        config = self._config
        device = select_device(config.run.device)
        world = init_world(device.backend, config.run.group_timeout_s)
        self._run_dir = Path(broadcast_object(str(folder.path) if folder else "", world))
        configure_logging(world.rank, self._run_dir)
        ledger = make_ledger(config, world.size, device)
        free_bytes = device.free_bytes() + device.process_bytes()
        if world.is_first:
            lines = ["memory ledger:", *ledger.lines(), describe_checkpoint(config, world.size)]
            log.info("%s", "\n".join(lines), extra=FILE_ONLY)
            print(ledger.headline(free_bytes), flush=True)
        check_memory(ledger, free_bytes, device.host_free_bytes(), world)
        site = Site(config, self._run_dir, world, device, stack, self._stop, ledger, self._given)
        with site.heartbeat.explaining(config.run.group_timeout_s):
            self._run = build_run(site)
            self._run.train()
            finish_run(self._run, config, self._run_dir)

    def _report(self, error: Exception) -> int:
        """Report a failure and return the exit code.

        The first rank to fail gives the reason in one line. Every rank writes the traceback to its
        log.
        """
        from tlt_megatron.policy.health import UnhealthyTrainingError
        from tlt_megatron.runtime.heartbeat import RanksLost

        if isinstance(error, UnhealthyTrainingError):  # the same on every rank
            # Rank 0 may be ended before it comes here, if it is slow: the first to end says it.
            is_first = self._stop.end(1, str(error))
            log.error("%s", error, extra={} if is_first else FILE_ONLY)
            return 1
        code, line = 1, describe_failure(error, self._phase(), self._rank)
        if isinstance(error, RanksLost):
            code, line = error.code, str(error)
        if isinstance(error, ValueError) and self._run is None:
            code, line = 2, str(error)  # bad prompts, reward, sizes, memory or checkpoint
        where = ""
        if self._run_dir is not None:
            log.error("%s", line, exc_info=error, extra=FILE_ONLY)
            where = f" (traceback: {log_file(self._run_dir, self._rank)})" if code == 1 else ""
        if self._stop.end(code, line):
            print(f"{program_name()}: {line}{where}", file=sys.stderr, flush=True)
            if self._run is not None and self._run_dir is not None:
                sys.stderr.write(how_to_go_on(self._run_dir, self._config.checkpoint.resume))
                sys.stderr.flush()
        return code

    def _phase(self) -> str:
        if self._run is None:
            return "set-up"
        trainer = self._run.trainer
        return f"{trainer.phases.timeline.status.phase} after step {trainer.step}"


if __name__ == "__main__":
    exit_code = main()
    if exit_code != 0 and "torch" in sys.modules:
        # A communicator may wait for a lost peer when the interpreter destroys it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    sys.exit(exit_code)
