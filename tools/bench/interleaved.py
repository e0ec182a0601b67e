"""Compares speculation with plain decoding on the same requests, side by side in one process.

Plain decoding runs before and after every variant with small differences. A ratio uses the mean of the two, so changes of the
machine's speed affect both. The first round is reported separately, because selectors learn in it and a real run takes hours.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tlt_megatron.engines.base import PassRecord
from tlt_megatron.engines.embedded.speculate import Speculation
from tlt_megatron.types import Prompt, RolloutGroup, SamplingParams
from tools.bench.measure import cpu_seconds, first_differences, spread, wall_seconds
from tools.load_engine import LoadedPolicy, accept_length

PLAIN = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A way to decode. With `is_close`, plain decoding runs right before and right after, to judge small differences."""

    speculation: Speculation
    is_close: bool = False


@dataclass(slots=True, kw_only=True)
class Record:
    """The results of one variant, by round."""

    ratios: list[float] = field(default_factory=list)  # plain seconds over its own, per token
    seconds_per_token: list[float] = field(default_factory=list)
    accept_lengths: list[float] = field(default_factory=list)
    passes: list[list[PassRecord]] = field(default_factory=list)
    num_compared: int = 0  # tokens compared with those of plain decoding
    num_differing: int = 0

    @property
    def ratio(self) -> dict[str, float]:
        """Return the spread over all rounds except the first, which is added as `first_round`."""
        return {**spread(self.ratios[1:] or self.ratios), "first_round": self.ratios[0]}


class Comparison:
    """All variants and plain decoding on the same requests.

    On a GPU, wall time counts, and each variant answers its batches once before it is timed: it captures its graphs then. On
    a CPU, only the time of this process counts.
    """

    def __init__(
        self, policy: LoadedPolicy, variants: Mapping[str, Variant], *, is_cuda: bool
    ) -> None:
        self._policy = policy
        self._clock = wall_seconds if is_cuda else cpu_seconds
        self._num_warm_ups = int(is_cuda)
        self._variants = variants
        self.records = {name: Record() for name in variants}
        self.plain = Record()

    def run_round(
        self, batches: Sequence[Sequence[Prompt]], params: SamplingParams, names: Sequence[str]
    ) -> None:
        """Run one round over the variants `names`. Each answers every batch, one after the other."""
        order = with_plain(names, {name for name in names if self._variants[name].is_close})
        ran = [self._run(name, batches, params) for name in order]
        seconds = [spent / sum(map(len, tokens)) for spent, tokens in ran]
        plain_at = [index for index, name in enumerate(order) if name == PLAIN]
        for index, name in enumerate(order):
            if name == PLAIN:
                self.plain.seconds_per_token.append(seconds[index])
                continue
            record = self.records[name]
            record.seconds_per_token.append(seconds[index])
            before = max(at for at in plain_at if at < index)
            after = min(at for at in plain_at if at > index)
            record.ratios.append((seconds[before] + seconds[after]) / 2 / seconds[index])
            num_differing, num_compared = first_differences(
                zip(ran[0][1], ran[index][1], strict=True)
            )
            record.num_differing += num_differing
            record.num_compared += num_compared

    def _run(
        self, name: str, batches: Sequence[Sequence[Prompt]], params: SamplingParams
    ) -> tuple[float, list[list[int]]]:
        """Return the seconds and the tokens of all responses. Records passes and accept lengths."""
        policy, engine = self._policy, self._policy.engine
        record = self.plain if name == PLAIN else self.records[name]
        engine.set_speculation(None if name == PLAIN else self._variants[name].speculation)
        warm_up = dataclasses.replace(params, num_samples=1, max_new_tokens=1)
        policy.generate(batches[0][:1], warm_up)  # allocates the KV
        for prompts in [*batches] * self._num_warm_ups:
            policy.generate(prompts, params)
        groups: list[RolloutGroup] = []
        passes: list[PassRecord] = []
        seconds = 0.0
        for prompts in batches:
            seconds += self._clock(lambda p=prompts: groups.extend(policy.generate(p, params)))
            passes += engine.take_passes()
        record.passes.append(passes)
        record.accept_lengths.append(accept_length(groups))
        return seconds, [r.token_ids.tolist() for group in groups for r in group.rollouts]

    @property
    def plain_tokens_per_s(self) -> float:
        """Return the median over all runs."""
        return 1.0 / statistics.median(self.plain.seconds_per_token)


def mismatch_per_token(records: Collection[Record]) -> float:
    """Return the responses that differ from plain decoding, per token compared."""
    return sum(r.num_differing for r in records) / max(sum(r.num_compared for r in records), 1)


def with_plain(names: Sequence[str], close: Collection[str]) -> list[str]:
    """Insert plain decoding into `names`: first, last, around each one in `close`, and after every second other one."""
    order = [PLAIN]
    for name in names:
        has_two = order[-1] != PLAIN and order[-2] != PLAIN
        if has_two or (name in close and order[-1] != PLAIN):
            order.append(PLAIN)
        order.append(name)
        if name in close:
            order.append(PLAIN)
    return order if order[-1] == PLAIN else [*order, PLAIN]
