"""Hugging Face -> torch_dist -> Hugging Face is the identity, and a trained, sharded checkpoint
becomes one model.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import re
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.mcore_policy import Layout, build_policy, export, train
from tests.ranks import run_ranks
from tests.sealed_checkpoint import seal
from tests.tiny_models import make_tiny_hf
from tlt_megatron.cli import main
from tlt_megatron.config.model_shape import tensor_shapes
from tlt_megatron.mcore.checkpoint_reader import load_state
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.hf_io import HfReader
from tools.commands.convert_checkpoint import (
    find_model,
    find_policy,
    hf_to_megatron,
    megatron_to_hf,
)
from tools.commands.verify_conversion import MOST_DIFFERENCE, logits_difference

TP2, PP2, CP2 = Layout(world=2, tensor=2), Layout(world=2, pipeline=2), Layout(world=2, context=2)
EP2, EP2_TP2 = Layout(world=2, expert=2), Layout(world=2, tensor=2, expert=2)
EP2_PP2 = Layout(world=4, pipeline=2, expert=2)
EP2_CP2 = Layout(world=2, context=2, expert=2)


@pytest.mark.parametrize(
    ("kind", "layout", "changes"),
    [
        ("qwen3", TP2, {}),
        ("qwen2", PP2, {"tied": True}),
        ("llama", Layout(world=2, pipeline=2, virtual=2), {"num_layers": 4}),
        ("mistral", CP2, {}),
        ("qwen3_moe", EP2, {"mlp_only_layers": [0]}),
        ("glm4_moe", EP2_TP2, {}),
        ("qwen3_moe", EP2_PP2, {}),
        ("qwen3_moe", EP2_CP2, {}),
    ],
    ids=str,
)
def test_any_layout_reads_a_converted_model_and_its_checkpoint_becomes_a_model(
    tmp_path: Path, kind: str, layout: Layout, changes: dict[str, Any]
) -> None:
    """bfloat16, which is found out from the checkpoint."""
    sizes = {"num_layers": 2} | changes
    source = make_tiny_hf(tmp_path / "hf", kind, **sizes)
    other = make_tiny_hf(tmp_path / "other", kind, seed=1, **sizes)
    hf_to_megatron(source, tmp_path / "megatron", dtype="bfloat16")
    run_dir = tmp_path / "run"

    def run() -> dict[str, torch.Tensor]:
        policy, groups = build_policy(other, layout, dtype="bfloat16")
        for chunk in policy._stage:
            state = chunk.sharded_state_dict()
            wanted = {name: part for name, part in state.items() if "_extra_state" not in name}
            loaded = load_state({"model": wanted}, tmp_path / "megatron")["model"]
            chunk.load_state_dict(loaded, strict=False)
        exported = export(policy)
        for name, tensor in HfReader(source).items():
            assert torch.equal(exported[name], tensor.to(exported[name].dtype)), name
        shares = [5, *[0] * (groups.dp.size - 1)]
        trained = train(policy, groups, (1,), shares)
        policy.save(run_dir / "checkpoints" / "iter_0000001" / "policy")
        return trained["weights"]

    weights = run_ranks(layout.world, run)[0]
    seal(run_dir / "checkpoints" / "iter_0000001", step=1)
    (run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("1")
    (run_dir / "config.yaml").write_text(f"model:\n  path: {source}\n")
    policy = find_policy(run_dir)
    for path in (run_dir / "checkpoints", policy.parent, policy):
        assert find_policy(path) == policy
    assert find_model(policy) == source
    megatron_to_hf(policy, tmp_path / "back", source)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == weights.keys()
    for name, tensor in back.items():
        assert tensor.dtype == (torch.float32 if name.endswith("_bias") else torch.bfloat16)
        assert torch.equal(tensor, weights[name]), name


def test_what_megatron_saves_itself_becomes_a_model(tmp_path: Path) -> None:
    """Its index has more classes, and its plain values do not say the dtype of the model."""
    from megatron.core import dist_checkpointing

    source = make_tiny_hf(tmp_path / "hf", "qwen3_moe", num_layers=2)
    stored = tmp_path / "stored"
    stored.mkdir()

    def save() -> None:
        policy, _ = build_policy(source, EP2_TP2)
        [chunk] = policy._stage
        dist_checkpointing.save({"model": chunk.sharded_state_dict()}, str(stored))
        # Megatron's queue of results is a process, which a forked rank would leave behind.
        for child in multiprocessing.active_children():
            child.terminate()
            child.join()

    run_ranks(2, save)
    command = ("--from", stored, "--to", tmp_path / "back", "--model", source)
    code, printed = tlt_convert(*command)
    assert code == 2
    assert f"--dtype: needed, as {stored} does not say that of its training" in printed
    code, printed = tlt_convert(*command, "--dtype", "float32", "--verify")
    assert code == 0, printed
    for name, tensor in HfReader(source).items():
        assert torch.equal(HfReader(tmp_path / "back")[name], tensor), name


def tlt_convert(*arguments: object) -> tuple[int, str]:
    """The exit code of `tlt convert`, and what it prints, in a process of its own."""

    def run() -> tuple[int, str]:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            code = main(["convert", *map(str, arguments)])
        return code, printed.getvalue()

    return run_ranks(1, run, has_world=False)[0]


@pytest.mark.parametrize(
    ("kind", "tied", "dtype", "has_mtp"),
    [
        ("qwen2", True, "float32", False),
        ("qwen3_moe", True, "float32", False),
        ("glm4_moe", False, "float32", True),
        ("mimo", False, "bfloat16", True),
    ],
)
def test_a_verified_conversion_has_the_same_tensors_and_logits(
    kind: str, tied: bool, dtype: str, has_mtp: bool, tmp_path: Path
) -> None:
    """In both directions, with progress. Tokenizer, chat template, generation config and the layer
    for MTP come along.
    """
    source = make_tiny_hf(tmp_path / "hf", kind, tied=tied, num_layers=2, has_mtp=has_mtp)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.txt"):
        (source / name).write_text(f'{{"name": "{name}"}}')
    (source / "made_with.json").write_text(
        "{}"
    )  # tools/tiny_models/make_tiny_policy.py says what it made
    there = ("--from", source, "--to", tmp_path / "megatron", "--dtype", dtype, "--verify")
    back = ("--from", tmp_path / "megatron", "--to", tmp_path / "back", "--model", source)
    num_tensors, names = len(tensor_shapes(load_model_config(source))), HfReader(source).names()
    num_copies = 2 * (kind == "glm4_moe")  # embedding and LM head: in no checkpoint
    for results, lacks in ((tlt_convert(*there), num_copies), (tlt_convert(*back, "--verify"), 0)):
        code, printed = results
        assert code == 0, printed
        assert f"verified: {len(names) - lacks} tensors, bit for bit; " in printed
        assert re.search(r"logits of 64 tokens \(at most \S+ of the largest apart\)", printed)
        assert "no MTP layer" not in printed
        assert printed.count(f"tensor {num_tensors}/{num_tensors} | ETA 0:00:00") == 2
    for name in ("generation_config.json", "chat_template.jinja", "vocab.txt"):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
    assert not (tmp_path / "back" / "made_with.json").exists()
    before, after = HfReader(source), HfReader(tmp_path / "back")
    assert before.names() == after.names()
    for name, tensor in before.items():
        assert torch.equal(tensor.to(after[name].dtype), after[name]), name


def test_verification_names_what_is_missing_or_differs(tmp_path: Path) -> None:
    """Two folders that are there are only compared. The exit code is 1."""
    source = make_tiny_hf(tmp_path / "hf", "qwen3", num_layers=2)
    megatron, changed = tmp_path / "megatron", tmp_path / "changed"
    hf_to_megatron(source, megatron)
    up, down = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("up", "down"))
    make_tiny_hf(changed, "qwen3", num_layers=2)
    tensors = load_file(changed / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors |= {"model.more.weight": torch.zeros(2), down: torch.zeros(8, 64)}
    tensors[up][3, 4].neg_()
    save_file(tensors, changed / "model.safetensors", {"format": "pt"})
    (changed / "generation_config.json").unlink()
    before = {path: path.read_bytes() for path in changed.iterdir()}

    code, printed = tlt_convert("--from", megatron, "--to", changed, "--model", source, "--verify")
    assert code == 1
    assert [line for line in printed.splitlines() if line.startswith("--verify: ")] == [
        f"--verify: {up} differs in 1 of 10,240 numbers",
        f"--verify: {down} is torch.float32 (8, 64), not torch.float32 (64, 160)",
        f"--verify: {changed} has no tensor model.norm.weight",
        f"--verify: {changed} has model.more.weight, which the model has not",
        f"--verify: {changed}/generation_config.json is not {source}/generation_config.json",
    ]
    assert "verified" not in printed
    assert before == {path: path.read_bytes() for path in changed.iterdir()}


def test_verification_finds_weights_that_megatron_takes_for_others(tmp_path: Path) -> None:
    """Here those of another model, as by a wrong name or layout in the table of weights."""
    source = make_tiny_hf(tmp_path / "hf", "llama", num_layers=2)
    other = make_tiny_hf(tmp_path / "other", "llama", num_layers=2, seed=1)
    hf_to_megatron(source, tmp_path / "megatron")

    def run() -> float:
        return logits_difference(tmp_path / "megatron", other, torch.float32)

    [share] = run_ranks(1, run, has_world=False)
    assert share > 100 * MOST_DIFFERENCE


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    source = make_tiny_hf(tmp_path / "hf", "llama", num_layers=2)
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"hf: model\.norm\.weight: not finite"):
        hf_to_megatron(source, tmp_path / "megatron")
    assert not (tmp_path / "megatron").exists()


def test_a_conversion_that_is_cut_short_leaves_no_model(tmp_path: Path) -> None:
    """By a full disk (here the limit of a file's size), in both directions. A kill leaves
    `back.tmp`.
    """
    source = make_tiny_hf(tmp_path / "hf", "llama", num_layers=2)

    def convert() -> None:
        hf_to_megatron(source, tmp_path / "megatron")
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, most))
        with pytest.raises(OSError, match="File too large"):
            hf_to_megatron(source, tmp_path / "other")
        with pytest.raises(OSError, match="File too large"):
            megatron_to_hf(tmp_path / "megatron", tmp_path / "back", source)

    run_ranks(1, convert)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "megatron"]


def test_wrong_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--from .* must be a Hugging Face model"):
        find_policy(tmp_path)
    with pytest.raises(ValueError, match="--model: needed"):
        find_model(tmp_path)
    with pytest.raises(ValueError, match=r"--to .* must not exist"):
        megatron_to_hf(tmp_path, tmp_path, tmp_path)


def test_a_checkpoint_that_is_damaged_or_of_another_model_is_refused(tmp_path: Path) -> None:
    source = make_tiny_hf(tmp_path / "hf", "llama", num_layers=2)
    hf_to_megatron(source, tmp_path / "megatron")
    deeper = make_tiny_hf(tmp_path / "deeper", "llama", num_layers=3)
    with pytest.raises(ValueError, match=r"layers\.self_attention.* lacks a part"):
        megatron_to_hf(tmp_path / "megatron", tmp_path / "back", deeper)
    shallower = make_tiny_hf(tmp_path / "shallower", "llama", num_layers=1)
    with pytest.raises(ValueError, match="holds weights that the model does not have"):
        megatron_to_hf(tmp_path / "megatron", tmp_path / "back", shallower)
    larger = make_tiny_hf(tmp_path / "larger", "llama", num_layers=2, vocab_size=600)
    with pytest.raises(ValueError, match=r"embed_tokens.* \(512, 64\): must be \(600, 64\)"):
        megatron_to_hf(tmp_path / "megatron", tmp_path / "back", larger)
    biased = make_tiny_hf(tmp_path / "biased", "qwen2", num_layers=2)
    with pytest.raises(ValueError, match=r"has no tensor for model\.layers\.0\..*q_proj\.bias"):
        megatron_to_hf(tmp_path / "megatron", tmp_path / "back", biased)
    [file] = (tmp_path / "megatron").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-1_000])
    with pytest.raises(ValueError, match=r"__0_0\.distcp: .* is not loaded"):
        megatron_to_hf(tmp_path / "megatron", tmp_path / "back", source)
    assert not (tmp_path / "back").exists()
