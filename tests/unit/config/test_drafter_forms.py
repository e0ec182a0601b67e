"""Tables: forms in which drafters are published. Some are used and compute the same as ours, the
others are refused before launch by the setting, the file and the name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.model_files import write_model
from tests.slow_draft import make_draft_model
from tests.tiny_models import tiny_config
from tlt_megatron import Engine
from tlt_megatron.cli import run_tool
from tlt_megatron.config.draft_folder import check_drafter, is_of_sglang
from tlt_megatron.config.model_folder import check_model
from tlt_megatron.drafter.eagle_folder import load_drafter, save_drafter
from tlt_megatron.models.draft_model import DraftModel
from tlt_megatron.trainer.before.command_line import read_command

TARGET = tiny_config(num_layers=8)
IDS = "eagle_aux_hidden_state_layer_ids"
Change = Callable[[dict[str, Any], dict[str, Tensor], DraftModel], None]  # to config and tensors


def config(**values: Any) -> Change:
    """Set keys of config.json. None means null."""
    return lambda hf, tensors, model: hf.update(values)


def eagle(**values: Any) -> Change:
    return lambda hf, tensors, model: hf.setdefault("eagle_config", {}).update(values)


def tensors(**named: Callable[[DraftModel], Tensor] | None) -> Change:
    """Set tensors, or remove them; __ stands for a dot."""

    def change(hf: dict[str, Any], kept: dict[str, Tensor], model: DraftModel) -> None:
        for name, make in named.items():
            name = name.replace("__", ".")
            if make is None:
                del kept[name]
            else:
                kept[name] = make(model).contiguous()

    return change


def without(name: str) -> Change:
    return lambda hf, kept, model: hf.pop(name) and None


def renamed(old: str, new: str) -> Change:
    def change(hf: dict[str, Any], kept: dict[str, Tensor], model: DraftModel) -> None:
        for name in [*kept]:
            kept[re.sub(old, new, name)] = kept.pop(name)

    return change


def nested(hf: dict[str, Any], kept: dict[str, Tensor], model: DraftModel) -> None:
    """As speculators: the layer's settings in an object of their own."""
    inner = {name: hf.pop(name) for name in [*hf] if name != "architectures"}
    inner.pop("eagle_config", None)
    hf["transformer_layer_config"] = inner | {"architectures": ["LlamaForCausalLM"]}


def zero_bias(hf: dict[str, Any], kept: dict[str, Tensor], model: DraftModel) -> None:
    model.fc.bias.data.zero_()
    kept.pop("fc.bias")


