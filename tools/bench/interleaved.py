"""Compares speculation with plain decoding on the same requests, side by side in one process.

Called by the speed tables. Plain decoding runs before and after every variant with small differences. A ratio uses the mean of
the two, so changes of the machine's speed affect both. Only this process's time counts. The first round is reported separately,
because selectors learn in it and a real run takes hours.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tlt_megatron.engines.base import PassRecord
from tlt_megatron.engines.embedded.engine import EmbeddedEngine
from tlt_megatron.engines.embedded.speculate import Speculation
from tlt_megatron.types import Prompt, RolloutGroup, SamplingParams
from tools.bench.measure import cpu_seconds, spread
from tools.load_engine import VERSION
from tools.warmup_drafter import accept_length

PLAIN = "off"
Clock = Callable[[Callable[[], object]], float]


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

    @property
    def mismatch_per_token(self) -> float:
        """Return first differences per token compared."""
        return self.num_differing / max(self.num_compared, 1)


class Comparison:
    """All variants and plain decoding on the same requests."""

    def __init__(
        self,
        engine: EmbeddedEngine,
        variants: Mapping[str, Variant],
        clock: Clock = cpu_seconds,
        num_warm_ups: int = 0,
    ) -> None:
        """Each variant answers its batches `num_warm_ups` times before it is timed. On a GPU it captures its graphs then."""
        self._engine = engine
        self._clock = clock
        self._num_warm_ups = num_warm_ups
        self._variants = variants
        self.records = {name: Record() for name in variants}
        self.plain = Record()

    def run_round(
        self, batches: Sequence[Sequence[Prompt]], params: SamplingParams, names: Sequence[str]
    ) -> None:
        """Run one round over the variants `names`. Each answers every batch, one after the other."""
        order = with_plain(names, {name for name in names if self._variants[name].is_close})
        ran = [self._run(name, batches, params) for name in order]
        plain_at = [index for index, name in enumerate(order) if name == PLAIN]
        plain_tokens = ran[0][1]
        for index, (name, (seconds, tokens, passes, length)) in enumerate(
            zip(order, ran, strict=True)
        ):
            record = self.plain if name == PLAIN else self.records[name]
            record.seconds_per_token.append(seconds)
            record.passes.append(passes)
            if name == PLAIN:
                continue
            before = max(at for at in plain_at if at < index)
            after = min(at for at in plain_at if at > index)
            record.ratios.append((ran[before][0] + ran[after][0]) / 2 / seconds)
            record.accept_lengths.append(length)
            num_differing, num_compared = differences(plain_tokens, tokens)
            record.num_differing += num_differing
            record.num_compared += num_compared

    def _run(
        self, name: str, batches: Sequence[Sequence[Prompt]], params: SamplingParams
    ) -> tuple[float, list[list[int]], list[PassRecord], float]:
        engine = self._engine
        engine.set_speculation(None if name == PLAIN else self._variants[name].speculation)
        warm_up = dataclasses.replace(params, num_samples=1, max_new_tokens=1)
        engine.generate(batches[0][:1], warm_up, policy_version=VERSION)  # allocates the KV
        for prompts in [*batches] * self._num_warm_ups:
            engine.generate(prompts, params, policy_version=VERSION)
        groups: list[RolloutGroup] = []
        passes: list[PassRecord] = []
        seconds = 0.0
        for prompts in batches:
            seconds += self._clock(
                lambda p=prompts: groups.extend(engine.generate(p, params, policy_version=VERSION))
            )
            passes += engine.take_passes()
        tokens = [r.token_ids.tolist() for g in groups for r in g.rollouts]
        return seconds / sum(map(len, tokens)), tokens, passes, accept_length(groups)

    @property
    def plain_tokens_per_s(self) -> float:
        """Return the median over all runs."""
        return 1.0 / statistics.median(self.plain.seconds_per_token)


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


def differences(plain: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return (first differences, tokens compared).

    Two candidates closer than the rounding error may swap, and tokens after such a swap belong to another text.
    """
    num_differing = num_compared = 0
    for a, b in zip(plain, other, strict=True):
        first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        num_differing += first is not None
        num_compared += len(a) if first is None else first + 1
    return num_differing, num_compared
