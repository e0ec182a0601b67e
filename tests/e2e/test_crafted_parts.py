"""Parts of a checkpoint and of a run folder that somebody else may have written: whatever they
hold, a resume, a conversion and an export end in one line, and a pipe does not block them.

Each door gets the same seeded changes of every part: another type, no value, a cut, 10,000 levels.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

from tests.sealed_checkpoint import seal
from tests.tiny_task import TLT, run, run_forked
from tlt_megatron import cli
from tlt_megatron.trainer.saving.manifest import MANIFEST, POINTER

pytestmark = pytest.mark.e2e

SETTINGS = (
    *TLT,
    *("rollout.partial_rollout_tokens=6", "rollout.over_sampling_prompts=6", "algorithm.tis_cap=2"),
    *("rollout.num_prompts=3", "rollout.num_samples=2"),
    *("logging.trackers=[]", "logging.progress=none", "data.eval=", "checkpoint.export_hf=false"),
    *("checkpoint.interval=1", "checkpoint.keep=0"),
)
NEWEST = Path("checkpoints", "iter_0000002")
WRONG = (
    *(
        "null",
        "true",
        "-1",
        "0.5",
        "1e999",
        "NaN",
        '"x"',
        '"\\ud800\\u001b[2J"',
        "[]",
        "{}",
        "[[]]",
    ),
    *("1" + "0" * 400, "[" * 10_000 + "]" * 10_000, '{"a":' * 10_000 + "1" + "}" * 10_000),
)
MARK = "the value is replaced"


def mutate(rng: random.Random, text: str) -> str:
    """Return the JSON with a value that is of another kind or absent, or cut off."""
    value = json.loads(text)
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, item in list(items)[:12]:
            places.append((node, key))
            if isinstance(item, dict | list):
                walk(item)

    walk(value)
    node, key = rng.choice(places)
    how = rng.choice(["replace"] * 6 + ["drop", "cut"])
    if how == "cut":
        return text[: rng.randrange(len(text))]
    if how == "drop":
        del node[key]
        return json.dumps(value)
    node[key] = MARK
    return json.dumps(value).replace(json.dumps(MARK), rng.choice(WRONG))


def mutate_part(rng: random.Random, folder: Path, name: str) -> None:
    """Change a JSON part of a checkpoint and seal the checkpoint again."""
    file = folder / name
    text = file.read_text()
    if name == MANIFEST:
        content = json.loads(text)
        del content["sha256"]
        text = mutate(rng, json.dumps(content))
        try:
            content = json.loads(text)
            content["sha256"] = hashlib.sha256(
                json.dumps(content, sort_keys=True).encode()
            ).hexdigest()
            text = json.dumps(content)
        except (ValueError, TypeError, RecursionError):
            pass
        file.write_text(text)
        return
    file.write_text(mutate(rng, text))
    seal(folder, step=2)


@pytest.fixture(scope="module")
def trained(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps with speculation, spot training and partial rollouts, saved after each."""
    run_dir = tmp_path_factory.mktemp("runs") / "trained"
    run(1, config, run_dir, *SETTINGS, "run.num_steps=2")
    for name in ("carried_00000.pt", "engine_00000.json", "drafter/training/record.json"):
        assert (run_dir / NEWEST / name).is_file(), name
    return run_dir


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


def tool(capsys: pytest.CaptureFixture[str], *words: object) -> None:
    """Run a command, which may end well, or with 2 and one line."""
    capsys.readouterr()
    code = cli.main([str(word) for word in words])
    said = capsys.readouterr().err.splitlines()
    assert code in (0, 2)
    assert code == 0 or (len(said[-1]) < 2_000 and said[-1].startswith(f"tlt {words[0]}: ")), said
    assert all(line.isprintable() for line in said), said


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("convert", (MANIFEST, "trainer_state.json")),
        ("export-drafter", (MANIFEST, "drafter/config.json", "engine_00000.json")),
    ],
)
def test_a_tool_ends_in_one_line(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, names: tuple
) -> None:
    more = ["--format", "sglang"] if command == "export-drafter" else []
    for seed in range(4 * len(names)):
        rng, run_dir = random.Random(f"{command} {seed}"), tmp_path / f"run {seed}"
        shutil.copytree(trained, run_dir)
        shutil.rmtree(run_dir / "checkpoints" / "iter_0000001")
        mutate_part(rng, run_dir / NEWEST, names[seed % len(names)])
        tool(capsys, command, "--from", run_dir, "--to", tmp_path / f"to {seed}", *more)