VLLM = (config(architectures=["Eagle3LlamaForCausalLM"], **{IDS: [2, 4, 5]}), without("eagle_config"), config(draft_vocab_size=32), renamed("midlayer", "layers.0"))  # fmt: skip
SPECULATORS = (nested, config(architectures=["Eagle3Speculator"], speculators_model_type="eagle3", draft_vocab_size=32, norm_before_residual=False, **{IDS: [2, 4, 5]}), renamed("midlayer", "layers.0"))  # fmt: skip
EMBEDDING = tensors(embed_tokens__weight=lambda model: model.embedding_VD)
HEAD = tensors(lm_head__weight=lambda model: model.lm_head_VD.bfloat16().float())
WHOLE = tensors(d2t=lambda m: torch.zeros(32).long(), t2d=lambda m: torch.ones(32).bool())
USED: dict[str, tuple[str, tuple[Change, ...]]] = {
    "ours": ("eagle3", ()),
    "vLLM's": ("eagle3", VLLM),
    "speculators'": ("eagle3", SPECULATORS),
    "speculators' with embedding, head and ids": ("eagle3", (*SPECULATORS, EMBEDDING, HEAD, WHOLE)),
    "without eagle_config": ("eagle3", (without("eagle_config"),)),
    "ids are null": ("eagle3", (eagle(**{IDS: None}),)),
    "SpecForge's, with the embedding": ("eagle3", (without("eagle_config"), EMBEDDING, config(draft_vocab_size=32))),
    "embedding in another dtype": ("eagle3", (tensors(lm_head__weight=lambda m: m.lm_head_VD.bfloat16()),)),
    "names of a whole model": ("eagle3", (renamed("^", "model."), EMBEDDING)),
    "whole vocabulary with ids": ("eagle3", (HEAD, WHOLE)),
    "EAGLE-1 without fc.bias": ("eagle", (zero_bias,)),
    "EAGLE of vLLM": ("eagle", (config(architectures=["EagleLlamaForCausalLM"]), EMBEDDING)),
    "the norm before the residual": ("eagle3", (config(norm_before_residual=True),)),
    "keys that change nothing": ("eagle3", (config(norm_output=False, fc_norm=None, bias=False, layer_types=["full_attention"], num_aux_hidden_states=3, target_hidden_size=16, use_sliding_window=False),)),
}  # fmt: skip
OF_SGLANG = ("ours", "keys that change nothing", "without eagle_config", "ids are null")
FILE, WEIGHTS = r"config\.json: ", r"model\.safetensors: "
REFUSED: dict[str, tuple[str, tuple[Change, ...], str]] = {
    "another embedding": ("eagle3", (tensors(embed_tokens__weight=lambda m: m.embedding_VD + 1),), WEIGHTS + r"embed_tokens\.weight is not model\.embed_tokens\.weight of the policy"),
    "a head of its own": ("eagle3", (tensors(lm_head__weight=lambda m: m.lm_head_VD + 1),), WEIGHTS + r"lm_head\.weight is not lm_head\.weight of the policy"),
    "vLLM's with a head of its own": ("eagle", (tensors(lm_head__weight=lambda m: m.lm_head_VD + 1),), WEIGHTS + r"lm_head\.weight is not"),
    "few ids": ("eagle3", (config(draft_vocab_size=16),), FILE + "draft_vocab_size=16 is not supported; only 32"),
    "ids in another order": ("eagle3", (tensors(d2t=lambda m: torch.arange(32).flip(0)),), WEIGHTS + "d2t permutes the rows"),
    "layers beyond the target": ("eagle3", (eagle(**{IDS: [1, 3, 7]}),), FILE + rf"eagle_config\.{IDS}=\[1, 3, 7\]: must be 3 rising layer numbers from 0, at most 6 of a target of 8"),
    "vLLM's beyond the target": ("eagle3", (*VLLM, config(**{IDS: [2, 4, 8]})), FILE + rf"{IDS}=\[2, 4, 8\]: must be 3 rising layer numbers from 1, at most 7 of"),
    "four layers": ("eagle3", (eagle(**{IDS: [0, 1, 2, 3]}),), FILE + "eagle_config.*must be 3 rising"),
    "layers that are no list": ("eagle3", (eagle(**{IDS: 3}),), FILE + "eagle_config.*must be a list of layer numbers"),
    "layers of two kinds": ("eagle3", (eagle(**{IDS: [0, 1, "2"]}),), FILE + "eagle_config.*must be a list of"),
    "layers that disagree": ("eagle3", (config(**{IDS: [1, 3, 4]}),), FILE + rf"{IDS}=\[1, 3, 4\]: must be one more than eagle_config's \[1, 3, 4\]"),
    "eagle_config of another type": ("eagle3", (config(eagle_config=[1]),), FILE + r"eagle_config=\[1\]: must be an object"),
    "an unknown key of eagle_config": ("eagle3", (eagle(norm_twice=True),), FILE + "eagle_config has norm_twice: unknown"),
    **{
        f"{where.__name__}({name})": ("eagle3", (where(**{name: value}),), FILE + rf"(eagle_config\.)?{name}={value!r} is not supported; only")
        for where in (config, eagle)
        for name, value in {
            "norm_output": True, "norm_before_fc": True, "fc_norm": True, "use_aux_norm": True, "use_aux_hidden_state": False,
            "num_aux_hidden_states": 4, "target_hidden_size": 24, "attention_bias": True, "hidden_act": "gelu", "logit_scale": 2.0,
            "num_hidden_layers": 2, "is_causal": False, "parallel_drafting": True, "bias": True,
        }.items()
    },
    "a norm of HASS": ("eagle", (config(add_para_norm=True),), FILE + "add_para_norm=True is not supported"),
    "EAGLE with the norm of EAGLE-3": ("eagle", (config(norm_before_residual=True),), FILE + "norm_before_residual=True: must be false for EAGLE"),
    "speculators' without the norm's place": ("eagle3", (*SPECULATORS, without("norm_before_residual")), FILE + "lacks norm_before_residual"),
    "a tied head of an untied policy": ("eagle3", (config(tie_word_embeddings=True),), FILE + "tie_word_embeddings=True: must be the policy's, False"),
    "quantized": ("eagle3", (config(quantization_config={"quant_method": "fp8"}),), r"config\.json quantization_config says"),
    "no architectures": ("eagle3", (config(architectures=None),), FILE + "architectures=None: must be one of"),
    "a null size": ("eagle3", (config(hidden_size=None),), FILE + "lacks hidden_size"),
    "a missing tensor": ("eagle3", (tensors(norm__weight=None),), r"its files lack norm\.weight$"),
    "a tensor too many": ("eagle3", (tensors(fc__bias=lambda m: torch.zeros(16)),), r"its files hold tensors that a LlamaForCausalLMEagle3 of this config\.json does not have: fc\.bias \(model\.safetensors\)"),
    "a norm of each input": ("eagle3", (tensors(input_norm__weight=lambda m: torch.ones(48)),), r"its files hold .*input_norm\.weight"),
    "a tensor under two names": ("eagle3", (tensors(layers__0__hidden_norm__weight=lambda m: torch.ones(16)),), WEIGHTS + r"\S*hidden_norm\.weight is there twice, under two names"),
    "EAGLE-1 whose config has a bias and the files none": ("eagle", (config(bias=True), zero_bias), r"its files lack fc\.bias$"),
    "EAGLE-1 whose config has no bias and the files one": ("eagle", (config(bias=False),), r"its files hold tensors that .*: fc\.bias \(model"),
    "the bias of speculators": ("eagle3", (config(fusion_bias=True),), FILE + "fusion_bias=True is not supported; only False"),
    "layers under another name": ("eagle3", (without("eagle_config"), config(target_layer_ids=[1, 3, 4])), FILE + r"target_layer_ids=\[1, 3, 4\] is not supported; only null"),
    "a rope for each type of layer": ("eagle3", (config(rope_parameters={"full_attention": {"rope_theta": 5e5}}),), FILE + r"rope_parameters\.full_attention=.*: must be a value for all layers"),
    "another shape": ("eagle3", (tensors(fc__weight=lambda m: torch.zeros(2, 2)),), r"fc\.weight has shape \[2, 2\], config\.json makes it \[16, 48\]"),
}  # fmt: skip


