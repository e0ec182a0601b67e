"""What files alone can tell is refused by the launcher in one line, with exit code 2, before torch
is imported.

All cases go through `main` in one fresh process in which an import of torch fails.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.model_files import write_drafter, write_model
from tests.tiny_task import python

INDEX = "model.safetensors.index.json"
DRAFTS = (
    "speculation.enabled=true",
    "speculation.strategies=['2_1_2']",
    "speculation.drafter={0}/drafter",
)
OWN = (*DRAFTS[:2], "speculation.drafter=own")
# Ten lines of aliases that stand for 10^10 values.
EXPANDING = "a: &a [1]\n" + "".join(
    f"{b}: &{b} [{', '.join(['*' + a] * 10)}]\n" for a, b in itertools.pairwise("abcdefghijk")
)
# Runs main on each line of standard input (a JSON list of arguments) and prints exit code and
# stderr.
DRIVER = """
import contextlib, io, json, sys
for name in ("torch", "transformers", "megatron", "pyarrow", "rich"):
    sys.modules[name] = None  # an import fails
from launch.pretrain_rl import main
for line in sys.stdin:
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        try:
            code = main(json.loads(line))
        except BaseException as error:
            code = repr(error)
    print(json.dumps([code, stderr.getvalue()]))
"""


@dataclass(frozen=True)
class Case:
    """What is changed in a good run's folder, the settings, and the message (an expression)."""

    name: str
    message: str
    change: Callable[[Path], object] = lambda folder: None
    overrides: tuple[str, ...] = field(default=())  # {0}: the run's folder


def own_layer(folder: Path) -> None:
    """Give a mimo one tensor of a layer for MTP, which such a layer does not have."""
    write_model(folder / "model", model_type="mimo")
    save_file({"model.mtp_layers.0.x": torch.zeros(2)}, folder / "model" / "more.safetensors")


def model(**config: object) -> Callable[[Path], object]:
    return lambda folder: write_model(folder / "model", **config)


def nulled(key: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        file = folder / "model" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {key: None}))

    return change


def weights(file: str = "model.safetensors", drop: str = "", **extra) -> Callable[[Path], object]:
    """Write the model's weights without `drop` and with `extra`, a shape or a tensor by name (__
    for a dot).
    """

    def change(folder: Path) -> None:
        tensors = write_model(folder / "model")
        for name, tensor in extra.items():
            is_tensor = isinstance(tensor, torch.Tensor)
            tensors[name.replace("__", ".")] = tensor if is_tensor else torch.zeros(tensor)
        tensors = {name: tensor for name, tensor in tensors.items() if name != drop}
        save_file(tensors, folder / "model" / file)

    return change


def text(path: str, content: str | bytes) -> Callable[[Path], object]:
    data = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / path).write_bytes(data)


def remove(path: str) -> Callable[[Path], object]:
    return lambda folder: (folder / path).unlink()


def drop_last_byte(path: str) -> Callable[[Path], object]:
    return lambda folder: (folder / path).write_bytes((folder / path).read_bytes()[:-1])


def shard_beside_single(folder: Path) -> None:
    """Put a shard and its index beside the single file, so that readers disagree."""
    single = folder / "model/model.safetensors"
    (folder / "model/part.safetensors").write_bytes(single.read_bytes())
    index(**dict.fromkeys(write_model(folder / "model"), "part.safetensors"))(folder)


def index(**weight_map: str) -> Callable[[Path], object]:
    names = {name.replace("__", "."): file for name, file in weight_map.items()}
    return text(f"model/{INDEX}", json.dumps({"weight_map": names}))


def drafter(**config: object) -> Callable[[Path], object]:
    return lambda folder: write_drafter(folder / "drafter", **config)


