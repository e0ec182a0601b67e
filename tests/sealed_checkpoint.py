"""Turns a folder of files into a checkpoint of a run, as anybody who may write to it can."""

from __future__ import annotations

from pathlib import Path

from tlt_megatron.trainer.saving.manifest import Manifest, hash_file, list_files, write_manifest


def seal(folder: Path, *, step: int) -> None:
    """Write the manifest that a run writes for the checkpoint of `step`, its `step`-th one."""
    files = {name: hash_file(folder / name) for name in list_files(folder)}
    write_manifest(folder, Manifest(step=step, order=step, files=files))
