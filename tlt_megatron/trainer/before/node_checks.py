"""What one node of a job can tell before a run: its input files, versions, layout, memory and disk.

`dry_run.py` calls `examine_node` on every node and compares what they found.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from tlt_megatron.config.extensions import MCP, REGISTRY, load_code, named_code
from tlt_megatron.config.layout import check_layout
from tlt_megatron.config.load import dump_config
from tlt_megatron.config.own_layer import OWN
from tlt_megatron.config.ranges import Section
from tlt_megatron.config.schema import RunConfig
from tlt_megatron.doctor import examine
from tlt_megatron.runtime.device import select_device
from tlt_megatron.runtime.process_groups import SINGLE
from tlt_megatron.trainer.before.command_line import read_command
from tlt_megatron.trainer.before.memory_ledger import check_memory, checkpoint_bytes, make_ledger
from tlt_megatron.trainer.saving.manifest import checkpoint_folders
from tlt_megatron.trainer.saving.run_folder import CHECKPOINTS, check_run_folder
from tlt_megatron.version import __version__

_HEAD_BYTES = 64 << 10  # read of each input file: a header of safetensors, a whole reward function
Found = tuple[str, dict[str, float]]  # what must be equal on all nodes, and amounts by unit
_PACKAGE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check(Section):
    """One check of one node: what it found, or why a run would end there.

    Example: `Check(name="checkpoints", found="2 kept", amounts={"GB free": 812.5})`.
    """

    name: str
    found: str = ""  # must be the same on all nodes
    problem: str = ""
    amounts: dict[str, float] = field(default_factory=dict)  # by unit; may differ


def read_settings(arguments: list[str]) -> tuple[Check, RunConfig | None]:
    """Read what launch/pretrain_rl.py is given; None if it would refuse that on this node."""
    try:
        config, options = read_command(arguments)
    except ValueError as error:
        return Check(name="settings, files", problem=str(error)), None
    digest = _digest(dump_config(config).encode())
    names = ", ".join(options.config or ["defaults"])
    return Check(name="settings, files", found=f"{names}, all settings {digest}"), config


def run_path(config: RunConfig) -> Path:
    """Return the run folder, or the folder in which a run without `run.dir` makes its own."""
    return Path(config.run.dir or "runs")


def nearest_folder(path: Path) -> Path:
    """Return `path` or the closest folder above it that exists. ValueError if that is a file."""
    found = next(each for each in (path, *path.parents, Path()) if each.exists())
    if not found.is_dir():
        raise ValueError(f"run.dir={str(path)!r}: {found} is a file: must be a folder")
    return found


def examine_node(
    config: RunConfig | None, *, node: int, num_nodes: int, num_ranks: int, shared: str
) -> Iterator[Check]:
    """Check this node, which is to start `num_ranks` ranks. Without a config: its versions alone.

    `shared` names a file that node 0 has made beside the run folder.
    """
    world_size = num_nodes * num_ranks
    if config is not None:
        yield from _examine_inputs(config)
        layout = _look("layout", _layout, config, world_size)
        yield layout
        if not layout.problem:
            yield _look("memory", _memory, config, world_size, num_ranks)
            yield _look("checkpoints", _checkpoints, config, world_size)
        yield _look("run.dir", _run_dir, config, shared, node == 0)
    code = _digest(*(file.read_bytes() for file in sorted(_PACKAGE.rglob("*.py"))))
    yield Check(name="tlt_megatron", found=f"{__version__}, code {code}")
    for finding in examine():
        is_engine = finding.name.lower() == (config.rollout.engine if config else "")
        problem = finding.advice if finding.is_needed or is_engine else ""
        if finding.name != "free memory":
            yield Check(name=finding.name, found=finding.found, problem=problem)


def _examine_inputs(config: RunConfig) -> Iterator[Check]:
    """Read the beginning of every input file, and load the code that settings name."""
    speculation, drafter = config.speculation, config.speculation.drafter
    paths = {
        "model.path": [config.model.path],
        "critic.path": [config.critic.path] if config.has_critic else [],
        "reference.path": [config.reference.path] if config.has_reference else [],
        "speculation.drafter": [drafter] if speculation.enabled and drafter != OWN else [],
        "data.train": [config.data.train],
        "data.eval": [*config.data.eval_files.values()],
    }
    for key, given in paths.items():
        if any(given):
            yield _look(key, _describe, [Path(each) for each in given if each])
    for key, point in REGISTRY.items():
        specs = [spec for name, spec in named_code(config) if name == key]
        own = [s for s in specs if s not in point.built_in and not s.startswith(MCP)]
        if own:
            yield _look(key, _load, config, key, own)


def _look(name: str, look: Callable[..., Found], *arguments: object) -> Check:
    try:
        found, amounts = look(*arguments)
    except (OSError, ValueError) as error:
        return Check(name=name, problem=str(error))
    return Check(name=name, found=found, amounts=amounts)


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:8]


def _load(config: RunConfig, key: str, specs: list[str]) -> Found:
    """Load a user's code, which may need a package that this node lacks."""
    for spec in specs:
        load_code(config, key, spec)
    files = [Path(spec.rpartition(":")[0]) for spec in specs]
    found, _ = _describe([file for file in files if file.is_file()])
    return f"{', '.join(specs)}, {found}", {}