def make(folder: Path, architecture: str, changes: tuple[Change, ...]) -> DraftModel:
    """Write a policy and a drafter of it in a form. Return the drafter before the changes."""
    model = make_draft_model(architecture, target=TARGET, dtype=torch.float32)
    model.lm_head_VD.copy_(model.lm_head_VD.bfloat16())  # so that a copy in bfloat16 is equal
    sizes = {"model_type": "qwen3", "head_dim": 6, "num_hidden_layers": 8}
    policy = write_model(folder / "model", **sizes)
    policy["model.embed_tokens.weight"] = model.embedding_VD.contiguous()
    policy["lm_head.weight"] = model.lm_head_VD.contiguous()
    save_file(policy, folder / "model" / "model.safetensors")
    save_drafter(folder / "drafter", model)
    weights = folder / "drafter" / "model.safetensors"
    hf = json.loads((folder / "drafter" / "config.json").read_text())
    kept = load_file(weights)
    for change in changes:
        change(hf, kept, model)
    save_file(kept, weights)
    (folder / "drafter" / "config.json").write_text(json.dumps(hf))
    (folder / "rows.jsonl").write_text('{"prompt": "a", "label": "b"}\n')
    return model


def train(folder: Path, *settings: str) -> None:
    named = [f"model.path={folder}/model", f"speculation.drafter={folder}/drafter"]
    lengths = ["data.max_prompt_tokens=8", "speculation.enabled=true"]
    read_command([*named, *lengths, f"data.train={folder}/rows.jsonl", *settings])


def export(folder: Path, format: str = "vllm") -> dict[str, Any]:
    named = [f"--from={folder}/drafter", f"--to={folder}/new", f"--target={folder}/model"]
    run_tool("export-drafter", [*named, f"--format={format}"])
    return json.loads((folder / "new" / "config.json").read_text())