def teacher(change: str = "", **config: object) -> Callable[[Path], object]:
    """Write a second model whose tokenizer is another one in this part."""

    def write(folder: Path) -> None:
        write_model(folder / "teacher", **config)
        pieces: dict = {"vocab": {"a": 0, "b": 1, "<eos>": 2}, "merges": [], "type": "BPE"}
        for name in ("model", "teacher"):
            parts: dict = {
                "added_tokens": [],
                "normalizer": None,
                "pre_tokenizer": None,
                "model": dict(pieces),
            }
            if name == "teacher" and change == "ids":
                parts["model"]["vocab"] = {"a": 0, "b": 2, "<eos>": 1}
            elif name == "teacher" and change == "fewer":
                parts["model"]["vocab"] = {"a": 0, "b": 1}
            elif name == "teacher" and change == "normalizer":
                parts["normalizer"] = {"type": "NFC"}
            (folder / name / "tokenizer.json").write_text(json.dumps(parts))
        if change == "file":
            (folder / "teacher/tokenizer.json").rename(folder / "teacher/tokenizer.model")

    return write


TEACHER = ("reference.path={0}/teacher", "algorithm.distill_coef=1")
NOT_SAME = r"reference\.path='[^']*/teacher': must have the policy's tokenizer: "
MODEL = r"model\.path='[^']*/model': "
CASES = [
    # config.json
    Case("no model folder", r"model\.path='': must be a folder with config\.json", overrides=("model.path=",)),
    Case("absent model folder", r"model\.path='/absent': must be a folder", overrides=("model.path=/absent",)),
    Case("config is not JSON", r"config\.json: cannot be read as JSON", text("model/config.json", "{")),
    Case("config is nested too deeply", MODEL + r"config\.json: cannot be read as JSON: .*recursion", text("model/config.json", "[" * 200_000)),
    Case("config is a list", r"config\.json: must hold a JSON object, not a list", text("model/config.json", "[]")),
    Case("GGUF file", r"model\.path='[^']*/q4\.gguf': must be a folder with config\.json and safetensors \(GGUF cannot be trained", overrides=("model.path={0}/q4.gguf",)),
    Case("model type", MODEL + r"config\.json model_type='mixtral': must be one of llama, mistral, qwen2, qwen3", model(model_type="mixtral")),
    Case("sizes", MODEL + r"config\.json lacks vocab_size" , text("model/config.json", '{"model_type": "llama", "num_attention_heads": 4, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 64}')),
    Case("model type of another type", MODEL + r"config\.json model_type=\['llama'\]: must be one of", model(model_type=["llama"])),
    Case("a flag as text", MODEL + r"config\.json tie_word_embeddings='false': must be true or false", model(tie_word_embeddings="false")),
    *(
        Case(f"{key} is null", MODEL + rf"config\.json (lacks )?{key}", nulled(key))
        for key in ("vocab_size", "rms_norm_eps", "tie_word_embeddings", "attention_bias", "model_type")
    ),
    Case("size of another type", r"hidden_size='16': must be an integer >= 1", model(hidden_size="16")),
    Case("heads", r"num_attention_heads=4: must be a multiple of num_key_value_heads=3", model(num_key_value_heads=3)),
    Case("activation", r"hidden_act='gelu': must be 'silu'", model(hidden_act="gelu")),
    Case("mlp bias", r"mlp_bias=True: must be False", model(mlp_bias=True)),
    Case("attention bias", r"attention_bias=True: must be false for llama", model(attention_bias=True)),
    Case("sliding window", r"use_sliding_window=True: must be False", model(use_sliding_window=True)),
    Case("other attention in some layers", MODEL + r"config\.json layer_types\[\d\]='chunked_attention': must be 'full_attention'", model(layer_types=["full_attention", "chunked_attention"])),
    Case("layer_types of another type", r"layer_types='full_attention': must be a list", model(layer_types="full_attention")),
    Case("yarn without factor, as transformers 4 wrote it", r"rope_type='yarn' lacks factor", model(rope_parameters=None, rope_scaling={"type": "yarn"})),
    Case("yarn with an odd number", r"beta_fast=-1: must be a number > 0", model(rope_parameters={"rope_type": "yarn", "factor": 4.0, "beta_fast": -1})),
    Case("yarn with its bounds swapped", r"beta_fast=1: must be above beta_slow=32", model(rope_parameters={"rope_type": "yarn", "factor": 4.0, "beta_fast": 1, "beta_slow": 32})),
    Case("Mistral's sliding window", r"sliding_window=32: must be null \(max_position_embeddings=64\)", model(model_type="mistral", sliding_window=32)),
    Case("dynamic rope", r"rope_type='dynamic': must be one of default, linear, llama3, yarn", model(rope_parameters={"rope_type": "dynamic", "factor": 2.0})),
    Case("a rope for each type of layer", r"rope_parameters\.full_attention=.*: must be a value for all layers", model(rope_parameters={"full_attention": {"rope_theta": 5e5}})),
    Case("linear rope without factor", r"rope_type='linear' lacks factor", model(rope_parameters={"rope_type": "linear"})),
    Case("partial rotation", r"partial_rotary_factor=0\.5: must be 1\.0", model(partial_rotary_factor=0.5)),
    Case("quantized by config", MODEL + r"config\.json quantization_config says that the weights are quantized \(quant_method='fp8'\)", model(quantization_config={"quant_method": "fp8"})),
    Case("eos beyond the vocabulary", r"config\.json: eos_token_id=\[1, 32\]: must be < vocab_size=32", model(eos_token_id=[1, 32])),
    Case("eos of another type", r"config\.json: eos_token_id='</s>': must be an integer or a list of integers", model(eos_token_id="</s>")),
    Case("generation config", r"generation_config\.json: eos_token_id=\[2, 99\]: must be < vocab_size=32", text("model/generation_config.json", '{"eos_token_id": [2, 99]}')),
    # safetensors
    Case("no safetensors", MODEL + r"must hold \.safetensors files", remove("model/model.safetensors")),
    Case("another format", r"must hold \.safetensors files \(GGUF and \.bin must be converted", lambda f: (f / "model/model.safetensors").rename(f / "model/pytorch_model.bin")),
    Case("truncated data", MODEL + r"model\.safetensors: is truncated, damaged or not safetensors: .*not fully covered", drop_last_byte("model/model.safetensors")),
    Case("header is nested too deeply", r"model\.safetensors: is truncated, damaged or not safetensors", text("model/model.safetensors", (200_000).to_bytes(8, "little") + b"[" * 200_000)),
    Case("git-lfs pointer", MODEL + r"model\.safetensors: is a git-lfs pointer", text("model/model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")),
    Case("missing tensor", MODEL + r"its files lack model\.norm\.weight$", weights(drop="model.norm.weight")),
    Case("another shape", MODEL + r"model\.norm\.weight has shape \[17\], config\.json makes it \[16\]", weights(model__norm__weight=(17,))),
    Case("bias without a place", MODEL + r"its files hold tensors that a llama of this config\.json does not have: model\.layers\.0\.self_attn\.q_proj\.bias", weights(model__layers__0__self_attn__q_proj__bias=(16,))),
    Case("fp8", MODEL + r"model\.safetensors holds quantized weights: model\.layers\.0\.mlp\.up_proj\.weight in F8_E4M3; use the checkpoint in one of F16, BF16, F32, F64", weights(model__layers__0__mlp__up_proj__weight=torch.zeros(24, 16, dtype=torch.float8_e4m3fn))),
    Case("index names a missing file", MODEL + r"model\.safetensors\.index\.json: names files that are not there: model-00002-of-00002\.safetensors", index(model__norm__weight="model-00002-of-00002.safetensors")),
    Case("index names a missing tensor", r"index\.json: names tensors that their files do not hold: other\.weight \(model\.safetensors\)", index(other__weight="model.safetensors")),
    Case("index without a map", r"index\.json: must hold weight_map", text(f"model/{INDEX}", "{}")),
    Case("a single file beside shards", MODEL + r"model\.safetensors stands beside model\.safetensors\.index\.json, which names part\.safetensors: remove", shard_beside_single),
    Case("two models in a folder", r"tensor \S+ stands in model\.safetensors and in old\.safetensors: remove the files", weights("old.safetensors")),
    # tokenizer
    Case("no tokenizer", MODEL + r"must hold a tokenizer, one of tokenizer\.json", remove("model/tokenizer.json")),
    # drafter
    Case("absent drafter", r"speculation\.drafter='[^']*/absent': must be a folder with config\.json", overrides=(*DRAFTS, "speculation.drafter={0}/absent")),
    Case("drafter of another kind", r"drafter': config\.json: architectures='LlamaForCausalLM': must be one of", drafter(architectures=["LlamaForCausalLM"]), DRAFTS),
    Case("drafter's rope", r"drafter': config\.json: rope_type='dynamic': must be one of default", drafter(rope_parameters={"rope_type": "dynamic"}), DRAFTS),
    Case("drafter of another policy", r"speculation\.drafter='[^']*/drafter': hidden_size=24 must be the policy's, 16", drafter(hidden_size=24), DRAFTS),
    Case("drafter without weights", r"speculation\.drafter=.*must hold \.safetensors files", remove("drafter/model.safetensors"), DRAFTS),
    Case("own layer of a family without one", r"speculation\.drafter='own': the checkpoint \S+ has no MTP layer \(it is a llama; glm4_moe, mimo may have one\)", overrides=OWN),
    Case("own layer that is not there", r"has no MTP layer \(it is a mimo;", model(model_type="mimo"), OWN),
    Case("own layer with a tensor too many", r"drafter='own': \S+: its files lack model\.mtp_layers\.0\.token_layernorm\.weight, .* and hold tensors that a layer for MTP .*: model\.mtp_layers\.0\.x", own_layer, OWN),
    Case("own layer by EAGLE-3", r"drafter\.algorithm='eagle3': must be eagle or hass where speculation\.drafter='own'", overrides=(*OWN, "drafter.algorithm=eagle3")),
    Case("drafter by its old key", r"drafter\.path='x': unknown key; drafter\.path: here speculation\.drafter$", overrides=("drafter.path=x",)),
    # a second model
    Case("absent reference", r"reference\.path='/absent': must be a folder", overrides=("reference.path=/absent", "algorithm.kl_coef=0.1")),
    Case("reference without a tokenizer", r"reference\.path='[^']*/teacher': must hold a tokenizer", lambda f: (teacher()(f), remove("teacher/tokenizer.json")(f)), TEACHER),
    Case("reference with other ids", NOT_SAME + r"the token 'b' is 1 in the policy's, and 2 there", teacher("ids"), TEACHER),
    Case("reference with fewer tokens", NOT_SAME + r"the token '<eos>' is 2 in the policy's, and not there", teacher("fewer"), TEACHER),
    Case("reference with another normalizer", NOT_SAME + r"normalizer of tokenizer\.json differs", teacher("normalizer"), TEACHER),
    Case("reference with another file", NOT_SAME + r"tokenizer\.json differs", teacher("file"), TEACHER),
    Case("reference with a smaller vocabulary", r"reference\.path='[^']*/teacher': vocab_size=24 must be >= 32, the policy's", teacher(vocab_size=24), TEACHER),
    Case("reference of another shape that is replaced", r"reference\.refresh_steps=2: must be 0, because config\.json of \S+/teacher is not the policy's", teacher(num_hidden_layers=3), (*TEACHER, "reference.refresh_steps=2")),
    Case("no reward without a distillation", r"reward\.function='none': must be a function where algorithm\.distill_coef=0", overrides=("reward.function=none",)),
    Case("dynamic sampling without a reward", r"algorithm\.filter_groups='score': must be none where reward\.function='none'", overrides=("reward.function=none", "algorithm.distill_coef=1", "algorithm.filter_groups=score")),
    Case("evaluation without a reward", r"data\.eval='x\.jsonl': must be empty where reward\.function='none'", overrides=("reward.function=none", "algorithm.distill_coef=1", "data.eval=x.jsonl")),
    # run folder and prompts
    Case("run.dir under a file", r"run\.dir='[^']*/train\.jsonl/run': cannot be written: .*Not a directory", overrides=("run.dir={0}/train.jsonl/run",)),
    Case("no prompts", r"data\.train='': must be an existing", overrides=("data.train=",)),
    Case("absent prompts", r"data\.train='/absent\.jsonl': must be an existing \.jsonl or \.parquet file", overrides=("data.train=/absent.jsonl",)),
    Case("absent eval in a list", r"data\.eval='/absent\.jsonl': must be an existing", overrides=("data.eval=[{0}/train.jsonl, /absent.jsonl]",)),
    Case("an eval twice", r"data\.eval=.*: must be files with different names, or in folders", overrides=("data.eval=[{0}/train.jsonl, {0}/train.jsonl]",)),
    Case("eval of another type", r"data\.eval\[1\]=3: must be str, not int: put it in quotes", overrides=("data.eval=[a.jsonl, 3]",)),
    Case("prompts of another kind", r"config\.json': must be an existing \.jsonl or \.parquet file", overrides=("data.train={0}/model/config.json",)),
    # settings
    Case("settings nested too deeply", r"config='[^']*/run\.yaml': is not YAML: .*recursion", text("run.yaml", "[" * 20_000)),
    Case("settings that expand", r"config='[^']*/run\.yaml': is not YAML: its aliases stand for \d+ values", text("run.yaml", EXPANDING)),
    Case("settings that contain themselves", r"a value cannot contain itself", text("run.yaml", "reward: &a {function: {math: *a}}")),
    Case("duplicate key", r"key 'lr' stands in line 6 and again in line 7: must stand once", lambda f: (f / "run.yaml").open("a").write("optimizer:\n  lr: 1.0\n  lr: 2.0\n")),
    Case("duplicate section", r"key 'data' stands in line 2 and again in line 5", lambda f: (f / "run.yaml").open("a").write("data: {seed: 3}\n")),
    Case("duplicate key of an override", r"override 'run=\{seed: 1, seed: 2\}': is not YAML: key 'seed' stands", overrides=("run={seed: 1, seed: 2}",)),
    Case("k1 as a loss", r"algorithm\.kl_estimator='k1': must be k2 or k3 where algorithm\.kl_placement='loss'", overrides=("algorithm.kl_estimator=k1",)),
    Case("weights of zero", r"reward\.function=\{'math': 0\.0, 'exact': 0\.0\}: must be functions of which one has a weight that is not 0", overrides=("reward.function={math: 0, exact: 0}",)),
    Case("evaluation without prompts", r"eval\.interval=2: must be 0 where data\.eval is empty", overrides=("eval.interval=2",)),
    Case("chunks of a stage without stages", r"parallel\.virtual_pipeline=2: must be 1 where parallel\.pipeline=1", overrides=("parallel.virtual_pipeline=2",)),
    Case("parts recomputed without recompute", r"mcore\.transformer\.recompute_modules=\['mlp'\]: needs mcore\.recompute=selective", overrides=("mcore.transformer.recompute_modules=[mlp]",)),
    Case("an unknown part of a layer", r"recompute_modules=\['ffn'\]: must be a list of core_attn, layernorm, mlp,", overrides=("mcore.recompute=selective", "mcore.transformer.recompute_modules=[ffn]")),
    Case("one part of a layer", r"recompute_modules='mlp': must be a list of core_attn,", overrides=("mcore.recompute=selective", "mcore.transformer.recompute_modules=mlp")),
    Case("FP8 by delayed scales", r"mcore\.transformer\.fp8_recipe='delayed': must be one of tensorwise, blockwise, mxfp8", overrides=("mcore.transformer.fp8=hybrid", "mcore.transformer.fp8_recipe=delayed")),
    Case("FP8's recipe without FP8", r"fp8_recipe='mxfp8': needs mcore\.transformer\.fp8=hybrid or e4m3", overrides=("mcore.transformer.fp8_recipe=mxfp8",)),
    Case("LoRA with FP8", r"mcore\.transformer=\{'fp8': 'hybrid'\}: must be without fp8 where model\.lora_rank=8", overrides=("mcore.transformer.fp8=hybrid", "model.lora_rank=8")),
    Case("LoRA with a critic", r"algorithm\.advantage='gae': must be one without critic where model\.lora_rank=8", overrides=("algorithm.advantage=gae", "model.lora_rank=8")),
    Case("LoRA on unknown layers", r"model\.lora_targets=\['qkv'\]: must be different ones of q_proj, k_proj", overrides=("model.lora_targets=[qkv]",)),
    Case("LoRA on no layers", r"model\.lora_targets=\[\]: must be different ones of q_proj, k_proj", overrides=("model.lora_targets=[]",)),
    Case("LoRA's rank", r"model\.lora_rank=-1: must be .*0", overrides=("model.lora_rank=-1",)),
    *(
        Case(f"{key}={value}", re.escape(key) + rf"={shown}: must be a finite number", overrides=(f"{key}={value}",))
        for key, value, shown in (
            ("algorithm.kl_coef", ".nan", "nan"),
            ("algorithm.clip_high", ".inf", "inf"),
            ("optimizer.weight_decay", "-.inf", "-inf"),
        )
    ),
    *(
        Case(f"mcore.transformer.{name}", rf"mcore\.transformer\.{name}=.*: not allowed.*{hint}", overrides=(f"mcore.transformer.{name}={value}",))
        for name, value, hint in (
            ("num_layers", 3, r"the model is that of model\.path"),
            ("hidden_dropout", 0.1, "of two policies"),
            ("bf16", "true", r"set model\.dtype"),
            ("tensor_model_parallel_size", 2, r"set parallel\.tensor"),
            ("context_parallel_size", 2, "set parallel.context"),
            ("perform_initialization", "false", "gradient norms are wrong"),
            ("recompute_granularity", "full", r"set mcore\.recompute"),
            ("recompute_num_layer", 2, r"did you mean recompute_num_layers\?"),
        )
    ),
]  # fmt: skip