def _describe(paths: list[Path]) -> Found:
    """Return number, size and a digest of files and of those in folders: of their names, sizes
    and first 64 KiB.
    """
    files: list[Path] = []
    for path in paths:
        inside = sorted(path.iterdir()) if path.is_dir() else [path]
        files += [each for each in inside if each.is_file() and not each.name.startswith(".")]
    parts: list[bytes] = []
    for each in files:
        with each.open("rb") as file:
            parts += [each.name.encode(), str(each.stat().st_size).encode(), file.read(_HEAD_BYTES)]
    size = sum(each.stat().st_size for each in files) / 1e6
    return f"{len(files)} file{'s' * (len(files) != 1)}, {size:,.1f} MB, {_digest(*parts)}", {}


def _layout(config: RunConfig, world_size: int) -> Found:
    check_layout(config, world_size)
    parallel = config.parallel
    tp, cp, pp = parallel.tensor, parallel.context, parallel.pipeline
    data = world_size // (tp * cp * pp)
    return f"TP {tp} x CP {cp} x PP {pp} x DP {data}, EP {parallel.expert}", {}


def _memory(config: RunConfig, world_size: int, num_ranks: int) -> Found:
    """Compare the ledger with the GPU that has the least free memory, or with the host."""
    device = select_device(config.run.device)
    devices = [device]
    if device.is_cuda:
        cards = range(num_ranks)
        devices = [replace(device, torch_device=torch.device("cuda", card)) for card in cards]
    ledger = make_ledger(config, world_size, device)
    free_bytes = min(each.free_bytes() for each in devices) + device.process_bytes()
    check_memory(ledger, free_bytes, device.host_free_bytes(), SINGLE)
    amounts = {"GiB of a rank planned": ledger.peak_bytes / 2**30, "GiB free": free_bytes / 2**30}
    return f"{device.torch_device.type}, most in the {ledger.peak_phase} phase", amounts


def _run_dir(config: RunConfig, shared: str, is_first: bool) -> Found:
    path = run_path(config)
    if is_first and config.run.dir:
        check_run_folder(path, resume=config.checkpoint.resume)
    folder = nearest_folder(path)
    if not os.access(folder, os.W_OK):
        raise ValueError(f"run.dir={config.run.dir!r}: {folder.absolute()} cannot be written")
    if shared and not Path(shared).exists():
        raise ValueError(
            f"run.dir={config.run.dir!r}: {folder.absolute()} lacks a file that node 0 has written:"
            " must be on a file system that all nodes share"
        )
    return str(path), {"GB free": shutil.disk_usage(folder).free / 1e9}


def _checkpoints(config: RunConfig, world_size: int) -> Found:
    """Compare the free disk with the checkpoints that are still to come.

    A new one is complete before the oldest is removed.
    """
    root, section = run_path(config) / CHECKPOINTS, config.checkpoint
    size, _ = checkpoint_bytes(config, world_size)
    most = section.keep + 1 if section.keep and section.interval else 1
    needed = size * max(1, most - len(checkpoint_folders(root)))
    folder = nearest_folder(root)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ValueError(
            f"{folder.absolute()} has {free / 1e9:,.1f} GB free: must be {needed / 1e9:,.1f} GB with"
            f" checkpoint.keep={section.keep}, a checkpoint has {size / 1e9:,.1f} GB"
        )
    return f"a checkpoint has {size / 1e9:,.1f} GB", {"GB free": free / 1e9}
