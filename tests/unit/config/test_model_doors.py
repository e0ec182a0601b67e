"""A table: forms of a model's folder that would compute something else, by the doors through which
a user loads a model. Each door refuses each form by the setting, the file and the name.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model_files import write_drafter, write_model
from tlt_megatron import Engine
from tlt_megatron.cli import run_tool
from tlt_megatron.config.weight_files import INDEX_NAME
from tlt_megatron.trainer.before.command_line import read_command
from tools.commands.evaluate import evaluation_command
from tools.commands.load_engine import LoadedPolicy

SINGLE = "model.safetensors"


def change(folder: Path, config: dict[str, Any] | None = None, **tensors: Any) -> None:
    """Change a model's config.json and tensors: None removes one, __ stands for a dot."""
    if config:
        settings = json.loads((folder / "config.json").read_text()) | config
        (folder / "config.json").write_text(json.dumps(settings))
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    kept = load_file(folder / SINGLE) | named
    save_file({n: t for n, t in kept.items() if t is not None}, folder / SINGLE)


UP = "model__layers__0__mlp__up_proj__"


def pack(folder: Path, method: str) -> None:
    """Store a matrix as AWQ and GPTQ do."""
    packed: dict[str, Any] = {f"{UP}qweight": torch.zeros(16, 3, dtype=torch.int32)}
    packed |= {f"{UP}scales": torch.zeros(1, 24).half(), f"{UP}weight": None}
    change(folder, {"quantization_config": {"quant_method": method, "bits": 4}}, **packed)


def gptq_beside(folder: Path) -> None:
    """The settings are in a file of their own, as older tools wrote them."""
    pack(folder, "gptq")
    change(folder, {"quantization_config": None})
    (folder / "quantize_config.json").write_text('{"bits": 4}')


def fp8(folder: Path) -> None:
    about = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    weight = torch.zeros(24, 16, dtype=torch.float8_e4m3fn)
    scale = torch.ones(24, 1)
    change(
        folder,
        {"quantization_config": about},
        **{f"{UP}weight": weight, f"{UP}weight_scale": scale},
    )


def other_head(folder: Path) -> None:
    """The head differs from the embedding in one number, of another dtype."""
    head = torch.zeros(32, 16, dtype=torch.bfloat16)
    head[17, 3] = 1.0
    change(folder, {"tie_word_embeddings": True}, lm_head__weight=head)


def fused_experts(folder: Path) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    write_model(folder, model_type="qwen3_moe", head_dim=4, **sizes)
    names = [name for name in load_file(folder / SINGLE) if ".experts." in name]
    fused = {f"model__layers__{i}__mlp__experts__gate_up_proj": torch.zeros(4, 16, 16) for i in (0, 1)}  # fmt: skip
    change(folder, None, **dict.fromkeys(names), **fused)


def tokenizer(*files: str) -> Callable[[Path], None]:
    """Only these files of a tokenizer are there."""

    def only(folder: Path) -> None:
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
        for name in files:
            (folder / name).write_text("{}")

    return only


def adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    save_file({"base_model.lora_A.weight": torch.zeros(2, 2)}, folder / "adapter_model.safetensors")


def sharded(folder: Path) -> None:
    shard = "model-00001-of-00001.safetensors"
    (folder / SINGLE).rename(folder / shard)
    weight_map = dict.fromkeys(load_file(folder / shard), shard)
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


def sharded_adapter(folder: Path) -> None:
    sharded(folder)
    adapter(folder)


def stale_copy(folder: Path) -> None:
    """A shard holds an older copy of a tensor that the index places in another shard."""
    sharded(folder)
    second = "model-00002-of-00002.safetensors"
    save_file({"model.norm.weight": torch.ones(16)}, folder / second)
    index = json.loads((folder / INDEX_NAME).read_text())
    index["weight_map"]["model.norm.weight"] = second
    (folder / INDEX_NAME).write_text(json.dumps(index))


NO_TOKENIZER = r"must hold a tokenizer, one of tokenizer\.json, .*, vocab\.json with merges\.txt,"
FORMS: dict[str, tuple[Callable[[Path], None], str]] = {
    "compressed-tensors FP8": (fp8, r"config\.json quantization_config .*'compressed-tensors'"),
    "AWQ": (lambda f: pack(f, "awq"), r"config\.json quantization_config .*'awq'"),
    "GPTQ": (gptq_beside, r"model\.safetensors holds quantized weights: .*up_proj\.qweight in I32"),
    "tied with another head": (other_head, r"config\.json tie_word_embeddings=true, but lm_head\.weight \(model\.safetensors\) is not model\.embed_tokens"),
    "fused experts": (fused_experts, r"its files lack .*experts\.0\.gate_proj\.weight.*, and hold .*experts\.gate_up_proj \(model\.safetensors\)"),
    "no tokenizer": (tokenizer(), NO_TOKENIZER),
    "half a tokenizer": (tokenizer("vocab.json"), NO_TOKENIZER),
    "adapter": (adapter, r"adapter_config\.json is there: an adapter is not applied"),
    "adapter beside shards": (sharded_adapter, r"adapter_config\.json is there: an adapter is not"),
    "stale copy in a shard": (stale_copy, r"model-00001-of-00001\.safetensors holds model\.norm\.weight, which model\.safetensors\.index\.json places in model-00002"),
}  # fmt: skip


def words(folder: Path) -> list[str]:
    return [f"data.train={folder}/rows.jsonl", f"run.dir={folder}/run", "data.max_prompt_tokens=8"]


