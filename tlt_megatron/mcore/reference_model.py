"""A second, frozen model: the reference of another folder, or one that follows the policy.

It has layers of its own on this rank's pipeline stage, and no gradients. On a GPU its weights are
in host memory except during its passes. Every method is a collective of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tlt_megatron.config.schema import McoreSection, ModelSection, ParallelSection
from tlt_megatron.mcore.lora import merged_weights
from tlt_megatron.mcore.megatron_checkpoint import load_checkpoint, save_checkpoint
from tlt_megatron.mcore.model import build_stage
from tlt_megatron.mcore.schedule import label_logprobs, run_forward
from tlt_megatron.mcore.weight_map import load_hf_weights
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.hf_io import HfReader
from tlt_megatron.runtime.device import Device
from tlt_megatron.runtime.process_groups import ProcessGroups
from tlt_megatron.types import MicroBatch, TokenLogprobs

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


class McoreReferenceModel:
    """This rank's shard of the Hugging Face folder `model.path`, in the policy's layout."""

    def __init__(
        self,
        *,
        model: ModelSection,
        parallel: ParallelSection,
        mcore: McoreSection,
        groups: ProcessGroups,
        device: Device,
    ) -> None:
        from megatron.core.transformer.module import Float16Module

        dtype: torch.dtype = getattr(torch, model.dtype)
        config = load_model_config(model.path)
        self._groups, self._device = groups, device
        self._stage = build_stage(
            config,
            parallel=parallel,
            section=mcore,
            dtype=dtype,
            device=device,
            experts_apart=model.lora_rank > 0,  # as in a policy whose weights it copies
        )
        self._model: list[torch.nn.Module] = [*self._stage]
        if dtype != torch.float32:
            self._model = [Float16Module(chunk.config, chunk) for chunk in self._stage]
        load_hf_weights(self._stage, config, HfReader(Path(model.path)), groups)
        for chunk in self._stage:
            chunk.requires_grad_(False)
        self._move("cpu")

    def infer_logprobs(
        self, micro_batches: Sequence[MicroBatch], temperature: float
    ) -> list[TokenLogprobs]:
        """Run forward only; the result is on every pipeline stage, on the CPU."""
        self._move(self._device.torch_device)
        predict = label_logprobs(temperature, self._groups)
        try:
            return run_forward(self._model, micro_batches, predict, TokenLogprobs, self._groups)
        finally:
            self._move("cpu")

    @torch.no_grad()
    def copy_from(self, stage: Sequence[GPTModel]) -> None:
        """Take the weights of the policy's stage, which has the same shapes and layout."""
        for own, other in zip(self._stage, stage, strict=True):
            theirs = other.state_dict() | merged_weights(other)
            for name, value in own.state_dict().items():
                if isinstance(value, Tensor):  # Transformer Engine has more
                    value.copy_(theirs[name])

    def save(self, path: Path) -> None:
        """Write the weights into the empty folder `path` (torch_dist)."""
        save_checkpoint(path, self._stage, None, self._groups)

    def load(self, path: Path) -> None:
        """Restore what `save` wrote, at this or another layout."""
        load_checkpoint(path, self._stage, None)

    def _move(self, place: torch.device | str) -> None:
        for chunk in self._stage:
            for parameter in chunk.parameters():
                parameter.data = parameter.data.to(place)
        self._device.release_cached()
