"""Exported drafters: what the engines' loaders would find."""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.model_files import write_model
from tests.sealed_checkpoint import seal
from tests.slow_draft import HIDDEN_SIZE, VOCAB_SIZE, make_draft_model
from tests.unit.trainer.test_run_checkpoint import flip_bit
from tlt_megatron.drafter.eagle_folder import load_drafter, save_drafter
from tlt_megatron.models.config import RopeConfig, load_model_config
from tlt_megatron.models.draft_model import DraftModel
from tlt_megatron.speculation.token_counts import TokenCounts
from tlt_megatron.trainer.saving.manifest import engine_file
from tools.commands.export_drafter import (
    Target,
    export_drafter,
    find_drafter,
    frequent_ids,
    main,
    read_layout,
)

ARCHITECTURES = ("eagle", "eagle3")
ROPE = RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_max_position_embeddings=32)


def save(path: Path, model: DraftModel) -> Path:
    save_drafter(path, copy.deepcopy(model).float())
    return path


def target_of(model: DraftModel) -> Target:
    return Target(embedding_VD=model.embedding_VD.float(), lm_head_VD=model.lm_head_VD.float())


def check_rope(folder: Path) -> None:
    """Transformers 5 reads `rope_parameters`, and transformers 4 the other two keys."""
    config = read_layout(folder).config
    assert config["rope_theta"] == ROPE.theta
    assert config["rope_scaling"] == config["rope_parameters"]
    seen = load_model_config(folder)
    assert (seen.rope, seen.hidden_size, seen.head_dim) == (ROPE, HIDDEN_SIZE, 6)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sglang_gets_what_its_loader_names(architecture: str, tmp_path: Path) -> None:
    model = make_draft_model(architecture)
    model.config = dataclasses.replace(model.config, rope=ROPE)
    source, out = save(tmp_path / "d", model), tmp_path / "out"
    export_drafter(source, out, "sglang", target_of(model), dtype=torch.bfloat16)
    assert sorted(file.name for file in out.iterdir()) == ["config.json", "model.safetensors"]
    config, tensors = read_layout(out).config, read_layout(out).tensors
    check_rope(out)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert config["dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is False
    if architecture == "eagle3":
        assert config["architectures"] == ["LlamaForCausalLMEagle3"]
        assert config["draft_vocab_size"] is None
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
        assert tensors["fc.weight"].shape == (HIDDEN_SIZE, 3 * HIDDEN_SIZE)
        assert tensors["midlayer.self_attn.q_proj.weight"].shape == (24, 2 * HIDDEN_SIZE)
    else:
        assert config["architectures"] == ["LlamaForCausalLMEagle"]
        assert tensors["fc.bias"].any()
        assert "layers.0.input_layernorm.weight" not in tensors
    reloaded = load_drafter(out, embedding_VD=model.embedding_VD, lm_head_VD=model.lm_head_VD)
    for name, tensor in reloaded.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name].bfloat16().float()), name


def test_vllm_counts_layers_from_before(tmp_path: Path) -> None:
    model = make_draft_model("eagle3")
    model.config = dataclasses.replace(model.config, rope=ROPE)
    out = tmp_path / "out"
    export_drafter(save(tmp_path / "d", model), out, "vllm")
    check_rope(out)
    config = json.loads((out / "config.json").read_text())
    assert model.config.aux_layer_ids == (0, 1, 2)
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert config["eagle_config"] == {"use_aux_hidden_state": True}  # no second, shifted list
    assert config["architectures"] == ["Eagle3LlamaForCausalLM"]
    assert config["draft_vocab_size"] == VOCAB_SIZE
    assert config["norm_before_residual"] is False


def test_vllm_has_no_bias_so_the_embedding_carries_it(tmp_path: Path) -> None:
    model = make_draft_model("eagle")
    source, out = save(tmp_path / "d", model), tmp_path / "out"
    with pytest.raises(ValueError, match=r"--target: vLLM's EAGLE has no fc\.bias"):
        export_drafter(source, out, "vllm")
    assert not out.exists()
    export_drafter(source, out, "vllm", target_of(model))
    tensors = load_file(out / "model.safetensors")
    assert "fc.bias" not in tensors
    expected = fc_outputs(model, model.embedding_VD, model.fc.bias)
    actual = fc_outputs(model, tensors["embed_tokens.weight"].double(), torch.zeros(HIDDEN_SIZE))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        model.fc.bias.zero_()
    export_drafter(save(tmp_path / "e", model), tmp_path / "f", "vllm")
    assert "embed_tokens.weight" not in load_file(tmp_path / "f" / "model.safetensors")


def fc_outputs(model: DraftModel, embedding_VD: Tensor, bias_D: Tensor) -> Tensor:
    """What fc gives on every token with a hidden state of ones."""
    pairs = torch.cat((embedding_VD, torch.ones_like(embedding_VD)), dim=1)
    return pairs @ model.fc.weight.detach().T + bias_D.detach()


