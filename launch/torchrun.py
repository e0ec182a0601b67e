"""torchrun for this program: `python launch/torchrun.py [options of torchrun] launch/pretrain_rl.py
--config my.yaml`.

torchrun itself ends the ranks 30 s after a signal. It dies of SIGUSR1 by default and fails even if
the run was saved. Here SIGTERM, SIGUSR1, SIGINT and SIGHUP go only to the ranks, and the run ends
when they end. The exit code is 0 if all ranks report that they are done or have saved. A second
Ctrl-C kills them.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # else torch prints a warning; ranks do the same
if "SLURM_NODEID" in os.environ:
    os.environ.setdefault("PET_NODE_RANK", os.environ["SLURM_NODEID"])  # the default of --node-rank

from tlt_megatron.runtime.environment_variables import program_name
from tlt_megatron.runtime.parent import AGENT_PID, TRAINER_PID
from tlt_megatron.runtime.stop import SIGNALS
from tlt_megatron.trainer.before.command_line import read_command
from tlt_megatron.trainer.saving.run_folder import how_to_go_on

_TAKEN = (*SIGNALS, signal.SIGHUP)
_LOOK_S = 1.0  # seconds between two checks of the ranks
_SIGTERM_BIT = 1 << (signal.SIGTERM - 1)
_NODES_COME_S = 180.0  # a dry run waits for other nodes; --rdzv-conf timeout=SECONDS sets another


def main(arguments: list[str]) -> int:
    """Return the exit code of the first rank that failed, 128 + signal if one was killed, 0 if none
    failed.

    Bad input is refused with 2 before torch is imported and before other nodes are waited for.
    """
    forwarder = _Forwarder()
    forwarder.start()
    program = _arguments_of_program(arguments)
    if program is not None and "--dry-run" in program:
        return _dry_run(arguments, forwarder.files)
    try:
        # Settings that name the folders in place of ids of the Hub, fetched for this node.
        config, read = (None, None) if program is None else read_command(program)
        fetched = [] if read is None else read.fetched
    except ValueError as error:
        print(f"{program_name()}: {error}", file=sys.stderr)
        return 2
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    from tlt_megatron.runtime.rendezvous import with_rendezvous

    options = parse_args([*arguments, *fetched])
    if _local_ranks(options) is None:
        return 2
    options, leave = with_rendezvous(options)
    options.signals_to_handle = "SIGQUIT"
    # Ranks print in one line why they end. This hides torchrun's own report after it.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run(options)
        leave()
    except (OSError, DistError) as error:
        print(f"torchrun.py: the ranks cannot start: {error}", file=sys.stderr)
        return 1
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode
        if not forwarder.has_killed:
            name = signal.Signals(-failure.exitcode).name
            print(
                f"torchrun.py: rank {rank} on {socket.gethostname()} (pid {failure.pid}) was ended by {name}",
                file=sys.stderr,
            )
            # With other ranks, one of them tells it.
            is_alone = options.nproc_per_node == "1" and options.nnodes in ("1", "1:1")
            if is_alone and config is not None and config.run.dir:
                sys.stderr.write(how_to_go_on(Path(config.run.dir), config.checkpoint.resume))
        return 128 - failure.exitcode
    return 0


def _dry_run(arguments: list[str], files: ExitStack) -> int:
    """Check all nodes in place of starting ranks: see `dry_run`."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else a missing node prints C++ frames
    from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config
    from torch.distributed.run import parse_args

    from tlt_megatron.runtime.rendezvous import meeting_place
    from tlt_megatron.trainer.before.dry_run import dry_run

    options = parse_args(arguments)
    num_ranks = _local_ranks(options)
    if num_ranks is None:
        return 2
    place = meeting_place(options)
    if place is None:
        backend = options.rdzv_backend
        print(
            f"torchrun.py: --rdzv-backend {backend}: must be static for --dry-run", file=sys.stderr
        )
        return 2
    os.environ["LOCAL_WORLD_SIZE"] = str(num_ranks)
    timeout_s = float(_parse_rendezvous_config(options.rdzv_conf).get("timeout", _NODES_COME_S))
    return dry_run(
        options.training_script_args,
        place,
        num_ranks=num_ranks,
        timeout_s=timeout_s,
        out=sys.stdout,
        files=files,
    )


