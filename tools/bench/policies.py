"""Policies of several entropies, each with its own drafter: early checkpoints of the tiny policy, made once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tools import make_tiny_policy, warmup_drafter

# Pre-training steps. Entropies are near 1.4, 0.75 and 0.4 nats per token; the real values are measured.
CHECKPOINT_STEPS = (100, 200, 340)
_PRETRAINING_STEPS = 360
_DRAFTER_OPTIONS = (
    *("--steps", "300", "--num-samples", "1", "--max-new-tokens", "300"),
    *("--feature-weight", "10", "--num-eval-prompts", "8"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Folders of a policy, its drafter, and its train.jsonl and eval.jsonl."""

    model: Path
    drafter: Path
    data: Path


def make_policies(folder: Path) -> list[Policy]:
    """Return the policies of CHECKPOINT_STEPS, of falling entropy. Existing ones are kept."""
    data = folder / "policies"
    steps = ",".join(map(str, CHECKPOINT_STEPS))
    make_tiny_policy.main(
        [
            *("--out", str(data), "--steps", str(_PRETRAINING_STEPS)),
            *("--checkpoint-steps", steps, "--eval-samples", "0"),
        ]
    )
    policies = [
        Policy(model=data / f"step_{s:06d}", drafter=folder / f"drafter_{s:06d}", data=data)
        for s in CHECKPOINT_STEPS
    ]
    for policy in policies:
        made, model = policy.drafter / "config.json", policy.model / "config.json"
        if not made.is_file() or made.stat().st_mtime < model.stat().st_mtime:
            files = ("--prompts", str(data / "train.jsonl"), "--eval", str(data / "eval.jsonl"))
            folders = ("--model", str(policy.model), "--out", str(policy.drafter))
            warmup_drafter.main([*folders, *files, *_DRAFTER_OPTIONS])
    return policies
