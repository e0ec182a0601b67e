"""Policies of several entropies, each with its own drafter: early checkpoints of the tiny policy.

Made once and kept in a folder. Called by tools/bench/speculation.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from tlt_megatron.config.schema import DataSection, DrafterSection
from tlt_megatron.data.prompts import load_prompts
from tlt_megatron.data.tokenizer import load_tokenizer
from tlt_megatron.drafter.checkpoint import save_drafter
from tlt_megatron.drafter.trainer import DrafterTrainer
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.draft_model import DraftModel, make_draft_config
from tlt_megatron.types import SamplingParams
from tools import make_tiny_policy
from tools.load_engine import MAX_PROMPT_TOKENS, load_engine
from tools.warmup_drafter import collect_sequences, train_drafter

# Pre-training steps. Entropies are near 1.4, 0.75 and 0.4 nats per token; the real values are measured.
CHECKPOINT_STEPS = (100, 200, 340)
_PRETRAINING_STEPS = 360
_DRAFTER_STEPS = 300
_DRAFTER_DONE = "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Folders of a policy, its drafter and its prompts."""

    model: Path
    drafter: Path
    train: Path
    eval: Path


def make_policies(folder: Path, console: Console) -> list[Policy]:
    """Return the policies of CHECKPOINT_STEPS, of falling entropy. Existing ones are kept."""
    make_tiny_policy.main(
        [
            *("--out", str(folder / "policies"), "--steps", str(_PRETRAINING_STEPS)),
            *("--checkpoint-steps", ",".join(map(str, CHECKPOINT_STEPS)), "--eval-samples", "0"),
        ]
    )
    data = folder / "policies"
    policies = [
        Policy(
            model=data / f"step_{step:06d}",
            drafter=folder / f"drafter_{step:06d}",
            train=data / "train.jsonl",
            eval=data / "eval.jsonl",
        )
        for step in CHECKPOINT_STEPS
    ]
    for policy in policies:
        if not _is_newer(policy.drafter / _DRAFTER_DONE, policy.model / "config.json"):
            console.print(f"a drafter for {policy.model}")
            _warm_up(policy, console)
    return policies


def _is_newer(path: Path, other: Path) -> bool:
    return path.is_file() and path.stat().st_mtime >= other.stat().st_mtime


def _warm_up(policy: Policy, console: Console) -> None:
    """Train a drafter on the policy's own answers, like tools/warmup_drafter.py."""
    engine = load_engine(policy.model, dtype="float32", max_new_tokens=300)
    tokenizer = load_tokenizer(policy.model)
    section = DataSection(max_prompt_tokens=MAX_PROMPT_TOKENS)
    prompts = load_prompts(str(policy.train), tokenizer, section).prompts(256)
    params = SamplingParams(max_new_tokens=300, stop_token_ids=tokenizer.stop_token_ids, seed=0)
    sequences = collect_sequences(engine, prompts, params)
    embedding, head = engine.target_tensors()
    config = make_draft_config(load_model_config(policy.model), "eagle", embedding)
    model = DraftModel(config, embedding_VD=embedding, lm_head_VD=head)
    trainer = DrafterTrainer(model, DrafterSection(algorithm="hass", lr=3e-3))
    train_drafter(
        trainer, sequences, num_steps=_DRAFTER_STEPS, batch_tokens=2048, seed=0, console=console
    )
    save_drafter(policy.drafter, model)
