"""Finds what a run has saved: policy and drafter as Hugging Face folders, and the parts of its
checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tlt_megatron.config.load import read_sections
from tlt_megatron.config.own_layer import OWN
from tlt_megatron.runtime.typed_command import tlt_command


def run_of(path: Path) -> Path | None:
    """Return the run folder that is `path` or holds it; None: there is none."""
    folders = (path, *path.resolve().parents)
    return next((folder for folder in folders if (folder / "config.yaml").is_file()), None)


def model_and_drafter(source: str) -> tuple[str, str | None]:
    """Return the policy of a finished run, and its drafter if it has one. Any other name is that of
    a model.
    """
    run = Path(source)
    if not (run / "config.yaml").is_file():
        return source, None
    if not (run / "hf").is_dir():
        convert = tlt_command("convert", "--from", source, "--to", run / "hf")
        raise ValueError(f"{source}: has no hf/; {convert} makes a model of its checkpoint")
    drafter = run / "hf_drafter"
    if drafter.is_dir():
        return str(run / "hf"), str(drafter)
    section = read_sections(run / "config.yaml").get("speculation")
    is_own = isinstance(section, dict) and section.get("drafter") == OWN
    return str(run / "hf"), OWN if is_own else None


def find_saved(path: Path, part: str, files: Sequence[str], wanted: str) -> Path:
    """Return the folder with `files` in `path`: itself, or `part` of a run, or of the checkpoint
    that a resume takes.

    ValueError for a checkpoint with a broken file, and for a path that is not what is `wanted`.
    """
    from tlt_megatron.runtime.process_groups import SINGLE
    from tlt_megatron.trainer.saving.manifest import is_checkpoint, is_checkpoint_root
    from tlt_megatron.trainer.saving.run_checkpoint import find_intact

    for root in (path, path / "checkpoints"):
        if is_checkpoint_root(root):
            path = find_intact(root, SINGLE) or path
    if is_checkpoint(path.absolute().parent):
        find_intact(path.absolute().parent, SINGLE)
    for folder in (path, path / part):
        if all((folder / name).is_file() for name in files):
            return folder
    raise ValueError(f"--from {path}: must be {wanted}")