DOORS: dict[str, tuple[Callable[[Path], object], str]] = {
    "tlt train": (train, r"speculation\.drafter"),
    "Engine": (lambda folder: Engine(folder / "model", drafter=folder / "drafter"), "drafter"),
    "tlt export-drafter": (export, "--from"),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("form", REFUSED)
def test_a_drafter_that_would_compute_something_else_is_refused_by_name(
    form: str, door: str, tmp_path: Path
) -> None:
    architecture, changes, message = REFUSED[form]
    make(tmp_path, architecture, changes)
    enter, key = DOORS[door]
    with pytest.raises(ValueError, match=rf"^{key}='{tmp_path}/drafter': {message}") as caught:
        enter(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", USED)
def test_a_published_form_computes_the_same(form: str, tmp_path: Path) -> None:
    architecture, changes = USED[form]
    model = make(tmp_path, architecture, changes)
    train(tmp_path)
    policy = check_model("model.path", tmp_path / "model")
    check_drafter("drafter", tmp_path / "drafter", policy, tmp_path / "model")
    loaded = load_drafter(
        tmp_path / "drafter",
        embedding_VD=model.embedding_VD,
        lm_head_VD=model.lm_head_VD,
        num_layers=8,
    )
    norm = form == "the norm before the residual"
    assert (loaded.config.aux_layer_ids, loaded.config.norm_before_residual) == (
        model.config.aux_layer_ids,
        norm,
    )
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    if norm:
        with pytest.raises(ValueError, match="norm_before_residual=True: must be false for SGLang"):
            train(tmp_path, "rollout.engine=sglang", "rollout.dtype=bfloat16")
        with pytest.raises(ValueError, match="--format sglang: has no norm_before_residual=true"):
            export(tmp_path, "sglang")
    else:
        assert is_of_sglang(tmp_path / "drafter") == (form in OF_SGLANG)
    if architecture == "eagle3":
        exported = export(tmp_path)
        assert (exported[IDS], exported["norm_before_residual"]) == ([2, 4, 5], norm)


def test_unknown_keys_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make(tmp_path, "eagle3", (config(norm_twice=True, use_cache=True),))
    load_drafter(tmp_path / "drafter", embedding_VD=model.embedding_VD, lm_head_VD=model.lm_head_VD)
    assert "drafter/config.json: unknown keys have no effect: norm_twice" in caplog.text


def test_a_head_of_few_ids_is_for_a_frozen_drafter_of_sglang(tmp_path: Path) -> None:
    few = tensors(
        lm_head__weight=lambda m: m.lm_head_VD[::2],
        d2t=lambda m: torch.arange(16),
        t2d=lambda m: torch.arange(32) % 2 == 0,
    )
    make(tmp_path, "eagle3", (config(draft_vocab_size=16), few))
    frozen = ("rollout.engine=sglang", "rollout.dtype=bfloat16")
    train(tmp_path, *frozen)
    assert is_of_sglang(tmp_path / "drafter")
    with pytest.raises(ValueError, match="draft_vocab_size=16 is not supported"):
        train(tmp_path, *frozen, "spot.enabled=true")
    make(tmp_path, "eagle3", (*VLLM, config(draft_vocab_size=16), few))
    with pytest.raises(ValueError, match=f"with {IDS} in eagle_config, as SGLang reads them"):
        train(tmp_path, *frozen)
    for name, ids in (
        ("d2t", torch.arange(16).float()),
        ("d2t", torch.arange(15)),
        ("d2t", torch.arange(16) + 99),
        ("d2t", torch.zeros(16).long() - 5),
        ("d2t", -torch.arange(16)),
        ("d2t", torch.zeros(16).long()),
        ("t2d", torch.arange(32) % 2 == 1),
        ("t2d", torch.arange(16) % 2 == 0),
    ):
        other = tensors(**{name: lambda _, ids=ids: ids})
        make(tmp_path, "eagle3", (config(draft_vocab_size=16), few, other))
        with pytest.raises(ValueError, match=r"model\.safetensors: (d2t|t2d) (is|plus|must)"):
            train(tmp_path, *frozen)
    make(
        tmp_path,
        "eagle3",
        (config(draft_vocab_size=16), few, tensors(d2t=lambda m: torch.arange(16).int())),
    )
    train(tmp_path, *frozen)
    make(tmp_path, "eagle3", (config(draft_vocab_size=16), few, tensors(d2t=None)))
    with pytest.raises(ValueError, match="lacks d2t, the token ids of its 16 rows"):
        train(tmp_path, *frozen)
