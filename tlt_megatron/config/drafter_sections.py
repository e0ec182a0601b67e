"""The settings of the drafter: how it drafts, how it is trained, and on which ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from tlt_megatron.config.extensions import named
from tlt_megatron.config.ranges import NonNegative, Positive, PositiveInt, Section, one_of
from tlt_megatron.config.strategy import SpeculationStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSection(Section):
    """Speculative rollouts. They change only the time to draw tokens, not the tokens."""

    enabled: bool = False  # draft and verify in rollouts
    # folder or Hub id of an EAGLE drafter of this policy (tlt train-drafter), or own: the MTP layer
    # of the policy's checkpoint
    drafter: str = ""
    # num_steps_topk_num_draft_tokens, or ngram_N; with beg_mab also off
    strategies: list[str] = field(
        default_factory=lambda: ["2_1_2", "4_1_4", "6_1_6", "4_2_8", "6_4_16"]
    )
    # cost_model | beg_mab | fixed (the first strategy, always), or a class of yours:
    # path/to/file.py:Class | package.module:Class
    selector: Annotated[str, named("speculation.selector")] = "cost_model"
    measure_gain: bool = False  # at the end, time the rollouts of further steps with and without
    # embedded: most frequent token ids of the rollouts, the only ones that the learned drafter
    # proposes; 0: all; None: 8192 of a vocabulary of 32768 or more
    draft_vocab_size: int | None = None

    def check(self) -> None:
        try:
            _ = self.parsed_strategies
        except ValueError as error:
            raise ValueError(f"speculation.strategies: {error}") from error

    @property
    def parsed_strategies(self) -> list[SpeculationStrategy]:
        return [SpeculationStrategy.parse(text) for text in self.strategies]

    @property
    def is_learned(self) -> bool:
        """Return whether any strategy uses a learned drafter. Only off and plain n-grams do not."""
        return any(strategy.is_learned for strategy in self.parsed_strategies)

    def num_draft_ids(self, vocab_size: int) -> int:
        """Return the number of token ids that the learned drafter proposes; 0: all."""
        if self.draft_vocab_size is None:
            return 8192 if vocab_size >= 32768 else 0
        return self.draft_vocab_size if self.draft_vocab_size < vocab_size else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterSection(Section):
    """The learned drafter. One optimizer step trains on one packed batch per member."""

    # eagle: one draft step; hass: several; eagle3: several, from three layers of the policy
    algorithm: Annotated[str, one_of("eagle", "hass", "eagle3")] = "eagle"
    # eagle, hass: smooth L1 on features, per 1 of cross entropy; the papers' 1.0 : 0.1
    feature_weight: NonNegative = 10.0
    batch_tokens: PositiveInt = 4096  # packed rows; longer sequences are cut into windows
    lr: Positive = 1e-3  # constant after the first 20 updates of the drafter's life, a warm-up


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotSection(Section):
    """Drafter training on ranks that have finished, until the last rank finishes."""

    enabled: bool = False  # needs speculation.enabled and a strategy with a learned drafter
    data_bytes: PositiveInt = 256 << 20  # budget of a rank's DataBuffer
    keep_steps: PositiveInt = 1  # earlier RL steps whose sequences are kept, within data_bytes
