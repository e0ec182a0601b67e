"""Compares two drafters on the newest responses, as the engine would use them.

Each rank does so in its idle time, before it trains on these responses, with the strategies that
its own engine has just used (`drafter/acceptance.py`). `Comparison.merge` joins the results of all
ranks. The target changes in every RL step, so the published drafter is measured anew too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.drafter.acceptance import Replay
from tlt_megatron.drafter.drafter_trainer import DrafterTrainer
from tlt_megatron.engines.base import PassRecord, RolloutEngine
from tlt_megatron.speculation.sampling import request_seed
from tlt_megatron.types import MIN_DRAFT_TOKENS, DraftSequence, SamplingParams

_ROWS = (
    512  # to draft again, per rank: enough to compare drafters, in a small part of the idle time
)
_BLOCK_ROWS = 64  # a dozen passes, so that one block says little about the next
_LEAST_SHARE = 0.1  # strategies with a smaller share of the tokens are not measured


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Comparison:
    """Passes that two drafters need for the same tokens, by block of consecutive rows, float64."""

    tokens_B: Tensor
    candidate_B: Tensor  # passes
    published_B: Tensor  # passes

    @staticmethod
    def merge(parts: Sequence[Comparison]) -> Comparison:
        """Return the blocks of all `parts`, e.g. of all ranks."""
        return Comparison(
            tokens_B=torch.cat([part.tokens_B for part in parts]),
            candidate_B=torch.cat([part.candidate_B for part in parts]),
            published_B=torch.cat([part.published_B for part in parts]),
        )

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that the passes commit."""
        return round(self.tokens_B.sum().item())

    @property
    def accept_lengths(self) -> tuple[float, float]:
        """Return tokens per pass of candidate and published drafter; nan without tokens."""
        num_tokens = self.tokens_B.sum()
        return (num_tokens / self.candidate_B.sum()).item(), (
            num_tokens / self.published_B.sum()
        ).item()

    @property
    def standard_error(self) -> float:
        """Return the standard error of the difference of the accept lengths, from the spread of
        the difference over blocks.
        """
        saved_B = self.published_B - self.candidate_B
        spread_B = saved_B - self.tokens_B * saved_B.sum() / self.tokens_B.sum()
        num_passes = self.candidate_B.sum() * self.published_B.sum()
        return (spread_B.norm() * self.tokens_B.sum() / num_passes).item()


class Holdout:
    """This rank's newest responses and passes, on which drafters are compared.

    It keeps a random sample of the responses. A text that came before counts too: the engines will
    draft it again. A rank that finishes last has no time to compare. It takes its responses, among
    them the long tail, to the next step. Nobody has trained on them before.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        params: SamplingParams,
        strategies: Iterable[SpeculationStrategy],
    ) -> None:
        """`strategies` are those of the run, `params` those of its rollouts."""
        self._engine, self._params = engine, params
        self._learned = [strategy for strategy in strategies if strategy.is_learned]
        self._tokens: Counter[SpeculationStrategy] = Counter()  # in this step's passes
        self._sample: dict[int, DraftSequence] = {}  # by seed, which is random
        self._is_old = True  # the sample is of the last step
        self._is_compared = True
        self._late: dict[int, DraftSequence] = {}  # the sample of the last step, if not compared

    def start_step(self) -> None:
        """Forget the passes of the last step, and its responses once there are new ones."""
        self._tokens.clear()
        self._is_old = True

    def add(self, sequence: DraftSequence) -> None:
        """Add a response. Its tensors must not change."""
        if self._is_old:
            self._late = {} if self._is_compared else self._sample
            self._sample, self._is_old, self._is_compared = {}, False, False
        if sequence.request is not None:
            seed = request_seed(self._params.seed, *sequence.request)
            self._sample[seed] = _part(sequence, seed)
        while len(self._sample) > 1 and sum(map(_num_drafted, self._sample.values())) > _ROWS:
            del self._sample[max(self._sample)]

    def add_passes(self, passes: Iterable[PassRecord]) -> None:
        """Count the tokens of this step's passes by strategy."""
        for each in passes:
            self._tokens[SpeculationStrategy.parse(each.strategy)] += each.num_committed

    @property
    def shares(self) -> dict[SpeculationStrategy, float]:
        """Return the share of each strategy in the tokens of the learned drafter. Without any, all
        are alike.
        """
        tokens = {strategy: self._tokens[strategy] for strategy in self._learned}
        least = _LEAST_SHARE * sum(tokens.values())
        tokens = {strategy: count for strategy, count in tokens.items() if count > least}
        tokens = tokens or dict.fromkeys(self._learned, 1)
        return {strategy: n / sum(tokens.values()) for strategy, n in tokens.items()}

    def compare(
        self,
        trainer: DrafterTrainer,
        *,
        candidate: Mapping[str, Tensor],
        published: Mapping[str, Tensor],
    ) -> Comparison | None:
        """Compare two drafters, and restore the trainer's own. None without responses."""
        if not self._sample:
            return None
        sequences = [each for _, each in sorted((self._late | self._sample).items())]
        replay = Replay(sequences, self._params, trainer.device, self._engine.drafted_ids())
        shares = self.shares
        passes = []
        for weights in (candidate, published):
            with trainer.holding(weights):
                starts = replay.starts(trainer.model, [*shares])
            passes.append(sum(share * x for share, x in zip(shares.values(), starts, strict=True)))
        self._is_compared = True
        tokens_B, candidate_B, published_B = map(_by_block, (replay.is_committed_P, *passes))
        return Comparison(tokens_B=tokens_B, candidate_B=candidate_B, published_B=published_B)


def _num_drafted(sequence: DraftSequence) -> int:
    return sequence.num_rows - sequence.loss_start


def _part(sequence: DraftSequence, seed: int) -> DraftSequence:
    """Return a sequence of which at most `_ROWS` rows are drafted again, at a place that `seed`
    chooses. The rows before it are context.
    """
    spare = _num_drafted(sequence) - _ROWS
    if spare <= 0 or sequence.request is None:
        return sequence
    skipped = seed % (spare + 1)
    start = sequence.loss_start + skipped
    stop = start + _ROWS + MIN_DRAFT_TOKENS - 1
    draw_index, sample_index, position = sequence.request
    hidden, mask = sequence.final_hidden, sequence.loss_mask
    return DraftSequence(
        token_ids=sequence.token_ids[:stop],
        features=sequence.features[:stop],
        final_hidden=None if hidden is None else hidden[:stop],
        loss_start=start,
        loss_mask=None if mask is None else mask[:stop],
        request=(draw_index, sample_index, position + skipped),
    )


def _by_block(values_P: Tensor) -> Tensor:
    """Return the sums over blocks of rows."""
    return torch.stack([block.double().sum() for block in values_P.split(_BLOCK_ROWS)])
