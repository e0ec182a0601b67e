"""Stage 3: RL steps of the whole program on one GPU, with speculation, offload, a checkpoint and a
resume.

The policies are random: what counts is that each phase runs, and its seconds. Megatron takes its
local layers where Transformer Engine is missing.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.hf_io import save_hf_model
from tools.gpu.machine import Figures, Machine
from tools.gpu.random_engine import random_weights
from tools.gpu.shapes import MODEL_CONFIGS

_REPO = Path(__file__).resolve().parents[2]
_TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}  # fmt: skip
_SHOWN = ("timing_s/", "perf/", "actor/grad_norm", "rollout/accept_length", "memory/peak_gb/")
_REWARD = """
import random


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return random.random()
"""


def rl_step(machine: Machine, policy: str) -> Iterator[Figures]:
    """Yield the metrics of one step, and of a second one after a resume from its checkpoint."""
    folder = machine.scratch / f"rl_{policy}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "reward.py").write_text(_REWARD)
    small = machine.scratch / "tiny_policy"
    _python("-m", "tools.tiny_models.make_tiny_policy", "--out", str(small), "--steps", "2")
    if policy == "half_b":
        model = folder / "model"
        config = json.loads((MODEL_CONFIGS / "qwen2.5-0.5b" / "config.json").read_text())
        _write_random(model, config | machine.pick({}, _TINY), small)
    else:
        model, extra = folder / "model", machine.pick(8, 1)
        words = (f"--model={small}", f"--extra={extra}", f"--out={model}")
        _python("-m", "tools.tiny_models.expand_layers", *words)
    settings = {
        "model.path": model,
        "model.dtype": "bfloat16",
        "data.train": small / "train.jsonl",
        "data.eval": "",
        "reward.function": f"{folder}/reward.py:compute_score",
        "rollout.dtype": "bfloat16",
        "rollout.max_new_tokens": machine.pick(512, 24),
        "rollout.num_prompts": machine.pick(8, 2),
        "rollout.num_samples": machine.pick(8, 2),
        "speculation.measure_gain": "false",
        "mcore.offload_in_rollouts": "true",
        "logging.trackers": "[]",
        "run.device": "cpu" if machine.is_cpu else "cuda",
        "run.dir": folder / "run",
    }
    given = [f"{name}={value}" for name, value in settings.items()]
    _train([*given, "run.num_steps=1"])
    yield {"step_1": _metrics(folder / "run")}
    _train([*given, "run.num_steps=2", "--resume", "auto"])
    yield {"step_2": _metrics(folder / "run")}


def _train(arguments: Sequence[str]) -> None:
    _python(
        *("launch/torchrun.py", "--standalone", "--local-addr", "127.0.0.1"),
        *("--nproc-per-node", "1", "launch/pretrain_rl.py", "--config", "examples/quickstart.yaml"),
        *arguments,
    )


def _python(*arguments: str) -> None:
    done = subprocess.run([sys.executable, *arguments], cwd=_REPO, check=False)
    if done.returncode != 0:
        name = " ".join(arguments[:2])
        raise RuntimeError(f"{name} ended with exit code {done.returncode}: see log.txt")


def _metrics(run_dir: Path) -> Figures:
    """Return times, rates and memory of the last step."""
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    *_, last = (row for row in rows if "timing_s/step" in row)
    return {name: value for name, value in last.items() if name.startswith(_SHOWN)}


def _write_random(folder: Path, config: dict[str, object], tokenizer: Path) -> None:
    """Write a Hugging Face folder of a model with random weights and the tokenizer of another
    folder, which has few tokens.
    """
    source = folder.with_name("source")
    shutil.copytree(tokenizer, source)
    (source / "config.json").write_text(json.dumps(config))
    tensors = random_weights(load_model_config(source), torch.device("cpu"))
    save_hf_model(folder, tensors, source, dtype=torch.bfloat16)
