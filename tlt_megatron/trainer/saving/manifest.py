"""manifest.json of a checkpoint: size and SHA-256 of every file, and its order of writing.

The hashes detect files damaged by a disk or a copy. They do not protect against a person with write
access to the folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tlt_megatron.config.load import check_record
from tlt_megatron.config.ranges import Count, Section
from tlt_megatron.runtime.durable import replace_text
from tlt_megatron.saved_files import one_line, open_regular, parse_object, read_text

MANIFEST = "manifest.json"
POINTER = "latest_checkpointed_iteration.txt"
_POINTER_BYTES = 64
_FOLDER_NAME = re.compile(r"iter_([0-9]{7,18})(\.tmp)?")
_FILE_OF_RANK = re.compile(
    r"(?:policy/__|critic/__|drafter_data/rank_|engine_|carried_)0*(\d+)[._]"
)


def engine_file(checkpoint: Path, rank: int) -> Path:
    """Return the file with the state of a rank's engine: its selector and its token counts."""
    return checkpoint / f"engine_{rank:05d}.json"


def engine_files(checkpoint: Path) -> list[Path]:
    """Return the files of all ranks, in order; [] for a checkpoint of an older version."""
    return sorted(checkpoint.glob("engine_*.json"))


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord(Section):
    """Expected size and hash of a file."""

    num_bytes: Count
    sha256: str  # hexadecimal


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(Section):
    """Content of a checkpoint folder."""

    step: Count
    order: Count  # number in the order of writing, from 1: the highest is the newest checkpoint
    files: dict[str, FileRecord]  # by path relative to the folder, with /


def hash_file(path: Path) -> FileRecord:
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileRecord(num_bytes=os.fstat(file.fileno()).st_size, sha256=digest)


def list_files(folder: Path) -> list[str]:
    """Return the relative paths of all files in `folder` except the manifest."""
    names = (p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    return sorted(name for name in names if name != MANIFEST)


def writer_of(name: str, num_ranks: int) -> int:
    """Return the rank that wrote the file; rank 0 writes those without a rank."""
    match = _FILE_OF_RANK.match(name)
    rank = int(match[1]) if match else 0
    return rank if rank < num_ranks else 0


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write manifest.json with a hash of its own content, and fsync it."""
    content = dataclasses.asdict(manifest)
    content["sha256"] = _hash_content(content)
    replace_text(folder / MANIFEST, json.dumps(content, indent=1))


def read_manifest(folder: Path) -> Manifest:
    """Read manifest.json. ValueError names it if it is missing or damaged."""
    path = folder / MANIFEST
    try:
        content = parse_object(path, read_text(path))
        written = content.pop("sha256", None)
        is_whole = written == _hash_content(content)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not is_whole:
        raise ValueError(f"{path} is damaged: its own checksum is wrong")
    manifest = check_record(Manifest, content, path)
    number = folder_number(folder)
    if number not in (None, manifest.step):
        raise ValueError(f"{path} is damaged: step={manifest.step} must be that of the folder")
    for name in manifest.files:
        if name.startswith("/") or ".." in name.split("/") or not name.isprintable():
            raise ValueError(f"{path} names {one_line(repr(name))}: must be in its folder")
    return manifest


def folder_number(folder: Path) -> int | None:
    """Return the step in the name of a checkpoint's folder; None for another name."""
    match = _FOLDER_NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def problem_of(path: Path, record: FileRecord) -> str | None:
    """Return how the file differs from its record; None if it is intact."""
    try:
        if not path.is_file():  # a pipe would block
            return f"{path} is missing or not a regular file"
        size = path.stat().st_size
        if size != record.num_bytes:
            return f"{path} has {size} bytes, {record.num_bytes} were written"
        if hash_file(path) != record:
            return f"{path} is damaged: its SHA-256 is not the one that was written"
    except OSError as error:
        return f"{path} cannot be read: {error}"
    return None


def list_checkpoints(root: Path) -> tuple[list[tuple[Path, Manifest]], list[str]]:
    """Return the checkpoints with a good manifest, the newest first, and all problems found.

    An unfinished write (`.tmp` without manifest) does not count as a checkpoint.
    """
    found: list[tuple[Path, Manifest]] = []
    problems: list[str] = []
    for folder in checkpoint_folders(root):
        try:
            found.append((folder, read_manifest(folder)))
        except ValueError as error:
            if folder.suffix != ".tmp":
                problems.append(str(error))
    found.sort(key=lambda entry: -entry[1].order)
    problems += _check_pointer(root, found[0][1].step if found else None)
    return found, problems


def checkpoint_folders(root: Path) -> list[Path]:
    """Return the folders iter_0000001, iter_0000002.tmp, ... under `root`, by name."""
    if not root.is_dir():
        return []
    return sorted(p for p in root.iterdir() if _FOLDER_NAME.fullmatch(p.name) and p.is_dir())


def is_checkpoint_root(path: Path) -> bool:
    """Return whether `path` holds checkpoints, even broken ones, or is a checkpoint itself."""
    folders = [folder for folder in checkpoint_folders(path) if folder.suffix != ".tmp"]
    return bool(folders) or (path / POINTER).exists() or is_checkpoint(path)


def is_checkpoint(path: Path) -> bool:
    """Return whether `path` is one checkpoint, not a folder of checkpoints."""
    return _FOLDER_NAME.fullmatch(path.name) is not None and path.is_dir()


def read_pointer(root: Path) -> int | None:
    """Return the step in the pointer file, or None without it. ValueError for another content."""
    pointer = root / POINTER
    try:
        text = read_text(pointer, _POINTER_BYTES).strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{pointer} cannot be read: {error}") from error
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{pointer} holds {text[:40]!r}: must be a step number")
    return int(text)


def points_to(root: Path, step: int) -> bool:
    """Return whether the pointer file names `step`."""
    try:
        return read_pointer(root) == step
    except ValueError:
        return False


def _check_pointer(root: Path, newest_step: int | None) -> list[str]:
    try:
        step = read_pointer(root)
    except ValueError as error:
        return [str(error)]
    if step == newest_step:
        return []
    if step is None:
        return [f"{root / POINTER} is missing"]
    written = "none is there" if newest_step is None else f"step {newest_step} was written last"
    return [f"{root / POINTER} names step {step}, {written}"]


def _hash_content(content: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
