"""Every response of every step as JSON lines: to read, and to prove that two runs did the same work."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from tlt_megatron.types import ScoredGroup


class RolloutLog:
    """<run.dir>/rollouts/step_0000001.jsonl, one line for each response, in the order of the draws."""

    def __init__(self, folder: Path, decode: Callable[[Sequence[int]], str]) -> None:
        self.folder = folder
        self.decode = decode

    def write(self, step: int, groups: Sequence[ScoredGroup]) -> None:
        """Write (or, after a resume, rewrite) the file of `step`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / f"step_{step:07d}.jsonl", "w", encoding="utf-8") as file:
            for scored in groups:
                for rollout, reward in zip(scored.group.rollouts, scored.rewards, strict=True):
                    tokens = rollout.token_ids.tolist()
                    row = {
                        "prompt_id": rollout.prompt_id,
                        "draw_index": rollout.draw_index,
                        "sample_index": rollout.sample_index,
                        "policy_version": rollout.policy_version,
                        "prompt": self.decode(rollout.prompt_ids),
                        "response": self.decode(tokens),
                        "reward": reward,
                        "finish_reason": rollout.finish_reason,
                        "token_ids": tokens,
                        "accept_lengths": rollout.accept_lengths,
                    }
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
