"""A policy from a Hugging Face folder in an embedded engine, for tools that use one outside a
run.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tlt_megatron.config.draft_folder import MTP, check_drafter
from tlt_megatron.config.model_folder import check_model
from tlt_megatron.config.schema import DataSection, RolloutSection
from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.data.prompts import load_prompts
from tlt_megatron.data.tokenizer import load_tokenizer
from tlt_megatron.drafter.eagle_folder import load_drafter
from tlt_megatron.drafter.packing import draft_sequence
from tlt_megatron.engines.embedded.embedded_engine import EmbeddedEngine
from tlt_megatron.engines.embedded.speculate import Speculation
from tlt_megatron.models.draft_inference import DraftInference
from tlt_megatron.models.draft_model import DraftModel, make_draft_config
from tlt_megatron.models.hf_io import checksum_tensors, policy_tensors
from tlt_megatron.models.own_drafter import load_own_drafter
from tlt_megatron.runtime.device import select_device
from tlt_megatron.speculation.selector import FixedSelector
from tlt_megatron.types import DraftSequence, Prompt, Rollout, RolloutGroup, SamplingParams
from tools.tiny_models.expand_layers import with_identity_layers

VERSION = 0  # the weights do not change
_DATA = DataSection(max_prompt_tokens=256)


class LoadedPolicy:
    """An engine that holds the weights of `folder` as VERSION, its tokenizer, and what a drafter
    borrows from it.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        dtype: str = "float32",
        num_identity_layers: int = 0,
        tap_layers: tuple[int, ...] = (),
        data: DataSection = _DATA,
        **settings: Any,
    ) -> None:
        """`data` says how prompts are read; `settings` go to RolloutSection.

        Identity layers follow the policy's own; they change no token and cost time.
        """
        self._folder = folder
        self._config, self._data = check_model("model", folder), data
        num_layers = self._config.num_layers
        named = list(policy_tensors(folder, self._config, getattr(torch, dtype)))
        named = with_identity_layers(named, num_layers, num_identity_layers)
        self.tokenizer = load_tokenizer(folder)
        self.num_layers, self.dtype = num_layers + num_identity_layers, dtype
        self.engine = EmbeddedEngine(
            dataclasses.replace(self._config, num_layers=self.num_layers),
            RolloutSection(dtype=dtype, **settings),
            select_device("cpu"),
            max_prompt_tokens=data.max_prompt_tokens,
            tap_layers=tap_layers,
        )
        total = checksum_tensors(named)
        self.engine.load_weights(named, version=VERSION, checksum=lambda: total)

    def __str__(self) -> str:
        return f"{self.num_layers} layers, {self.dtype}"

    def prompts(self, path: str | Path, limit: int = 0) -> tuple[Prompt, ...]:
        """Return the first `limit` prompts of a file; 0 returns all."""
        return load_prompts(str(path), self.tokenizer, self._data).rows[: limit or None]

    def params(self, max_new_tokens: int, *, seed: int = 0, **settings: Any) -> SamplingParams:
        """Return sampling settings with the policy's stop tokens."""
        stops = self.tokenizer.stop_token_ids
        return SamplingParams(
            max_new_tokens=max_new_tokens, stop_token_ids=stops, seed=seed, **settings
        )

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[RolloutGroup]:
        """Return the responses to `prompts`."""
        return self.engine.generate(prompts, params, policy_version=VERSION)

    def speculate(self, draft: DraftModel, strategy: SpeculationStrategy) -> None:
        """Decode with this drafter and strategy from now on."""
        inference = DraftInference(draft)
        self.engine.set_speculation(Speculation(inference, FixedSelector(strategy), [strategy]))

    def load_drafter(self, folder: str | Path) -> DraftModel:
        """Return the drafter in `folder`. ValueError if it belongs to another policy."""
        check_drafter("drafter", folder, self._config, self._folder)
        embedding_VD, lm_head_VD = self.engine.target_tensors()
        return load_drafter(
            folder,
            embedding_VD=embedding_VD,
            lm_head_VD=lm_head_VD,
            num_layers=self._config.num_layers,
        )

    def new_drafter(
        self,
        architecture: str = "eagle",
        aux_layer_ids: tuple[int, ...] = (),
        *,
        dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> DraftModel:
        """Return a random drafter, or the model's own layer for the architecture MTP.

        `dtype` is that of the borrowed tensors, by default the engine's; training needs float32.
        """
        embedding_VD, lm_head_VD = self.engine.target_tensors()
        embedding = embedding_VD.to(dtype or embedding_VD.dtype)
        head = lm_head_VD.to(dtype or lm_head_VD.dtype)
        if architecture == MTP:
            return load_own_drafter(
                self._folder, self._config, embedding_VD=embedding, lm_head_VD=head
            )
        config = make_draft_config(self._config, architecture, embedding_VD, aux_layer_ids)
        return DraftModel(config, embedding_VD=embedding, lm_head_VD=head, seed=seed)

    def draft_sequences(
        self, prompts: Sequence[Prompt], params: SamplingParams
    ) -> list[DraftSequence]:
        """Return responses with the states that decoding computed, to train a drafter.

        Responses that are too short are left out.
        """
        sequences: list[DraftSequence] = []

        def keep(rollout: Rollout, features_TF: torch.Tensor) -> None:
            sequence = draft_sequence(rollout, features_TF.float().cpu(), self._config.hidden_size)
            if sequence.num_rows > 0:
                sequences.append(sequence)

        self.engine.generate(prompts, params, policy_version=VERSION, on_features=keep)
        return sequences


def accept_length(groups: Sequence[RolloutGroup]) -> float:
    """Return tokens out per verify pass, the bonus token included; 1 if nothing was drafted."""
    lengths = [n for group in groups for r in group.rollouts for n in r.accept_lengths]
    return statistics.fmean(lengths) if lengths else 1.0
