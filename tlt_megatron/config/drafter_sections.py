"""The settings of the drafter: how it drafts, how it is trained, and on which ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from tlt_megatron.config.extensions import check_extension
from tlt_megatron.config.ranges import (
    Fraction,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Section,
    Seed,
    Share,
    one_of,
)
from tlt_megatron.config.strategy import SpeculationStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSection(Section):
    """Speculative rollouts. They change only the time to draw tokens, not the tokens."""

    enabled: bool = False  # draft and verify in rollouts
    drafter: str = ""  # folder of an EAGLE drafter of this policy (tools/warmup_drafter.py)
    # num_steps_topk_num_draft_tokens, or ngram_N; with beg_mab also off
    strategies: list[str] = field(
        default_factory=lambda: ["2_1_2", "4_1_4", "6_1_6", "4_2_8", "6_4_16"]
    )
    # cost_model | beg_mab | fixed (the first strategy, always), or a class of yours:
    # path/to/file.py:Class | package.module:Class
    selector: str = "cost_model"
    # beg_mab: smallest batch of each bucket, from 1; empty: by rollout.max_batch_size
    beg_thresholds: list[int] = field(default_factory=list)
    measure_gain: bool = False  # at the end, time the rollouts of further steps with and without
    # of drafts: noise (what the policy will draw) or probability (EAGLE-2)
    ranking: Annotated[str, one_of("noise", "probability")] = "noise"
    # embedded: most frequent token ids of the rollouts, the only ones that the learned drafter
    # proposes; 0: all; None: 8192 of a vocabulary of 32768 or more
    draft_vocab_size: int | None = None

    def check(self) -> None:
        size = self.draft_vocab_size
        self.require(size is None or size == 0 or size >= 256, "draft_vocab_size", "0 or >= 256")
        is_set = bool(self.strategies) and len(set(self.strategies)) == len(self.strategies)
        self.require(is_set, "strategies", "not empty, with each strategy once")
        try:
            _ = self.parsed_strategies
        except ValueError as error:
            raise ValueError(f"speculation.strategies: {error}") from error
        check_extension("speculation.selector", self.selector)

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
    aux_layer_ids: list[int] = field(default_factory=list)  # eagle3: three layers; empty: default
    dtype: Annotated[str, one_of("float32", "bfloat16")] = "float32"  # arithmetic; weights: float32
    unroll_steps: NonNegativeInt = (
        0  # draft steps trained; 0: 1 for eagle, 3 for hass, 5 for eagle3
    )
    unroll_decay: Fraction = 0.8  # weight of each further step
    feature_weight: float | None = None  # smooth L1 per 1 of cross entropy; None: 10, eagle3 0
    batch_tokens: PositiveInt = 4096  # packed rows; longer sequences are cut into windows
    head_chunk_tokens: PositiveInt = 512  # rows whose vocabulary-sized logits are held at once
    lr: Positive = 1e-3  # constant after warm-up
    warmup_steps: NonNegativeInt = 20  # optimizer steps, over the drafter's life, not per session
    weight_decay: NonNegative = 0.0  # not on norms and biases
    beta1: Share = 0.9  # decay of Adam's first moment
    beta2: Share = 0.95  # of its second moment
    eps: Positive = 1e-8  # of Adam
    clip_grad: NonNegative = 1.0  # of the gradient norm; 0: off
    seed: Seed = 0  # of random weights

    def check(self) -> None:
        is_eagle3 = self.algorithm == "eagle3"
        ids = self.aux_layer_ids
        are_three = len(ids) == 3 and ids == sorted(set(ids)) and ids[0] >= 0
        self.require(
            not ids or (is_eagle3 and are_three),
            "aux_layer_ids",
            "three rising layer numbers with drafter.algorithm=eagle3, else empty",
        )
        self.require(
            self.algorithm != "eagle" or self.unroll_steps <= 1,
            "unroll_steps",
            "at most 1 for eagle (hass is eagle with more)",
        )
        weight = self.feature_weight
        self.require(
            weight is None or (weight >= 0 and not (is_eagle3 and weight > 0)),
            "feature_weight",
            ">= 0, and 0 for eagle3 (its output is not the target's feature)",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotSection(Section):
    """Drafter training on ranks that have finished, until the last rank finishes."""

    enabled: bool = False  # needs speculation.enabled and a strategy with a learned drafter
    min_idle_replicas: PositiveInt = 1  # sessions start when this many rollout replicas are idle
    data_bytes: PositiveInt = 256 << 20  # budget of a rank's DataBuffer
    keep_steps: PositiveInt = 1  # earlier RL steps whose sequences are kept, within data_bytes
    long_tail_share: Share = 0.5  # of a batch, from the longest responses of earlier steps
    holdout_share: Share = 0.05  # of the samples: never trained on, used to compare candidates
    # drafter updates per RL step, with dynamic sampling per round; 0: as many as idle time allows
    max_updates: NonNegativeInt = 0
    member_timeout_s: Positive = 20.0  # a member silent for this long is lost; > one drafter step
    seed: int = 0  # of the order of the data
