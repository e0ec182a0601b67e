"""Settings that name a model or a data set of the Hugging Face Hub instead of a folder or file of
this machine.

`Qwen/Qwen3-0.6B` is a model, `Qwen/Qwen3-0.6B@REVISION` one at a branch, tag or commit.
`openai/gsm8k:train` is a split of a data set, `openai/gsm8k/main@REVISION:train` one of a named
configuration, and `FOLDER:train` one of a folder. What exists on this machine is never asked for.
The launcher fetches once per node before it starts ranks; `HF_HOME`, `HF_TOKEN`, `HF_ENDPOINT` and
`HF_HUB_OFFLINE` have their usual meaning.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

from tlt_megatron.config.load import load_config
from tlt_megatron.config.schema import RunConfig
from tlt_megatron.saved_files import first_twin, one_line, parse_json

_ROWS = [".csv", ".tsv", ".jsonl", ".parquet"]  # .json may be about another file
_NAME = r"[\w-][\w.-]*"
_MODEL = re.compile(rf"(?P<repo>{_NAME}/{_NAME})(?:@(?P<revision>[\w./-]+))?")
_DATA = re.compile(
    rf"(?P<repo>{_NAME}/{_NAME})(?:/(?P<config>{_NAME}))?(?:@(?P<revision>[\w./-]+))?:(?P<split>[\w\[\]:%+-]+)"
)
CONFIG = ("config.json",)
TOKENIZER = ("*.json", "*.model", "*.txt", "*.jinja")
WHOLE = (*TOKENIZER, "*.safetensors")
_SHA256 = re.compile("[0-9a-f]{64}")
# Where this project's commands and examples put models: a name that begins so is a path, and is not
# sent to the Hub.
_LOCAL = ("build/", "models/", "runs/")
_MADE_BY = {
    "build/tiny_policy": "make quickstart-policy",
    "build/quickstart_policy": "make quickstart-policy",
    "build/tiny_drafter": "make drafter",
    "build/smollm2": "make small-llm",
}
# Other formats of the same weights: all folders but additional_chat_templates.
_LEFT_OUT = ("[!a]*/*", "a[!d]*/*", "consolidated*")


def fetch_model(key: str, name: str, patterns: tuple[str, ...] = WHOLE) -> Path:
    """Return the folder of a model: `name` itself if it is no id of the Hub, else what the Hub has
    under it.

    `patterns` limits the files that are fetched. ValueError names the setting `key` if the Hub
    cannot be reached or has no such model, or if the name is a path of this project that is absent.
    """
    match = _MODEL.fullmatch(name)
    if match is None or Path(name).exists():
        return Path(name)
    if name.startswith(_LOCAL):
        made = _MADE_BY.get(name)
        advice = f": {made} makes it" if made else " (an id of the Hub is owner/name)"
        raise ValueError(f"{key}={name!r}: is no folder of this machine{advice}")
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            match["repo"],
            revision=match["revision"],
            allow_patterns=list(patterns),
            ignore_patterns=list(_LEFT_OUT),
        )
    except _hub_errors() as error:
        raise _unreachable(key, name, "folder", f"hf download {match['repo']}", error) from error
    _check_files(f"{key}={name!r}", sorted(Path(folder).glob("*.safetensors")))
    return Path(folder)


def _hub_errors() -> tuple[type[Exception], ...]:
    """Return what the Hub's library raises: HTTPError of a connection that breaks off, RuntimeError
    of its storage.
    """
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]

    found = (OSError, ValueError, RuntimeError, HTTPError)
    if "datasets" not in sys.modules:
        return found
    from datasets.exceptions import DatasetsError

    return (*found, DatasetsError)


def _check_files(setting: str, links: Iterable[Path]) -> None:
    """Raise ValueError for a file whose SHA-256 is not the one that the Hub states, and delete it
    from the cache.

    The cache names a file of weights or of much data by that SHA-256. A file is read once: a mark
    says that it was.
    """
    from huggingface_hub.constants import HF_HOME

    marks = Path(HF_HOME) / "tlt_megatron" / "checked"
    for link in links:
        file = link.resolve()
        stated, about = file.name, file.stat()
        if not _SHA256.fullmatch(stated):  # a file system without links: the cache has no names
            continue
        mark, written = marks / stated, f"{about.st_size} {about.st_mtime_ns}"
        if mark.is_file() and mark.read_text() == written:
            continue
        with file.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found != stated:
            end = "it was deleted from the cache. Start again to fetch it anew"
            try:
                link.unlink()
                file.unlink()
            except OSError as error:
                end = f"delete {file}, which this process cannot: {error.strerror}"
            raise ValueError(
                f"{setting}: {link.name} has the SHA-256 {found}, the Hugging Face Hub states {stated}: {end}"
            )
        with suppress(OSError):  # of a cache that cannot be written: the next start reads it again
            marks.mkdir(parents=True, exist_ok=True)
            mark.write_text(written)


def check_push(name: str) -> None:
    """Raise ValueError if `name` can be no model of the Hub."""
    match = _MODEL.fullmatch(name)
    if match is None or match["revision"]:
        raise ValueError(f"--push-to-hub {name}: must be an id of the Hub, as in my-name/my-model")


def push_folder(folder: Path, name: str) -> str:
    """Upload a folder as the model `name` and return the address of the commit. A repository that
    is not there is made, private.

    ValueError if the Hub refuses or cannot be reached.
    """
    from huggingface_hub import HfApi

    try:
        HfApi().create_repo(name, private=True, exist_ok=True)
        return HfApi().upload_folder(repo_id=name, folder_path=folder).commit_url
    except _hub_errors() as error:
        reason = one_line(error, 300)
        raise ValueError(
            f"--push-to-hub {name}: {folder} is written, but not uploaded: {reason}. Log in by `hf auth login`,"
            f" then: {shlex.join(['hf', 'upload', name, str(folder)])}"
        ) from error


def name_version(name: str, folder: Path) -> str:
    """Return the name of exactly what `fetch_model` found: an id with its commit, or an absolute
    path.
    """
    match = _MODEL.fullmatch(name)
    if match is None or Path(name).exists():
        return str(folder.resolve())
    return f"{match['repo']}@{folder.name}"


def fetch_data(key: str, name: str) -> Path:
    """Return the file of a data set: `name` itself if it is no id of the Hub and no split of a
    folder, else the split as a .jsonl file if its files are JSON or CSV, as a .parquet file if not.

    The file is written once for each version of the data, into the cache of `datasets`. ValueError
    as in `fetch_model`.
    """
    folder, _, split = name.partition(":")
    match = _DATA.fullmatch(name)
    if Path(name).exists() or not (match or Path(folder).is_dir()):
        return Path(name)
    if find_spec("datasets") is None:
        raise ValueError(
            f"{key}={name!r}: the package datasets is not installed: pip install datasets"
        )
    source = (folder, None, None)
    if match is not None and not Path(folder).is_dir():
        source, split = (match["repo"], match["config"], match["revision"]), match["split"]
    # The stem names the data in metrics, as that of a user's own file does.
    stem = re.sub(r"[^\w.-]+", "_", f"{Path(source[0]).name}-{split}")
    try:
        return _write_split(f"{key}={name!r}", source, split, stem)
    except _hub_errors() as error:
        if Path(folder).is_dir():
            raise ValueError(f"{key}={name!r}: {one_line(error, 300)}") from error
        command = f"hf download --repo-type dataset {source[0]}"
        raise _unreachable(key, name, ".jsonl or .parquet file", command, error) from error


def _write_split(
    setting: str, source: tuple[str, str | None, str | None], split: str, stem: str
) -> Path:
    """Write a split of a data set, named by repository or folder, configuration and revision.

    JSON and CSV are copied as text: `datasets` would turn dates into times, cut numbers to ten
    digits, and read text of columns of several types as JSON, and text of CSV as numbers.
    """
    import datasets
    from datasets.config import HF_DATASETS_CACHE, HF_HUB_OFFLINE
    from huggingface_hub import snapshot_download

    repo, config, revision = source
    if HF_HUB_OFFLINE and not Path(repo).is_dir():  # files that a run with a network has fetched
        repo = snapshot_download(repo, repo_type="dataset", revision=revision)
    builder = datasets.load_dataset_builder(repo, config, revision=revision)
    kept = Path(HF_DATASETS_CACHE) / "tlt_megatron"
    files = {str(name): each for name, each in (builder.config.data_files or {}).items()}
    spec = "+".join(files) if split == "all" else split
    names = [part.partition("[")[0] for part in spec.split("+")]
    manager = datasets.DownloadManager(base_path=builder.base_path)
    found = {name: manager.download(list(files[name])) for name in names if name in files}
    _check_files(setting, map(Path, chain(*found.values())))
    if Path(repo).is_dir() and not Path(repo, "README.md").is_file():  # which may name its files
        _check_kinds(repo, found)
    is_json = builder.name == "json" and not getattr(builder.config, "field", None)
    if (is_json or builder.name == "csv") and len(found) == len(set(names)):
        lines = {
            name: [
                line
                for file in manager.iter_files(manager.extract(each))
                for line in (_json_lines(file) if is_json else _csv_lines(file, builder.config))
            ]
            for name, each in found.items()
        }
        counts = {name: len(each) for name, each in lines.items()}
        parts = datasets.ReadInstruction.from_spec(spec).to_absolute(counts)
        content = b"\n".join(
            line for part in parts for line in lines[part.splitname][part.from_ : part.to]
        )
        file = kept / hashlib.sha256(content).hexdigest()[:16] / f"{stem}.jsonl"
        return _write_once(file, lambda part: part.write_bytes(content))
    rows = datasets.load_dataset(repo, config, split=split, revision=revision)
    assert isinstance(rows, datasets.Dataset)
    return _write_once(kept / rows._fingerprint / f"{stem}.parquet", rows.to_parquet)


def _check_kinds(folder: str, found: Mapping[str, Iterable[str]]) -> None:
    """Raise ValueError if a split has files of two kinds: `datasets` reads one kind."""
    from datasets.data_files import DataFilesDict, get_data_patterns

    whole = DataFilesDict.from_patterns(
        get_data_patterns(folder), base_path=folder, allowed_extensions=_ROWS
    )
    for split, files in found.items():
        if left := sorted({*whole[split]}.difference(files)):
            names = ", ".join(Path(file).name for file in left[:3])
            raise ValueError(f"the split {split} has files of another kind too, such as {names}")


def _json_lines(file: str) -> list[bytes]:
    """Return a line per row of a file of JSON: of lines, or of one list."""
    content = Path(file).read_bytes().removeprefix(codecs.BOM_UTF8)
    if content.lstrip().startswith(b"["):
        return [json.dumps(row).encode() for row in parse_json(content)]
    return [line for line in content.splitlines() if line.strip()]


def _csv_lines(file: str, config: Any) -> list[bytes]:
    """Return a row of CSV as a line of JSON: each cell is text as it stands, an empty one is not
    there. `config` has the options of the data set.
    """
    import pandas

    as_text = {"dtype": str, "keep_default_na": False, "na_filter": False, "chunksize": None}
    options = config.pd_read_csv_kwargs | as_text
    table = pandas.read_csv(file, **options)
    if options.get("index_col") is None and not isinstance(table.index, pandas.RangeIndex):
        raise ValueError(f"{file}: its rows have more cells than its header names columns")
    if options.get("header") == "infer" and options.get("names") is None:
        own = {"header": None, "nrows": 1}
        names = pandas.read_csv(file, **options | own).iloc[0].tolist()
        if twin := first_twin([name for name in names if name]):
            raise ValueError(f"{file}: the column {twin!r} stands twice")
    rows = table.to_dict("records")
    return [json.dumps({key: cell for key, cell in row.items() if cell}).encode() for row in rows]


def _write_once(file: Path, write: Callable[[Path], object]) -> Path:
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}.part")
        write(part)
        part.replace(file)
    return file


def load_fetched_config(
    files: str | Path | Sequence[str | Path] | None,
    overrides: Sequence[str],
    patterns: tuple[str, ...] = WHOLE,
) -> tuple[RunConfig, list[str]]:
    """Return `load_config` with folders and files in place of ids of the Hub, and the overrides
    that put them there.

    Data sets are fetched only with the whole model.
    """
    config = load_config(files, overrides)
    fetched = [
        f"{key}={json.dumps(found)}"
        for key, found in _found(config, patterns).items()
        if found != attrgetter(key)(config)
    ]
    return (load_config(files, [*overrides, *fetched]) if fetched else config), fetched


def _found(config: RunConfig, patterns: tuple[str, ...]) -> dict[str, str | list[str]]:
    """Return the settings that may name something of the Hub, with what this machine has of it."""
    names = {"model.path": config.model.path}
    if config.has_critic:
        names["critic.path"] = config.critic.path
    if config.has_reference:
        names["reference.path"] = config.reference.path
    if config.speculation.enabled:
        names["speculation.drafter"] = config.speculation.drafter
    models = {key: str(fetch_model(key, name, patterns)) for key, name in names.items() if name}
    if patterns != WHOLE:
        return {**models}
    data = config.data
    train = str(fetch_data("data.train", data.train)) if data.train else ""
    files = [str(fetch_data("data.eval", name)) for name in data.eval_files.values()]
    held_out = files if isinstance(data.eval, list) else "".join(files)  # a text is one file or ""
    return {**models, "data.train": train, "data.eval": held_out}


def _unreachable(key: str, name: str, kind: str, command: str, error: Exception) -> ValueError:
    reason = one_line(error, 300) or type(error).__name__
    local = command.rpartition("/")[2]
    advice = f"on a machine with a network: {command} --local-dir {local}, then copy {local} here and set {key} to it"
    if Path(name).parent.is_dir():  # so it is a path, most likely
        advice = f"the folder {Path(name).parent} is here, and has no {Path(name).name}"
    return ValueError(
        f"{key}={name!r}: is no {kind} of this machine, and the Hugging Face Hub does not give it: {reason} ({advice})"
    )