def train(model: Path, folder: Path) -> None:
    read_command([f"model.path={model}", *words(folder)])


def critic(model: Path, folder: Path) -> None:
    write_model(folder / "policy")
    named = [f"critic.path={model}", "algorithm.advantage=gae"]
    read_command([f"model.path={folder}/policy", *named, *words(folder)])


def evaluate(model: Path, folder: Path) -> None:
    command = evaluation_command([str(model), f"--data={folder}/rows.jsonl"])
    program = next(i for i, word in enumerate(command) if word.endswith("pretrain_rl.py"))
    read_command(command[program + 1 :])


def tool(name: str, *arguments: str) -> Callable[[Path, Path], None]:
    def run(model: Path, folder: Path) -> None:
        known = {"model": str(model), "folder": str(folder)}
        run_tool(name, [word.format(**known) for word in arguments])

    return run


# By the setting or option that names the model.
DOORS: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "tlt train": (train, r"model\.path"),
    "tlt evaluate": (evaluate, r"model\.path"),
    "critic.path": (critic, r"critic\.path"),
    "tlt plan": (tool("plan", "{folder}/run.yaml", "--ranks=1", "model.path={model}"), r"model\.path"),
    "tlt init": (tool("init", "--model={model}", "--data={folder}/rows.jsonl", "--gpus=0", "--out={folder}/new"), "--model"),
    "Engine": (lambda model, folder: Engine(model).close(), "model"),
    "tlt chat": (tool("chat", "{model}"), "model"),
    "tlt serve": (tool("serve", "{model}", "--port=1"), "model"),
    "tlt serve --engine": (tool("serve", "{model}", "--engine=sglang", "--drafter={folder}/drafter"), "model"),
    "tlt train-drafter": (tool("train-drafter", "--model={model}", "--prompts={folder}/rows.jsonl", "--out={folder}/new"), r"model\.path"),
    "tools.bench": (lambda model, folder: LoadedPolicy(model).engine.close(), "model"),
    "tlt convert": (tool("convert", "--from={model}", "--to={folder}/new"), "--from"),
    "tlt export-drafter": (tool("export-drafter", "--from={folder}/drafter", "--to={folder}/new", "--format=vllm", "--target={model}"), "--target"),
}  # fmt: skip
_WITHOUT_TOKENIZER = {"critic.path", "tlt plan", "tlt serve --engine", "tlt convert", "tlt export-drafter"}  # fmt: skip


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("form", FORMS)
def test_a_door_refuses_a_form_by_name(
    door: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "tokenizer" in form and door in _WITHOUT_TOKENIZER:
        pytest.skip("it reads no text")
    monkeypatch.setattr(sys, "stdin", None)
    model = tmp_path / "model"
    write_model(model)
    write_drafter(tmp_path / "drafter")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "label": "b"}\n')
    (tmp_path / "run.yaml").write_text(json.dumps({"data": {"train": f"{tmp_path}/rows.jsonl"}}))
    make, message = FORMS[form]
    make(model)
    enter, key = DOORS[door]
    with pytest.raises(ValueError, match=rf"^{key}='?{model}'?: {message}") as caught:
        enter(model, tmp_path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("door", [door for door in DOORS if door != "tlt serve"])
@pytest.mark.parametrize("part", ["", "checkpoints", "checkpoints/iter_0000001"])
def test_a_door_takes_a_run_or_names_the_folder_to_give(
    door: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, (enter, key) = tmp_path / "run", DOORS[door]
    saved = run / "checkpoints" / "iter_0000001"
    saved.mkdir(parents=True)
    (saved / "manifest.json").write_text("{}")
    (saved.parent / "latest_checkpointed_iteration.txt").write_text("1")
    (run / "config.yaml").write_text("{}")
    write_model(run / "hf", model_type="gpt2")  # no door computes with it
    write_drafter(tmp_path / "drafter")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "label": "b"}\n')
    (tmp_path / "run.yaml").write_text(json.dumps({"data": {"train": f"{tmp_path}/rows.jsonl"}}))
    told = rf"^{key}='?{run / part}'?: is a (run: give {run}/hf|checkpoint: tlt convert --from {run / part} --to)"
    if not part and door in ("tlt chat", "tlt evaluate", "tlt serve --engine"):
        told = rf"^{key}='?{run}/hf'?: config\.json model_type='gpt2'"
    if door == "tlt convert":
        told = r"must be a Hugging Face model|damaged|manifest|--model"
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ValueError, match=told):
        enter(run / part, tmp_path)


def test_an_evaluation_has_the_files_of_each_data_option(tmp_path: Path) -> None:
    write_model(tmp_path)
    files = [str(tmp_path / f"{name}.jsonl") for name in "abc"]
    command = evaluation_command([str(tmp_path), "--data", *files[:2], "--data", files[2]])
    (held_out,) = (word for word in command if word.startswith("data.eval="))
    assert [file for file in files if file in held_out] == files


def test_a_run_as_a_drafter_names_the_folder_to_give(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    write_drafter(tmp_path / "run" / "hf_drafter")
    (tmp_path / "run" / "config.yaml").write_text("{}")
    told = rf"^drafter='{tmp_path}/run': is a run: give {tmp_path}/run/hf_drafter$"
    with pytest.raises(ValueError, match=told):
        Engine(tmp_path / "model", drafter=tmp_path / "run")
    (tmp_path / "run" / "hf_drafter").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"is a run without hf_drafter: give the folder drafter"):
        Engine(tmp_path / "model", drafter=tmp_path / "run")
