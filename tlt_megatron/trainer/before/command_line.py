"""The arguments of launch/pretrain_rl.py, and what can be refused before a rank is started or torch
is imported.

The launcher reads them before it starts ranks, so that a mistake is reported at once; each rank
reads them again.
"""

from __future__ import annotations

import argparse
import os
import resource

from tlt_megatron.config.hub import load_fetched_config
from tlt_megatron.config.load import load_config
from tlt_megatron.config.preflight import check_code, check_files
from tlt_megatron.config.schema import RunConfig

_LEAST_BYTES = 2 << 30  # address space: torch and its threads fail with 1.5 GB


def read_command(arguments: list[str] | None) -> tuple[RunConfig, argparse.Namespace]:
    """Return the settings and the options: `config`, `print_config`, and the settings `fetched`
    that replace ids of the Hub.

    Reads no weights. ValueError for settings or files that no number of ranks can use; with
    `--print-config` files are not checked.
    """
    options = _parse(arguments)
    _check_process()
    overrides = list(options.overrides)
    if options.resume is not None:
        overrides.append(f"checkpoint.resume={options.resume}")
    config = load_config(options.config, overrides)
    if options.print_config:
        return config, options
    if config.checkpoint.resume == "auto" and not config.run.dir:
        raise ValueError("run.dir='': must name the run folder where checkpoint.resume='auto'")
    check_code(config)
    config, options.fetched = load_fetched_config(options.config, overrides)
    check_files(config)
    return config, options


def _check_process() -> None:
    """Raise ValueError if nothing can be printed, or torch cannot be loaded."""
    try:
        os.write(1, b"")  # a full device refuses this too
    except OSError as error:
        raise ValueError(f"standard output: {error.strerror}") from None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < _LEAST_BYTES:
        raise ValueError(
            f"ulimit -v {limit >> 10}: must be at least {_LEAST_BYTES >> 10} KiB or unlimited"
        )


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="pretrain_rl.py", description="Train a policy by RL.")
    parser.add_argument(
        "--config",
        action="append",
        help="YAML file; without it the defaults of config/schema.py. May be given several times: a later file goes over an"
        " earlier one, as over one of examples/recipes",
    )
    parser.add_argument(
        "--resume", help="auto | never | folder of checkpoints (sets checkpoint.resume)"
    )
    parser.add_argument("--print-config", action="store_true", help="print every setting and end")
    parser.add_argument(
        "--dry-run", action="store_true", help="let launch/torchrun.py check all nodes and end"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="settings over the file's"
    )
    return parser.parse_intermixed_args(arguments)
