"""A machine and drafters on paper, for selectors: known seconds and acceptance for every strategy
and batch size.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from tlt_megatron.config.strategy import OFF, SpeculationStrategy
from tlt_megatron.speculation.selector import StrategySelector
from tlt_megatron.speculation.verify import accepted_by_depth

ARMS = tuple(
    SpeculationStrategy.parse(text)
    for text in ("2_1_2", "4_1_4", "6_1_6", "3_4_8", "4_4_16", "6_4_16")
)
RETRIEVING_ARMS = tuple(SpeculationStrategy.parse(text) for text in ("4_1_4", "ngram_4", "ngram_8"))


class SyntheticDecoding:
    """Steps of a plain batch cost 10 ms + 0.1 ms a row, with jumps where tiles fill. The selectors
    assume neither of these laws.
    """

    def __init__(
        self,
        *,
        seed: int,
        quality: float = 0.8,
        retrieval: float = 0.0,
        catch_up_s: float = 0.0,
        slowdown: float = 3.0,
        arms: Sequence[SpeculationStrategy] = ARMS,
    ) -> None:
        """`quality`, `retrieval`: chances that a chain's, or retrieval's, next token is accepted.
        `catch_up_s`: for each token that the learned drafter has not read. `slowdown`: how many
        times longer steps take that are held up."""
        self.quality = quality
        self.retrieval = retrieval
        self.arms = (OFF, *arms)
        self._catch_up_s = catch_up_s
        self._slowdown = slowdown
        self._rng = random.Random(seed)

    def seconds(self, strategy: SpeculationStrategy, batch_size: int, num_unread: int = 0) -> float:
        """Expected seconds of a step, without noise. `num_unread`: tokens of the batch that the
        learned drafter has not read.
        """
        rows = batch_size * strategy.num_rows
        verify = 0.010 + 1.0e-4 * 32 * math.ceil(rows / 32) ** 0.95
        draft = strategy.num_steps * (6e-4 + 1.5e-5 * batch_size * strategy.topk)
        retrieve = 2e-4 + 2e-6 * batch_size if strategy.num_retrieved else 0.0
        catch_up = self._catch_up_s * num_unread if strategy.is_learned else 0.0
        return verify + draft + retrieve + catch_up

    def rates(self, strategy: SpeculationStrategy, *, text: float = 0.0) -> list[float]:
        """Chance of each depth once the one above was accepted; `text` makes it easier or harder
        for one request.
        """
        is_chain = strategy.topk <= 1
        spare = 0.0 if is_chain else 0.55 * (1 - self.quality) * min(1.0, self.quality * 2)
        wiggle = 0.0 if is_chain else 0.03 * math.sin(7 * strategy.num_draft_tokens)
        learned = self.quality + spare + min(wiggle, self.quality / 2)
        rates = []
        for depth in range(strategy.depth):
            miss = 1.0
            if depth < strategy.num_steps:
                miss *= 1.0 - max(learned - 0.01 * depth, 0.0)
            if depth < strategy.num_retrieved:
                miss *= 1.0 - self.retrieval
            rates.append(1.0 - miss ** math.exp(text))
        return rates

    def first_by_depth(
        self, strategy: SpeculationStrategy, accepted_by_depth: Sequence[int]
    ) -> list[int] | None:
        """How many of the accepted tokens in a tree the drafter ranked first: its own quality over
        the tree's rate.
        """
        if strategy.topk <= 1:
            return None
        rates = self.rates(strategy)
        first = []
        for depth, count in enumerate(accepted_by_depth[: strategy.num_steps]):
            share = max(self.quality - 0.01 * depth, 0.0) / max(rates[depth], 1e-9)
            first.append(sum(self._rng.random() < share for _ in range(count)))
        return first

    def tokens(self, strategy: SpeculationStrategy, texts: Sequence[float] = (0.0,)) -> float:
        """Expected tokens of a step, for each request."""
        total = 0.0
        for text in texts:
            survival = 1.0
            for rate in self.rates(strategy, text=text):
                survival *= rate
                total += survival
        return 1.0 + total / len(texts)

    def tokens_per_s(self, strategy: SpeculationStrategy, batch_size: int) -> float:
        """Expected throughput."""
        return batch_size * self.tokens(strategy) / self.seconds(strategy, batch_size)

    def best(self, batch_size: int) -> SpeculationStrategy:
        """What an oracle would choose."""
        return max(self.arms, key=lambda s: self.tokens_per_s(s, batch_size))

    def step(
        self,
        strategy: SpeculationStrategy,
        batch_size: int,
        texts: Sequence[float] = (0.0,),
        num_unread: int = 0,
    ) -> tuple[list[int], float]:
        """Accepted tokens of each request, and noisy seconds: 5 %, and now and then one slow
        pass.
        """
        accepted = []
        for index in range(batch_size):
            rates, count = self.rates(strategy, text=texts[index % len(texts)]), 0
            while count < len(rates) and self._rng.random() < rates[count]:
                count += 1
            accepted.append(count)
        slowdown = self._slowdown if self._rng.random() < 0.01 else 1.0
        noise = math.exp(self._rng.gauss(0.0, 0.05))
        return accepted, self.seconds(strategy, batch_size, num_unread) * noise * slowdown


class Score:
    """Sums of expected values over a run, so luck plays no part."""

    def __init__(self) -> None:
        self.chosen: list[SpeculationStrategy] = []
        self._seconds = self._oracle_s = self._plain_s = 0.0

    def add(
        self,
        world: SyntheticDecoding,
        chosen: SpeculationStrategy,
        batch_size: int,
        texts: Sequence[float] = (0.0,),
        num_unread: int = 0,
    ) -> None:
        self.chosen.append(chosen)
        best, tokens = world.best(batch_size), world.tokens(chosen, texts)
        self._seconds += world.seconds(chosen, batch_size, num_unread)
        self._oracle_s += tokens / world.tokens(best, texts) * world.seconds(best, batch_size)
        self._plain_s += tokens * world.seconds(OFF, batch_size)

    @property
    def of_oracle(self) -> float:
        """Throughput over that of the oracle."""
        return self._oracle_s / self._seconds

    @property
    def of_plain(self) -> float:
        """Throughput over that of plain decoding."""
        return self._plain_s / self._seconds


def run_pass(
    selector: StrategySelector,
    world: SyntheticDecoding,
    score: Score,
    batch_size: int,
    texts: Sequence[float] = (0.0,),
    num_unread: int = 0,
) -> tuple[SpeculationStrategy, list[int]]:
    """One step: the strategy that is chosen for it, and the accepted tokens of each request."""
    strategy = selector.choose(batch_size).strategy
    accepted, seconds = world.step(strategy, batch_size, texts, num_unread)
    depths = accepted_by_depth(accepted, strategy.depth)
    first = world.first_by_depth(strategy, depths)
    selector.observe(strategy, batch_size, depths, seconds, first)
    score.add(world, strategy, batch_size, texts, num_unread)
    return strategy, accepted


def run_selector(
    selector: StrategySelector, world: SyntheticDecoding, batch_sizes: Sequence[int]
) -> Score:
    """One step for each batch size."""
    score = Score()
    for batch_size in batch_sizes:
        run_pass(selector, world, score, batch_size)
    return score


def run_rollout(
    selector: StrategySelector,
    world: SyntheticDecoding,
    lengths: Sequence[int],
    *,
    max_batch_size: int = 64,
    seed: int = 0,
) -> Score:
    """Requests of `lengths` tokens until all have ended; each writes a text of its own. Waiting
    ones take free places.
    """
    rng, score = random.Random(seed), Score()
    waiting = [[length, rng.gauss(0.0, 0.3), 10] for length in lengths]  # 10 unread tokens
    running: list[list[float]] = []
    while waiting or running:
        while waiting and len(running) < max_batch_size:
            running.append(waiting.pop())
        texts = [text for _, text, _ in running]
        num_unread = sum(unread for _, _, unread in running)
        strategy, accepted = run_pass(selector, world, score, len(running), texts, num_unread)
        for request, count in zip(running, accepted, strict=True):
            request[0] -= count + 1
            request[2] = 0 if strategy.is_learned else request[2] + count + 1
        running = [request for request in running if request[0] > 0]
    return score


def long_tailed_lengths(num_requests: int, *, seed: int = 0) -> list[int]:
    """Tokens of responses: median 90, one in twenty above 470, none above 515."""
    rng = random.Random(seed)
    return [
        min(max(round(90 * math.exp(rng.gauss(0.0, 1.0))), 5), 515) for _ in range(num_requests)
    ]