def resume(config: Path, run_dir: Path, num_ranks: int = 1) -> str:
    """Resume for a step. Return what it says; it may end well, or all ranks with 2 and one line."""
    words = ("--resume", "auto", *SETTINGS, "run.num_steps=3")
    ends = run_forked(num_ranks, "--config", config, f"run.dir={run_dir}", *words)
    code, said = ends[0][0], "".join(said for _, said in ends)
    lines = {line for line in said.splitlines() if line.startswith("pretrain_rl: ")}
    assert [each for each, _ in ends] == [code] * num_ranks, said
    assert code in (0, 2), said
    assert "Traceback" not in said
    assert len(lines) == (code == 2), said
    return said


@pytest.mark.parametrize(
    "name", ["trainer_state.json", "engine_00000.json", "drafter/training/record.json"]
)
def test_a_resume_from_mutated_state_ends_in_one_line(
    trained: Path, config: Path, tmp_path: Path, name: str
) -> None:
    for seed in range(2):
        run_dir = shutil.copytree(trained, tmp_path / f"run {seed}")
        shutil.rmtree(run_dir / "checkpoints" / "iter_0000001")
        mutate_part(random.Random(f"{name} {seed}"), run_dir / NEWEST, name)
        resume(config, run_dir)


def _index(change: Callable[[Any], object]) -> Callable[[Path], object]:
    """Return what changes the index of the policy's tensors."""

    def apply(run_dir: Path) -> None:
        file = run_dir / NEWEST / "policy" / ".metadata"
        metadata = pickle.loads(file.read_bytes())
        change(metadata)
        file.write_bytes(pickle.dumps(metadata))

    return apply


def _tensor(metadata: Any) -> TensorStorageMetadata:
    return metadata.state_dict_metadata["decoder.final_layernorm.weight"]


def _huge(metadata: Any) -> None:
    size = torch.Size([1 << 45])
    _tensor(metadata).size = size
    _tensor(metadata).chunks = [ChunkStorageMetadata(offsets=torch.Size([0]), sizes=size)]


def _common(**values: object) -> Callable[[Path], object]:
    return lambda run_dir: torch.save(values, run_dir / NEWEST / "policy" / "common.pt")


def _carried(change: Callable[[Any], object]) -> Callable[[Path], object]:
    def apply(run_dir: Path) -> None:
        file = run_dir / NEWEST / "carried_00000.pt"
        saved = torch.load(file, weights_only=True)
        change(saved)
        torch.save(saved, file)

    return apply


def _pipe(name: str | Path) -> Callable[[Path], object]:
    def apply(run_dir: Path) -> None:
        (run_dir / name).unlink(missing_ok=True)
        os.mkfifo(run_dir / name)

    return apply


def _device(name: str) -> Callable[[Path], object]:
    """Put what /dev/zero is in place of a file."""

    def apply(run_dir: Path) -> None:
        (run_dir / name).unlink(missing_ok=True)
        try:
            os.mknod(run_dir / name, stat.S_IFCHR | 0o600, os.makedev(1, 5))
        except PermissionError:
            pytest.skip("only a privileged user makes devices")

    return apply


def _cut(name: str) -> Callable[[Path], object]:
    return lambda run_dir: os.truncate(run_dir / NEWEST / name, 100)


def _renamed(run_dir: Path) -> None:
    file = run_dir / NEWEST / "drafter" / "model.safetensors"
    tensors = load_file(file)
    tensors["other"] = tensors.pop(min(tensors))
    save_file(tensors, file)


