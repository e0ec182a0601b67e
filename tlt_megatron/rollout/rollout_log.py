"""Writes every response of every step as JSON lines, to read and to compare runs.

The ranks that train on a response write it: one for each data-parallel index.
"""

from __future__ import annotations

import dataclasses
import json
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from tlt_megatron.data.tokenizer import Tokenizer
from tlt_megatron.runtime.metrics import set_aside
from tlt_megatron.types import Rollout, RolloutKey, ScoredGroup

_NUM_SAMPLES = 16  # responses of a step that trackers get


@dataclass
class RolloutLog:
    """Writes <run.dir>/rollouts/step_0000001.rank_00000.jsonl, one line per response, in the order
    of the draws.
    """

    folder: Path
    tokenizer: Tokenizer
    rank: int

    def begin(self, resume_step: int | None) -> None:
        """Delete the files of all ranks from `resume_step` on. None is for a fresh run, which
        renames the folder of an earlier run.

        Only one rank calls it, before any writes.
        """
        if resume_step is None and self.folder.is_dir():
            set_aside(self.folder)
        for file in self.folder.glob("step_*.jsonl"):
            if file.name >= f"step_{resume_step or 0:07d}":
                file.unlink()

    def write(
        self,
        step: int,
        groups: Sequence[ScoredGroup],
        own: Collection[RolloutKey],
        differences: Mapping[RolloutKey, float],
    ) -> list[dict[str, object]]:
        """Write the responses `own` of a step and return the first ones. `differences` as in
        `TrainedStep`.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        first: list[dict[str, object]] = []
        path = self.folder / f"step_{step:07d}.rank_{self.rank:05d}.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for scored in groups:
                for rollout, reward in zip(scored.rollouts, scored.rewards, strict=True):
                    if rollout.key not in own:
                        continue
                    difference = differences.get(rollout.key)
                    row = {
                        **self._row(rollout),
                        "data_source": scored.prompt.data_source,
                        "reward": reward,
                        "logprob_diff": difference,
                    }
                    if rollout.transcript:
                        row |= dataclasses.asdict(rollout.transcript)
                        row["turn_lengths"] = [turn.num_tokens for turn in rollout.outline.turns]
                        row["turn_drafted"] = _drafted_in_turns(rollout)
                    if rollout.loss_mask is not None:
                        row["loss_mask"] = rollout.loss_mask.int().tolist()
                    if len(rollout.versions) > 1:  # a carried response
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
            "response": self.tokenizer.decode_turn(tokens),
            "finish_reason": rollout.finish_reason,
            "token_ids": tokens,
            "accept_lengths": rollout.accept_lengths,
        }


def _drafted_in_turns(rollout: Rollout) -> list[int]:
    """Return how many tokens of each turn a drafter proposed: all of a pass but its bonus token."""
    ends = list(accumulate(turn.num_tokens for turn in rollout.outline.turns))
    drafted = [0] * len(ends)
    drawn = None if rollout.loss_mask is None else [0, *rollout.loss_mask.cumsum(0).tolist()]
    for position, count in rollout.passes:
        index = position - len(rollout.prompt_ids)  # in the response
        num_before = index if drawn is None else drawn[index]
        drafted[bisect_right(ends, num_before)] += count - 1
    return drafted
