"""Whether two run folders tell of the same training: tokens, rewards, numbers, weights, and each step once."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from tests.tiny_task import answers, weights

EXACT_METRICS = (
    "critic/rewards/mean",
    "critic/rewards/max",
    "response_length/mean",
    "rollout/num_tokens",
    "actor/pg_loss",
    "actor/entropy",
    "actor/grad_norm",
    "eval/accuracy",
    "training/policy_version",
)  # the same bit for bit at an equal layout; times, and what the drafter did, are not


def differences(run_dir: Path, straight: Path, up_to: int | None = None) -> list[str]:
    """What is lost, doubled or other in `run_dir`, in words; empty if it is the straight run. `up_to`: the last step that
    is compared where `run_dir` has gone on beyond the straight run, its weights are not then."""
    import torch

    found = []
    rows, expected = metric_table(run_dir), metric_table(straight)
    if up_to is not None:
        rows = [row for row in rows if row[0] <= up_to]
    for what, count in (Counter(rows) - Counter(expected)).items():
        found.append(f"metrics.jsonl has {what} {count} times more than the straight run")
    for what, count in (Counter(expected) - Counter(rows)).items():
        found.append(f"metrics.jsonl lacks {what} ({count} times)")
    straight_answers = answers(straight)
    mine_answers = answers(run_dir)[: len(straight_answers) if up_to else None]
    if mine_answers != straight_answers:
        found.append("tokens or rewards differ from the straight run")
    if up_to is not None:
        return found
    if not (run_dir / "hf" / "config.json").is_file():
        return [*found, "no hf/ was exported"]
    mine, other = weights(run_dir), weights(straight)
    if mine.keys() != other.keys():
        return [*found, "other weights"]
    changed = [name for name in mine if not torch.equal(mine[name], other[name])]
    if changed:
        found.append(f"{len(changed)} of {len(mine)} weights differ, first {changed[0]}")
    return found


def metric_table(run_dir: Path) -> list[tuple[int, str, object]]:
    """Every (step, metric, value) of those that do not depend on time, as often as it is written."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [(row["step"], name, row[name]) for row in rows for name in EXACT_METRICS if name in row]


def saved_step(run_dir: Path) -> int:
    """The step that the pointer names; 0 without one."""
    pointer = run_dir / "checkpoints" / "latest_checkpointed_iteration.txt"
    return int(pointer.read_text()) if pointer.is_file() else 0