def test_a_bias_that_no_embedding_can_carry_is_refused(tmp_path: Path) -> None:
    """The first output of fc does not depend on the embedding."""
    model = make_draft_model("eagle")
    with torch.no_grad():
        model.fc.weight[0, :HIDDEN_SIZE] = 0.0
        model.fc.bias[0] = 5.0
    with pytest.raises(
        ValueError, match=r"fc\.bias: outputs differ by .* wider --dtype may hold it"
    ):
        export_drafter(save(tmp_path / "d", model), tmp_path / "out", "vllm", target_of(model))
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_another_target_is_refused(tmp_path: Path) -> None:
    model = make_draft_model("eagle3")
    other = Target(embedding_VD=torch.randn(VOCAB_SIZE, HIDDEN_SIZE), lm_head_VD=model.lm_head_VD)
    with pytest.raises(ValueError, match="belongs to another target"):
        export_drafter(save(tmp_path / "d", model), tmp_path / "out", "sglang", other)
    assert [path.name for path in tmp_path.iterdir()] == ["d"]  # nothing half done


@pytest.mark.parametrize("format", ["sglang", "vllm"])
def test_a_reduced_head_has_the_most_frequent_ids_of_all_ranks(format: str, tmp_path: Path) -> None:
    model = make_draft_model("eagle3")
    source, target = save(tmp_path / "iter" / "drafter", model), target_of(model)
    with pytest.raises(ValueError, match=r"/iter must hold the token counts"):
        frequent_ids(source, 3)
    states = []
    for tokens in ([9, 9, 4], [2, 4, 4], []):
        counts = TokenCounts(VOCAB_SIZE, 3)
        counts.add(tokens)
        states.append({"token_counts": counts.state_dict()})
    for rank, state in enumerate([*states, {}, {"token_counts": None}]):
        engine_file(source.parent, rank).write_text(json.dumps(state))
    ids = frequent_ids(source, 3)
    assert ids.tolist() == [2, 4, 9]
    with pytest.raises(ValueError, match=f"--draft-vocab-size {VOCAB_SIZE}: must be in"):
        frequent_ids(source, VOCAB_SIZE)
    out = tmp_path / "out"
    export_drafter(source, out, format, target, ids_C=ids)
    layout = read_layout(out)
    assert layout.config["draft_vocab_size"] == 3
    assert torch.equal(layout.tensors["d2t"] + torch.arange(3), ids)  # as both loaders compute them
    assert layout.tensors["d2t"].dtype == torch.int64
    assert layout.tensors["t2d"].nonzero().flatten().tolist() == [2, 4, 9]
    assert torch.equal(layout.tensors["lm_head.weight"], target.lm_head_VD[ids])
    with pytest.raises(ValueError, match=r"--target: a reduced vocabulary needs"):
        export_drafter(source, tmp_path / "no", format, ids_C=ids)
    eagle = save(tmp_path / "e", make_draft_model("eagle"))
    with pytest.raises(ValueError, match="must be 0 for EAGLE"):
        export_drafter(eagle, tmp_path / "no", format, target, ids_C=ids)
    assert not (tmp_path / "no").exists()


def test_a_run_is_exported_from_the_checkpoint_that_a_resume_takes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    root = run / "checkpoints"
    older, newest = (root / f"iter_000000{step}" / "drafter" for step in (1, 2))
    model = make_draft_model("eagle")
    save(run / "drafter", model)
    assert find_drafter(run) == run / "drafter"  # before the first checkpoint
    for step, folder in ((1, older), (2, newest)):
        save(folder, model)
        seal(folder.parent, step=step)
        for path in (run, root, folder.parent, folder):
            assert find_drafter(path) == folder
    flip_bit(newest / "model.safetensors")
    for damaged in (newest, newest.parent):
        with pytest.raises(ValueError, match=r"drafter/model\.safetensors is damaged"):
            find_drafter(damaged)
    arguments = ["export", "--from", str(run), "--to", str(out), "--format", "vllm"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(ValueError, match="--target: "):
        main()
    (run / "config.yaml").touch()
    tensors = write_model(run / "hf")  # the trained policy is the target of the run's drafter
    tensors["model.embed_tokens.weight"] = model.embedding_VD.float().contiguous()
    save_file(tensors, run / "hf" / "model.safetensors")
    main()
    assert (out / "model.safetensors").is_file()
    assert "iter_0000001 is the newest intact checkpoint" in caplog.text
    command = f'vllm serve {run}/hf --speculative-config \'{{"method": "eagle", '
    assert capsys.readouterr().out.splitlines()[-1].startswith(command)
    with pytest.raises(ValueError, match=r"--to .* must not exist"):
        main()
    with pytest.raises(ValueError, match=r"--from .* must be a drafter's folder"):
        find_drafter(tmp_path / "none")
