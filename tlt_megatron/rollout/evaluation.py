"""Evaluation on hold-out prompts with the rollout engine: its own seed, the same prompts always."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from math import comb
from statistics import fmean

from tlt_megatron.rewards.latex import without_fonts
from tlt_megatron.rollout.batch_rules import right_responses
from tlt_megatron.rollout.rollout_metrics import details_by_source
from tlt_megatron.rollout.rollout_worker import RolloutWorker
from tlt_megatron.runtime.collectives import gather_json
from tlt_megatron.types import Prompt, Rollout, SamplingParams, ScoredGroup

# the content of a box, with braces up to two deep
_BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})+)\}")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(kw_only=True)
class Evaluator:
    """Measures accuracy (the share of right responses), mean reward, pass@k and maj@k over fixed
    prompts.
    """

    worker: RolloutWorker
    data_sets: Mapping[str, Sequence[Prompt]]  # the prompts of each file by its name
    params: SamplingParams
    right_score: float = 1.0  # see `right_responses`
    # prompts of each file that are longer than data.max_prompt_tokens, by its name
    left_out: Mapping[str, int] = field(default_factory=dict)

    def evaluate(self, policy_version: int) -> dict[str, float]:
        """Return the eval/* and val-* metrics, {} without prompts. A collective of all ranks.

        With several data sets, eval/* are means over the data sets, and eval/<name>/* of each.
        """
        prompts = list(chain(*self.data_sets.values()))
        if not prompts:
            return {}
        rest = iter(self.worker.collect(prompts, self.params, policy_version).groups)
        groups = {name: list(islice(rest, len(own))) for name, own in self.data_sets.items()}
        found = {name: self._measure(own) for name, own in groups.items()}
        names = next(iter(found.values()))
        metrics = {name: fmean(own[name] for own in found.values()) for name in names}
        if len(found) > 1:
            for data_set, own in found.items():
                for name, value in own.items():
                    metrics[name.replace("eval/", f"eval/{data_set}/", 1)] = value
        named = [name_source(group, name) for name, own in groups.items() for group in own]
        return metrics | by_data_source(named)

    def _measure(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        """Return the metrics of one data set."""
        rewards = [reward for g in groups for reward in g.rewards]
        right = [right_responses(group, self.right_score) for group in groups]
        own = {  # prompts whose responses were generated here
            index: [final_answer(self._last_turn(r)) for r in group.rollouts]
            for index, group in enumerate(groups)
            if group.rollouts[0].is_here
        }
        shares = {index: majority(answers, right[index]) for index, answers in own.items()}
        found = gather_json(list(shares.items()), self.worker.replicas)
        majorities = [share for _, share in sorted(pair for part in found for pair in part)]
        lengths = [r.num_generated for g in groups for r in g.rollouts]
        return {
            "eval/accuracy": fmean(chain(*right)),
            "eval/mean_reward": fmean(rewards),
            **pass_at_k([sum(row) for row in right], self.params.num_samples),
            f"eval/maj@{self.params.num_samples}": fmean(majorities),
            "eval/response_length/mean": fmean(lengths),
        }

    def _last_turn(self, rollout: Rollout) -> str:
        """Return the text of a response, of a conversation only the last turn."""
        if rollout.transcript:
            return str(rollout.transcript.messages[-1]["content"])
        return self.worker.decode(rollout.token_ids.tolist())


def pass_at_k(num_right: Sequence[int], num_samples: int) -> dict[str, float]:
    """Return the chance that k responses hold a right one, for k = 1, 2, 4, ... and `num_samples`.

    `num_right` has the right responses of each prompt. The estimate is unbiased: 1 - C(n - c, k) /
    C(n, k) (Chen et al. 2021, arXiv 2107.03374, eq. 1).
    """
    sizes = {1 << i for i in range(num_samples.bit_length())} | {num_samples}
    return {
        f"eval/pass@{k}": fmean(
            1 - comb(num_samples - c, k) / comb(num_samples, k) for c in num_right
        )
        for k in sorted(sizes)
    }


def final_answer(text: str) -> str:
    """Return what a response answers: its last boxed text, else its last number, else its last
    line.
    """
    text = without_fonts(text)
    boxed, numbers = _BOXED.findall(text), _NUMBER.findall(text)
    answer = boxed[-1] if boxed else numbers[-1] if numbers else text.strip().rpartition("\n")[2]
    return answer.replace(",", "").strip(" $.")


def majority(answers: Sequence[str], right: Sequence[bool]) -> float:
    """Return whether the most frequent answer to a prompt is right: maj@k of all k responses.

    The first of equally frequent answers counts. If only some of its responses are right, their
    share counts.
    """
    chosen = Counter(answers).most_common(1)[0][0]
    return fmean(r for text, r in zip(answers, right, strict=True) if text == chosen)


def name_source(group: ScoredGroup, name: str) -> ScoredGroup:
    """Return the group; a prompt without a data source gets `name`, that of its file."""
    if group.prompt.data_source:
        return group
    return replace(group, prompt=replace(group.prompt, data_source=name))


def by_data_source(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Return the mean and the mean best of each data source, under verl's names.

    Rewards are under val-core, further numbers of the reward functions under val-aux.
    """
    found: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for group in groups:
        source = group.prompt.data_source or "unknown"
        found[f"val-core/{source}/reward"].append(group.rewards)
    for (source, name), rows in details_by_source(groups).items():
        found[f"val-aux/{source}/{name}"] = rows
    num_samples = len(groups[0].rewards)
    metrics = {}
    for name, rows in found.items():
        metrics[f"{name}/mean@{num_samples}"] = fmean(fmean(row) for row in rows)
        metrics[f"{name}/best@{num_samples}/mean"] = fmean(max(row) for row in rows)
    return metrics