def make_run(folder: Path) -> None:
    """Write a run that passes every check: model, drafter, prompts and run.yaml."""
    folder.mkdir()
    write_model(folder / "model")
    write_drafter(folder / "drafter")
    (folder / "train.jsonl").write_text('{"prompt": "a", "label": "b"}\n')
    (folder / "run.yaml").write_text(
        f"model: {{path: {folder}/model}}\n"
        f"data: {{train: {folder}/train.jsonl, max_prompt_tokens: 16}}\n"
        "rollout: {max_new_tokens: 32}\n"
        f"run: {{dir: {folder}/run}}\n"
    )


def arguments(folder: Path, overrides: tuple[str, ...]) -> list[str]:
    return ["--config", f"{folder}/run.yaml", *(text.replace("{0}", str(folder)) for text in overrides)]  # fmt: skip


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int | str, str]]:
    """Return exit code and standard error of every case by name, from one process without torch."""
    root, lines = tmp_path_factory.mktemp("refusals"), []
    for number, case in enumerate(CASES):
        folder = root / str(number)
        make_run(folder)
        case.change(folder)
        lines.append(json.dumps(arguments(folder, case.overrides)))
    done = python("-c", DRIVER, given="\n".join(lines))
    assert done.returncode == 0, done.stderr
    found = [tuple(json.loads(line)) for line in done.stdout.splitlines()]
    return dict(zip([case.name for case in CASES], found, strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_files_tell_is_refused_in_one_line_before_torch(
    case: Case, answers: dict[str, tuple[int | str, str]]
) -> None:
    code, stderr = answers[case.name]
    assert code == 2, (code, stderr)
    assert re.fullmatch(r"pretrain_rl: [^\n]*\n", stderr), stderr
    assert re.search(case.message, stderr.rstrip("\n")), stderr


def test_a_rank_beside_the_first_refuses_without_a_line(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    remove("model/tokenizer.json")(tmp_path / "run")
    words = ("launch/pretrain_rl.py", *arguments(tmp_path / "run", ()))
    done = python(*words, RANK="1", WORLD_SIZE="2")
    assert (done.returncode, done.stderr) == (2, "")