def _local_ranks(options: argparse.Namespace) -> int | None:
    """Return the number of ranks of this node. None, and a line is printed, for bad numbers."""
    from torch.distributed.run import determine_local_world_size, parse_min_max_nnodes

    try:
        parse_min_max_nnodes(options.nnodes)
        return determine_local_world_size(options.nproc_per_node)
    except (RuntimeError, ValueError) as error:  # all that torch raises
        given = f"--nnodes {options.nnodes} --nproc-per-node {options.nproc_per_node}"
        print(f"{program_name()}: {given}: {error}", file=sys.stderr)
        return None


def _arguments_of_program(arguments: list[str]) -> list[str] | None:
    """Return what follows launch/pretrain_rl.py; None if another program is to be started."""
    names = [Path(word).name for word in arguments]
    if "pretrain_rl.py" not in names:
        return None
    return arguments[names.index("pretrain_rl.py") + 1 :]


class _Forwarder:
    """The thread that takes this process's signals.

    All other threads block them, and so do ranks until they listen.
    """

    def __init__(self) -> None:
        self.has_killed = False
        self.files = ExitStack()  # a dry run's files; closed when a signal ends it
        self._num_interrupts = 0

    def start(self) -> None:
        """Start the thread. Call it in the main thread before any other thread starts."""
        is_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        taken = SIGNALS if is_nohup else _TAKEN
        signal.pthread_sigmask(signal.SIG_BLOCK, taken)
        os.environ[AGENT_PID] = str(os.getpid())
        threading.Thread(target=self._forward, args=(taken,), daemon=True).start()

    def _forward(self, taken: tuple[signal.Signals, ...]) -> None:
        has_started = has_forwarded = False
        trainer = int(os.environ.get(TRAINER_PID, "0"))
        while True:
            info = signal.sigtimedwait(taken, _LOOK_S)
            ranks = _ranks()
            has_started = has_started or bool(ranks)
            if info is None and not has_forwarded:
                self._end_frozen(ranks)
            if trainer and os.getppid() != trainer:  # the script or notebook has ended
                trainer = 0
                os.kill(os.getpid(), signal.SIGTERM)
            # Where SIGCONT ends the wait after its time, CPython returns a record that was never
            # filled in.
            if info is None or info.si_signo not in taken:
                continue
            number = info.si_signo
            if not has_started:
                name = signal.Signals(number).name
                print(f"torchrun.py: {name} before any rank was started", file=sys.stderr)
                sys.stderr.flush()
                self.files.close()
                os._exit(128 + number)
            self._num_interrupts += number == signal.SIGINT
            if self._num_interrupts > 1:
                self._say_killed()
                number = signal.SIGKILL
            elif number == signal.SIGHUP:
                number = signal.SIGTERM
            has_forwarded = True
            for rank in ranks:
                with suppress(ProcessLookupError):
                    os.killpg(rank, number)

    def _end_frozen(self, ranks: list[int]) -> None:
        """Kill the ranks whose process is stopped and that torchrun has asked to end.

        torchrun asks them by SIGTERM when a rank has failed, and waits for 30 s, whatever
        --shutdown-timeout says: it uses that for signals to itself alone. A stopped process takes
        no signal but SIGKILL.
        """
        for rank in ranks:
            if _is_frozen(rank):
                print(
                    f"torchrun.py: the process {rank} is stopped and cannot end by itself: killed",
                    file=sys.stderr,
                    flush=True,
                )
                with suppress(ProcessLookupError):
                    os.killpg(rank, signal.SIGKILL)

    def _say_killed(self) -> None:
        self.has_killed = True
        show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # a live display hides it
        sys.stderr.write(f"{show_cursor}torchrun.py: second Ctrl-C: nothing more is saved\n")
        sys.stderr.flush()


def _ranks() -> list[int]:
    """Return the ranks: children of any thread of this process that lead their own process group,
    as torchrun starts them.
    """
    pids: list[int] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # that thread has just ended
            pids += map(int, path.read_text().split())
    return [pid for pid in pids if _leads_group(pid)]


def _is_frozen(pid: int) -> bool:
    """Return whether a process is stopped while SIGTERM waits for it."""
    with suppress(FileNotFoundError, ProcessLookupError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        waiting = int(status["SigPnd"], 16) | int(status["ShdPnd"], 16)
        return status["State"].startswith("T") and bool(waiting & _SIGTERM_BIT)
    return False


def _leads_group(pid: int) -> bool:
    with suppress(ProcessLookupError):
        return os.getpgid(pid) == pid
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
