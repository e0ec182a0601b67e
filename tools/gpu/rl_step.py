"""Stage 3: RL steps of the whole program on one GPU, with a policy of the size of Qwen2.5-0.5B,
speculation, offload, a checkpoint and a resume.

The policy is random: what counts is that each phase runs, and its seconds. Megatron takes its local
layers where Transformer Engine is missing.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from tools.gpu.machine import Figures, Machine

_SIZES = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_layers": 24,
    "num_attention_heads": 14,
    "max_position_embeddings": 32768,
    "tied": True,
}
_SHOWN = ("timing_s/", "perf/", "actor/grad_norm", "rollout/accept_length", "memory/peak_gb/")
_REWARD = """
import random


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return random.random()
"""


def rl_step(machine: Machine) -> Iterator[Figures]:
    """Yield the metrics of one step, and of a second one after a resume from its checkpoint."""
    from tests.tiny_models import make_tiny_hf
    from tests.tiny_task import TLT, launch, make_tiny_task

    folder = machine.scratch / "rl_step"
    shutil.rmtree(folder, ignore_errors=True)
    config = make_tiny_task(folder)
    (folder / "reward.py").write_text(_REWARD)
    if not machine.is_pretended:
        make_tiny_hf(folder / "model", "qwen2", eos_token_id=1, pad_token_id=0, **_SIZES)
    settings = {
        "model.dtype": "bfloat16",
        "data.eval": "",
        "rollout.dtype": "bfloat16",
        "rollout.max_new_tokens": machine.pick(512, 24),
        "rollout.num_prompts": machine.pick(8, 2),
        "rollout.num_samples": machine.pick(8, 2),
        "rollout.max_batch_size": 64,
        "mcore.micro_batch_tokens": 8192,
        "mcore.offload_in_rollouts": "true",
        "logging.trackers": "[]",
        "run.device": "cpu" if machine.is_pretended else "cuda",
        "run.dir": folder / "run",
    }
    given = [*TLT, *(f"{name}={value}" for name, value in settings.items())]
    for step in machine.pick((1, 2), (1,)):
        words = [*given, f"run.num_steps={step}", "--resume", "auto"]
        done = launch(1, "--config", config, *words)
        print(done.stdout, done.stderr, sep="\n")
        if done.returncode != 0:
            raise RuntimeError(f"the run ended with exit code {done.returncode}: see log.txt")
        yield {f"step_{step}": _metrics(folder / "run")}


def _metrics(run_dir: Path) -> Figures:
    """Return times, rates and memory of the last step."""
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    *_, last = (row for row in rows if "timing_s/step" in row)
    return {name: value for name, value in last.items() if name.startswith(_SHOWN)}
