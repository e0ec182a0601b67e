"""The trainer's entry: `torchrun --nproc-per-node 2 launch/pretrain_rl.py --config examples/quickstart.yaml [a.b=v ...]`.

A plain `python launch/pretrain_rl.py ...` runs one rank. Bad input ends with exit code 2 before torch is imported.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # spinning threads of one rank starve the others
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tlt_megatron.config.layout import check_layout
from tlt_megatron.config.load import dump_config, load_config
from tlt_megatron.config.preflight import check_files
from tlt_megatron.config.schema import RunConfig

log = logging.getLogger("launch.pretrain_rl")


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0 done (or stopped on request and saved), 1 failed, 2 bad input."""
    options = _parse(arguments)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    overrides = list(options.overrides)
    if options.resume is not None:
        overrides.append(f"checkpoint.resume={options.resume}")
    try:
        config = load_config(options.config, overrides)
        if options.print_config:
            print(dump_config(config), end="")
            return 0
        if config.checkpoint.resume == "auto" and not config.run.dir:
            raise ValueError("run.dir='': must name the run folder where checkpoint.resume='auto'")
        check_files(config)
        check_layout(config, world_size)
    except ValueError as error:
        return _refuse(error)
    return _run(config, name=Path(options.config or "defaults").stem)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="pretrain_rl.py", description=__doc__.splitlines()[0])
    parser.add_argument("--config", help="YAML file; without it the defaults of config/schema.py")
    parser.add_argument(
        "--resume", help="auto | never | folder of checkpoints (sets checkpoint.resume)"
    )
    parser.add_argument("--print-config", action="store_true", help="print every setting and end")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="settings over the file's"
    )
    return parser.parse_intermixed_args(arguments)


def _refuse(error: ValueError) -> int:
    if os.environ.get("RANK", "0") == "0":
        print(f"pretrain_rl: {error}", file=sys.stderr)
    return 2


def _stop_unhealthy(error: Exception, rank: int) -> int:
    """The same error on every rank: all log it, the first alone to the terminal."""
    log.log(logging.ERROR if rank == 0 else logging.INFO, "%s", error)
    return 1


def _run(config: RunConfig, name: str) -> int:
    import torch.distributed as dist

    from tlt_megatron.policy.health import UnhealthyTrainingError
    from tlt_megatron.runtime.collectives import broadcast_object
    from tlt_megatron.runtime.device import select_device
    from tlt_megatron.runtime.log import configure_logging
    from tlt_megatron.runtime.process_groups import init_world
    from tlt_megatron.trainer.build import build_run
    from tlt_megatron.trainer.finish import finish_run
    from tlt_megatron.trainer.memory_ledger import make_ledger

    try:
        device = select_device(config.run.device)
        ledger = make_ledger(config, int(os.environ.get("WORLD_SIZE", "1")), device)
        if os.environ.get("RANK", "0") == "0":
            print("\n".join(ledger.lines()), flush=True)
        ledger.check(device.free_bytes() + device.process_bytes())
    except ValueError as error:
        return _refuse(error)
    world = init_world(device.backend, config.run.group_timeout_s)
    run_dir = Path(
        broadcast_object(config.run.dir or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}", world)
    )
    run_dir.mkdir(parents=True, exist_ok=True)
    configure_logging(world.rank, run_dir)
    with ExitStack() as stack:
        try:
            run = stack.enter_context(build_run(config, run_dir, world, device))
        except ValueError as error:  # of prompts, reward, sizes, memory, checkpoint
            print(f"pretrain_rl (rank {world.rank}): {error}", file=sys.stderr)
            return 2
        except UnhealthyTrainingError as error:
            return _stop_unhealthy(error, world.rank)
        run.trainer.history.add_memory_plan(ledger.peak_bytes)
        try:
            run.trainer.train()
        except UnhealthyTrainingError as error:
            return _stop_unhealthy(error, world.rank)
        finish_run(run, config, run_dir)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
