"""The policy and the critic on Megatron-core, one per rank: see policy/interfaces.py.

If asked, the policy keeps a host copy of the initial weights as the reference policy, or asks a
second model. The critic is of the same architecture with a value head. Every method is a collective
of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from tlt_megatron.mcore.export import iter_hf_weights
from tlt_megatron.mcore.lora import gather_adapters, without_adapters
from tlt_megatron.mcore.reference_model import McoreReferenceModel
from tlt_megatron.mcore.routing_replay import RoutingReplay
from tlt_megatron.mcore.schedule import label_logprobs, run_forward, token_values
from tlt_megatron.mcore.trained_model import TrainedModel
from tlt_megatron.runtime.process_groups import ProcessGroups
from tlt_megatron.types import (
    LossFunction,
    MicroBatch,
    TokenLogprobs,
    TokenValues,
    ValueLossFunction,
)

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


class Recorder(Protocol):
    """See hidden_tap.py."""

    def record(
        self, stage: Sequence[GPTModel], micro_batches: Sequence[MicroBatch], groups: ProcessGroups
    ) -> AbstractContextManager[None]: ...


class McorePolicyModel(TrainedModel):
    """A trainable policy over this rank's shard of the Hugging Face folder `model.path`."""

    def __init__(self, *, reference: McoreReferenceModel | None = None, **settings: Any) -> None:
        """`reference`: the reference policy, if it is a second model. See TrainedModel."""
        super().__init__(**settings)
        self._second = reference

    def infer_logprobs(
        self,
        micro_batches: Sequence[MicroBatch],
        temperature: float,
        *,
        reference: bool = False,
        tap: Recorder | None = None,
    ) -> list[TokenLogprobs]:
        """See PolicyModel. `reference` needs `keep_reference` or a second model."""
        if not reference:
            with self._tapping(tap, micro_batches):
                return self._infer(micro_batches, temperature, self._replay)
        assert tap is None  # a drafter learns from the policy alone
        if self._second is not None:
            return self._second.infer_logprobs(micro_batches, temperature)
        if self._has_adapters:
            with without_adapters(self._stage):
                return self._infer(micro_batches, temperature)
        assert self._reference is not None
        self._exchange_weights(self._reference)
        try:
            return self._infer(micro_batches, temperature)  # it routes freely
        finally:
            self._exchange_weights(self._reference)

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        temperature: float,
        loss_fn: LossFunction,
        *,
        tap: Recorder | None = None,
    ) -> dict[str, float]:
        """See PolicyModel."""
        with self._tapping(tap, micro_batches):
            predict = label_logprobs(temperature, self._groups)
            return self._forward_backward(micro_batches, predict, loss_fn)

    def refresh_reference(self) -> None:
        """See PolicyModel."""
        assert self._second is not None
        self._second.copy_from(self._stage)

    def export_hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        device = self._device.torch_device
        return iter_hf_weights(self._stage, self._config, self._groups, device)

    def gather_adapters(self) -> dict[str, Tensor]:
        """See PolicyModel."""
        return gather_adapters(self._stage, self._groups)

    def _infer(
        self,
        micro_batches: Sequence[MicroBatch],
        temperature: float,
        replay: RoutingReplay | None = None,
    ) -> list[TokenLogprobs]:
        self._move_frozen(self._device.torch_device)  # until the update is done
        predict = label_logprobs(temperature, self._groups)
        return run_forward(self._model, micro_batches, predict, TokenLogprobs, self._groups, replay)

    def _tapping(
        self, tap: Recorder | None, micro_batches: Sequence[MicroBatch]
    ) -> AbstractContextManager[None]:
        if tap is None:
            return nullcontext()
        return tap.record(self._stage, micro_batches, self._groups)

    @torch.no_grad()
    def _exchange_weights(self, host: list[Tensor]) -> None:
        """Swap the weights with those in `host`, in place. A second call restores them."""
        for parameter, other in zip(self._parameters(), host, strict=True):
            current = parameter.clone()
            parameter.copy_(other)
            other.copy_(current)


class McoreCriticModel(TrainedModel):
    """A critic that begins with the weights of the folder `model.path`, and with values of 0."""

    _has_value_head = True

    def infer_values(self, micro_batches: Sequence[MicroBatch]) -> list[TokenValues]:
        """See CriticModel."""
        return run_forward(self._model, micro_batches, token_values, TokenValues, self._groups)

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], loss_fn: ValueLossFunction
    ) -> dict[str, float]:
        """See CriticModel."""
        return self._forward_backward(micro_batches, token_values, loss_fn)
