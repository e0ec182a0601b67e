"""Compares speculation with plain decoding on the same requests, side by side in one process.

Plain decoding runs before and after every variant. A ratio uses the mean of the two, so changes of
the machine's speed affect both. The first round warms up and does not count, because selectors
learn in it and a real run takes hours.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tlt_megatron.engines.embedded.speculate import Speculation
from tlt_megatron.types import Prompt, RolloutGroup, SamplingParams
from tools.bench.measure import Spread, cpu_seconds, first_differences, spread
from tools.commands.load_engine import LoadedPolicy, accept_length

PLAIN = "off"


@dataclass(slots=True, kw_only=True)
class Record:
    """The results of one variant, by round."""

    ratios: list[float] = field(default_factory=list)  # plain seconds over its own, per token
    accept_lengths: list[float] = field(default_factory=list)
    num_compared: int = 0  # tokens compared with those of plain decoding
    num_differing: int = 0

    @property
    def ratio(self) -> Spread:
        """Return the spread over all rounds except the first."""
        return spread(self.ratios[1:] or self.ratios)


class Comparison:
    """All variants and plain decoding on the same requests.

    Only the CPU time of this process counts.
    """

    def __init__(self, policy: LoadedPolicy, variants: Mapping[str, Speculation]) -> None:
        self._policy = policy
        self._variants = variants
        self.records = {name: Record() for name in variants}
        self._plain_token_s: list[float] = []

    def run_round(self, batches: Sequence[Sequence[Prompt]], params: SamplingParams) -> None:
        """Run all variants. Each answers every batch, one after the other."""
        order = with_plain(list(self._variants))
        ran = [self._run(name, batches, params) for name in order]
        seconds = [spent / sum(map(len, tokens)) for spent, tokens in ran]
        self._plain_token_s += seconds[::2]
        for index in range(1, len(order), 2):
            record = self.records[order[index]]
            plain = (seconds[index - 1] + seconds[index + 1]) / 2
            record.ratios.append(plain / seconds[index])
            pairs = zip(ran[0][1], ran[index][1], strict=True)
            num_differing, num_compared = first_differences(pairs)
            record.num_differing += num_differing
            record.num_compared += num_compared

    def _run(
        self, name: str, batches: Sequence[Sequence[Prompt]], params: SamplingParams
    ) -> tuple[float, list[list[int]]]:
        """Return the seconds and the tokens of all responses. Record the accept length."""
        policy = self._policy
        policy.engine.set_speculation(self._variants.get(name))
        warm_up = dataclasses.replace(params, num_samples=1, max_new_tokens=1)
        policy.generate(batches[0][:1], warm_up)  # allocates the KV
        groups: list[RolloutGroup] = []
        seconds = 0.0
        for prompts in batches:
            seconds += cpu_seconds(lambda p=prompts: groups.extend(policy.generate(p, params)))
        if name != PLAIN:
            self.records[name].accept_lengths.append(accept_length(groups))
        return seconds, [r.token_ids.tolist() for group in groups for r in group.rollouts]

    @property
    def plain_tokens_per_s(self) -> float:
        """Return the median over all runs."""
        return 1.0 / statistics.median(self._plain_token_s)


def mismatch_per_token(records: Collection[Record]) -> float:
    """Return the responses that differ from plain decoding, per token compared."""
    return sum(r.num_differing for r in records) / max(sum(r.num_compared for r in records), 1)


def with_plain(names: Sequence[str]) -> list[str]:
    """Return the order of a round: plain decoding before and after each of `names`."""
    return [PLAIN, *(each for name in names for each in (name, PLAIN))]