CRAFTED: dict[str, tuple[Callable[[Path], object], str]] = {  # and what a resume says
    "index of numbers": (
        _index(lambda m: m.state_dict_metadata.update({"decoder.final_layernorm.weight": 7})),
        r"policy/\.metadata is not loaded",
    ),
    "negative offset": (
        _index(lambda m: setattr(next(iter(m.storage_data.values())), "offset", -5)),
        r"policy/\.metadata is not loaded: tensor .* lies at",
    ),
    "a tensor larger than its file": (_index(_huge), r"/policy.*final_layernorm"),
    "plain values of text": (_common(identity="float32"), "was written with model.dtype=None"),
    "no optimizer": (_common(identity={"model.dtype": "float32"}), "/policy"),
    "a format of a list": (
        lambda run_dir: (run_dir / NEWEST / "policy" / "metadata.json").write_text("[1]"),
        r"policy/metadata\.json: is not as a run writes it",
    ),
    "rewards of text": (
        _carried(
            lambda saved: saved.update(scores=[(["x"] * 9, [{}] * 9) for _ in saved["scores"]])
        ),
        r"carried_00000\.pt: is not as a run writes it",
    ),
    "tokens of another type": (
        _carried(lambda saved: saved["rollouts"][0][0].update(token_ids=[1, 2])),
        r"carried_00000\.pt: is not as a run writes it",
    ),
    "a drafter of other tensors": (_renamed, "the drafter starts anew: .* misshapen"),
    "a cut drafter": (_cut("drafter/model.safetensors"), "the drafter starts anew: "),
    "cut data of the drafter": (
        _cut("drafter_data/rank_00000.safetensors"),
        "the drafter's data starts anew: ",
    ),
    "a pipe as pointer": (_pipe(Path("checkpoints", POINTER)), "is not a regular file"),
    "a device as metrics": (_device("metrics.jsonl"), "metrics.jsonl is not a regular file"),
    "a device as summary": (_device("summary.json"), "summary.json is not a regular file"),
    "a pipe as timeline": (_pipe("timeline/rank_00000.jsonl"), "is not a regular file"),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_a_resume_says_in_one_line_what_is_wrong(copy: Path, config: Path, name: str) -> None:
    craft, says = CRAFTED[name]
    craft(copy)
    shutil.rmtree(copy / "checkpoints" / "iter_0000001")
    seal(copy / NEWEST, step=2)
    said = resume(config, copy)
    assert re.search(says, said), said


def test_both_ranks_end_when_one_refuses_its_part(config: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run(2, config, run_dir, *SETTINGS, "run.num_steps=2", "rollout.num_prompts=4")
    craft, says = CRAFTED["tokens of another type"]
    craft(run_dir)  # the file that rank 0 reads
    shutil.rmtree(run_dir / "checkpoints" / "iter_0000001")
    seal(run_dir / NEWEST, step=2)
    assert re.search(says, resume(config, run_dir, 2))


@pytest.mark.parametrize("name", list(CRAFTED)[:5])
def test_a_conversion_says_in_one_line_what_is_wrong(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    CRAFTED[name][0](copy)
    shutil.rmtree(copy / "checkpoints" / "iter_0000001")
    seal(copy / NEWEST, step=2)
    tool(capsys, "convert", "--from", copy, "--to", tmp_path / "to")


def test_a_row_that_no_run_writes_does_not_end_the_run(copy: Path, config: Path) -> None:
    rows = ('{"step": 1, "timing_s/step": "x"}', '{"step": 1, "x": 1e999}', "[" * 10_000)
    with (copy / "metrics.jsonl").open("a") as file:
        file.write("\n".join(rows) + "\n")
    with (copy / "timeline" / "rank_00000.jsonl").open("a") as file:
        file.write('{"start_ns": 1}\n{"start_ns": 1, "dur_ns": "x", "name": [], "lane": 1}\n')
    said = resume(config, copy)
    assert "metrics.jsonl: left out 3 lines that are no rows" in said
    assert "rank_00000.jsonl: left out 2 lines that are no rows" in said
