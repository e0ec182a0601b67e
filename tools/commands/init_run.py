"""Writes the files of a new run for a model, a data file and a number of GPUs.

They are a config, a reward file and, for GPUs, a Slurm script.

    tlt init --model Qwen/Qwen2.5-7B-Instruct --data train.jsonl --gpus 8 --out mine

The layout is the smallest tensor parallelism that the memory ledger accepts, with pipeline stages
only if that is not enough, and with LoRA only if no layout fits all weights. Lengths and sizes come
from the model and the data, which is read and checked. A single rollout engine has no idle ranks
to train a drafter on, so it drafts by n-grams. `--gpus 0` is a run of 2 CPU ranks.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml

from tlt_megatron.cli import ROOT
from tlt_megatron.config.hub import TOKENIZER, fetch_model, name_version
from tlt_megatron.config.layout import check_layout, draft_slack
from tlt_megatron.config.load import load_config
from tlt_megatron.config.model_folder import check_model
from tlt_megatron.config.own_layer import note_own_layer
from tlt_megatron.config.schema import DataSection
from tlt_megatron.data.prompts import load_held_out, load_prompts
from tlt_megatron.data.tokenizer import load_tokenizer
from tlt_megatron.models.config import ModelConfig, load_model_config
from tlt_megatron.models.sizes import ModelSizes
from tlt_megatron.runtime.device import Device
from tlt_megatron.runtime.typed_command import tlt_command
from tlt_megatron.trainer.before.memory_ledger import make_ledger

TEMPLATES = Path(__file__).with_name("new_run")
REWARD = (TEMPLATES / "last_words.py").read_text(encoding="utf-8")
ABOUT = """# Written by tlt init. All settings with their values: tlt train config.yaml --print-config
# rollout.engine: embedded needs no SGLang. Speculation and spot training change no token: enabled: false turns them off.
"""
NODE_GPUS = 8
# Of one rollout engine: 128 responses a step, of a length that it answers in minutes.
ONE_ENGINE = {"num_prompts": 16, "num_samples": 8, "max_batch_size": 64}
MOST_NEW_TOKENS, SMALL_GPU_NEW_TOKENS, SMALL_GPU_GIB = 4096, 2048, 40
LORA = {"model": {"lora_rank": 32}, "optimizer": {"lr": 1e-5}}  # ten times the rate of all weights
KV_SHARE = 0.19  # most of a GPU's memory: about as in examples/qwen2_5_7b_8gpu.yaml


def main(arguments: list[str] | None = None) -> None:
    """Write the files and print the next command.

    ValueError if something is wrong or does not fit; then nothing is written.
    """
    options = _parse(arguments)
    folder: Path = options.out.resolve()
    names = ["config.yaml", "reward.py"] + (["train.sbatch"] if options.gpus else [])
    used = [name for name in names if (folder / name).exists()]
    if used:
        raise ValueError(f"--out {options.out}: holds {used[0]} already")
    if options.gpus < 0 or (options.gpus > NODE_GPUS and options.gpus % NODE_GPUS):
        raise ValueError(
            f"--gpus {options.gpus}: must be 0, at most {NODE_GPUS}, or a multiple of it"
        )
    settings = choose_settings(options, folder)
    model = settings["model"]
    found = Path(model["path"])
    model["path"] = name_version(options.model, found)
    text = ABOUT + yaml.safe_dump(settings, sort_keys=False)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    if options.gpus:
        script = slurm_script(folder / "config.yaml", options.gpus)
        (folder / "train.sbatch").write_text(script, encoding="utf-8")
    print(text, end="")
    if note := note_own_layer(found, load_model_config(found)):
        print(f"\n{note}")
    print(f"\nwritten to {options.out}: {', '.join(names)}. Edit reward.py, then:")
    config, ranks = options.out / "config.yaml", options.gpus or 2
    if ranks <= NODE_GPUS:
        print(tlt_command("train", config, "--nproc-per-node", ranks))
    else:
        print(shlex.join(["sbatch", str(options.out / "train.sbatch")]))


def choose_settings(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the sections of the config: what the data and the model give, and the first layout
    that fits.
    """
    found = fetch_model("--model", options.model, TOKENIZER)
    model = check_model("--model", found, needs_weights=False)
    limit = model.max_position_embeddings
    keys = {"input_key": options.input_key, "label_key": options.label_key}
    section = DataSection(max_prompt_tokens=limit, **keys)
    tokenizer = load_tokenizer(found)
    prompts = load_prompts(options.data, tokenizer, section)
    longest = max(len(prompt.token_ids) for prompt in prompts.rows)
    max_prompt = min(limit // 2, math.ceil(longest / 64) * 64)
    files: dict[str, str | list[str]] = {"train": str(options.data.resolve())}
    if options.eval:
        held_out = [str(path.resolve()) for path in options.eval]
        files["eval"] = held_out if len(held_out) > 1 else held_out[0]
        load_held_out(replace(section, eval=files["eval"]), tokenizer)  # checks them
    template = TEMPLATES / ("gpu.yaml" if options.gpus else "cpu.yaml")
    settings = yaml.safe_load(template.read_text(encoding="utf-8"))
    slack = draft_slack(settings["speculation"]["strategies"])
    rollout = settings["rollout"]
    rollout["num_prompts"] = min(len(prompts.rows), rollout["num_prompts"])
    rollout["max_new_tokens"] = min(rollout["max_new_tokens"], limit - max_prompt - slack)
    settings["model"]["path"] = str(found.resolve())
    settings["data"] = {**files, **keys, "max_prompt_tokens": max_prompt}
    settings["reward"] = {"function": f"{folder / 'reward.py'}:compute_score"}
    settings["eval"]["interval"] *= bool(options.eval)
    settings["run"]["dir"] = f"runs/{folder.name}"
    if not options.gpus:
        check_layout(load_config(None, _overrides(settings)), 2)
        return settings
    return _fit(settings, model, options)


def _fit(
    settings: dict[str, Any], model: ModelConfig, options: argparse.Namespace
) -> dict[str, Any]:
    """Return the settings with the first layout that the ledger accepts: tensor before pipeline
    parallelism, all weights before adapters. The experts of a mixture are on as many GPUs of a
    node as can share them.
    """
    gpu = Device(torch_device=torch.device("cuda", 0), backend="gloo")  # nothing communicates
    free_bytes = (options.gpu_memory - 1) << 30  # the driver takes some of it
    problem = ""
    for changes, pipeline, tensor in itertools.product(({}, LORA), (1, 2, 4, 8), (1, 2, 4, 8)):
        found = _with_layout(settings, model, options, tensor=tensor, pipeline=pipeline)
        for section, keys in changes.items():
            found[section] |= keys
        try:
            config = load_config(None, _overrides(found))
            check_layout(config, options.gpus)
            make_ledger(config, options.gpus, gpu).check(free_bytes)
        except ValueError as error:
            problem = problem if "divide" in str(error) and problem else str(error)
            continue
        return found
    gpus = f"{options.gpus} GPU{'s' * (options.gpus > 1)} of {options.gpu_memory} GiB"
    raise ValueError(
        f"{options.model} does not fit into {gpus}: {problem.partition(': change')[0]}"
    )


def _with_layout(
    settings: dict[str, Any],
    model: ModelConfig,
    options: argparse.Namespace,
    *,
    tensor: int,
    pipeline: int,
) -> dict[str, Any]:
    """Return a copy with this layout, and with the KV memory and the sizes that go with it."""
    found, sizes = copy.deepcopy(settings), ModelSizes(model)
    rollout, engine = found["rollout"], found["sglang"]["engine_args"]
    if options.gpus == tensor:
        del found["drafter"]
        found["spot"]["enabled"] = False
        found["speculation"] |= {"strategies": ["ngram_8"], "selector": "fixed"}
        is_small = options.gpu_memory < SMALL_GPU_GIB
        most = {
            **ONE_ENGINE,
            "max_new_tokens": SMALL_GPU_NEW_TOKENS if is_small else MOST_NEW_TOKENS,
        }
        rollout |= {key: min(rollout[key], limit) for key, limit in most.items()}
    longest = found["data"]["max_prompt_tokens"] + rollout["max_new_tokens"]
    longest += draft_slack(found["speculation"]["strategies"])
    found["mcore"]["micro_batch_tokens"] = longest
    kv_bytes = int(KV_SHARE * ((options.gpu_memory - 1) << 30)) * tensor
    kv_tokens = kv_bytes // (sizes.kv * sizes.num_layers * 2)
    most_tokens = rollout["max_batch_size"] * longest
    rollout["kv_cache_tokens"] = max(longest, min(most_tokens, kv_tokens))
    found["parallel"] = {"tensor": tensor, "pipeline": pipeline}
    engine["tp_size"] = tensor
    if model.experts is not None:
        shared = math.gcd(options.gpus // pipeline, NODE_GPUS, model.experts.num_experts)
        found["parallel"]["expert"] = max(shared, 1)
        engine["moe_runner_backend"] = "triton"  # a weight update checks its layout
    return found


def slurm_script(config: Path, gpus: int) -> str:
    """Return a batch script of launch/slurm for this config, with absolute paths."""
    name = "single_node" if gpus <= NODE_GPUS else "multi_node"
    text = (ROOT / "launch" / "slurm" / f"{name}.sbatch").read_text(encoding="utf-8")
    launch = shlex.quote(f"{ROOT}/launch")
    for old, new in (
        ("--nodes=4", f"--nodes={gpus // NODE_GPUS}"),
        ("--gpus-per-node=8", f"--gpus-per-node={min(gpus, NODE_GPUS)}"),
        ("logs/%x-%j.out", "%x-%j.out"),
        ("config=${1:?CONFIG.yaml is missing}\nshift\n", f"config={shlex.quote(str(config))}\n"),
        ('"${SLURM_SUBMIT_DIR:-.}/launch/slurm/stop.sh"', f"{launch}/slurm/stop.sh"),
        ('"${PYTHON:-.venv/bin/python}"', shlex.quote(sys.executable)),
        (" launch/torchrun.py", f" {launch}/torchrun.py"),
        (" launch/pretrain_rl.py", f" {launch}/pretrain_rl.py"),
    ):
        text = text.replace(old, new)
    about = "# sbatch train.sbatch [section.key=value ...]; the run is saved and requeued before its time limit.\n"
    return "#!/usr/bin/env bash\n" + about + text[text.index("#SBATCH") :]


def _overrides(settings: dict[str, Any]) -> list[str]:
    return [f"{section}={yaml.safe_dump(keys)}" for section, keys in settings.items()]


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    add = parser.add_argument
    add("--model", required=True, help="folder of a Hugging Face model, or its id on the Hub")
    add("--data", type=Path, required=True, help=".jsonl or .parquet of prompts")
    add("--eval", type=Path, nargs="+", action="extend", help="the same, held out")
    add("--gpus", type=int, required=True, help="of the run; 0: 2 CPU ranks")
    add("--gpu-memory", type=int, default=80, metavar="GIB", help="default 80")
    add("--input-key", default="prompt", help="of a row's prompt")
    add("--label-key", default="", help="default label or reward_model.ground_truth")
    add("--out", type=Path, default=Path(), help="folder; default: this one")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit("run it as: tlt init")
