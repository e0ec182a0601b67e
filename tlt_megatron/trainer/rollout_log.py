"""Writes every response of every step as JSON lines, to read and to compare runs. Called by the loop on rank 0."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tlt_megatron.runtime.metrics import set_aside
from tlt_megatron.types import Rollout, ScoredGroup

if TYPE_CHECKING:
    from tlt_megatron.data.tokenizer import Tokenizer

_NUM_SAMPLES = 16  # responses of a step that trackers get


def _file_name(step: int) -> str:
    return f"step_{step:07d}.jsonl"


class RolloutLog:
    """Writes <run.dir>/rollouts/step_0000001.jsonl, one line per response, in the order of the draws.

    Files from `resume_step` on are deleted. None is for a fresh run, which renames the folder of an earlier run.
    """

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, *, resume_step: int | None = None
    ) -> None:
        self.folder = folder
        self.tokenizer = tokenizer
        if resume_step is None and folder.is_dir():
            set_aside(folder)
        for file in folder.glob("step_*.jsonl"):
            if file.name >= _file_name(resume_step or 0):
                file.unlink()

    def write(
        self,
        step: int,
        groups: Sequence[ScoredGroup],
        differences: Mapping[tuple[int, int], float],
    ) -> list[dict[str, object]]:
        """Write the responses of a step and return the first ones. `differences` as in `TrainedStep`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        first: list[dict[str, object]] = []
        with open(self.folder / _file_name(step), "w", encoding="utf-8") as file:
            for scored in groups:
                for rollout, reward in zip(scored.group.rollouts, scored.rewards, strict=True):
                    difference = differences.get((rollout.draw_index, rollout.sample_index))
                    row = {
                        **self._row(rollout),
                        "data_source": scored.group.prompt.data_source,
                        "reward": reward,
                        "logprob_diff": difference,
                    }
                    if rollout.transcript:
                        row |= dataclasses.asdict(rollout.transcript)
                    if rollout.loss_mask is not None:
                        row["loss_mask"] = rollout.loss_mask.int().tolist()
                    if rollout.versions:  # of a response that was carried
                        row["versions"] = rollout.versions
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                    if len(first) < _NUM_SAMPLES:
                        first.append(row)
        return first

    def _row(self, rollout: Rollout) -> dict[str, object]:
        tokens = rollout.token_ids.tolist()
        return {
            "prompt_id": rollout.prompt_id,
            "draw_index": rollout.draw_index,
            "sample_index": rollout.sample_index,
            "policy_version": rollout.policy_version,
            "prompt": self.tokenizer.decode(rollout.prompt_ids),
            "response": self.tokenizer.decode(tokens),
            "finish_reason": rollout.finish_reason,
            "token_ids": tokens,
            "accept_lengths": rollout.accept_lengths,
            "verify_starts": rollout.verify_starts,
        }
