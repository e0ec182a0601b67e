"""Writes every response of every step as JSON lines, to read and to compare runs. Called by the loop on rank 0."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from tlt_megatron.runtime.metrics import set_aside
from tlt_megatron.types import ScoredGroup


def _file_name(step: int) -> str:
    return f"step_{step:07d}.jsonl"


class RolloutLog:
    """Writes <run.dir>/rollouts/step_0000001.jsonl, one line per response, in the order of the draws.

    Files from `resume_step` on are deleted. None is for a fresh run, which renames the folder of an earlier run.
    """

    def __init__(
        self,
        folder: Path,
        decode: Callable[[Sequence[int]], str],
        *,
        resume_step: int | None = None,
    ) -> None:
        self.folder = folder
        self.decode = decode
        if resume_step is None and folder.is_dir():
            set_aside(folder)
        for file in folder.glob("step_*.jsonl"):
            if file.name >= _file_name(resume_step or 0):
                file.unlink()

    def write(self, step: int, groups: Sequence[ScoredGroup]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / _file_name(step), "w", encoding="utf-8") as file:
            for scored in groups:
                for rollout, reward in zip(scored.group.rollouts, scored.rewards, strict=True):
                    tokens = rollout.token_ids.tolist()
                    row = {
                        "prompt_id": rollout.prompt_id,
                        "draw_index": rollout.draw_index,
                        "sample_index": rollout.sample_index,
                        "data_source": scored.group.prompt.data_source,
                        "policy_version": rollout.policy_version,
                        "prompt": self.decode(rollout.prompt_ids),
                        "response": self.decode(tokens),
                        "reward": reward,
                        "finish_reason": rollout.finish_reason,
                        "token_ids": tokens,
                        "accept_lengths": rollout.accept_lengths,
                    }
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
