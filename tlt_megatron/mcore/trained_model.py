"""What the policy and the critic share: a pipeline stage, its data parallelism and its optimizer.

The stage is one model, or several chunks with interleaved passes, in float32 or in bfloat16 with
float32 master weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from tlt_megatron.config.schema import McoreSection, ModelSection, OptimizerSection, ParallelSection
from tlt_megatron.mcore.lora import add_adapters
from tlt_megatron.mcore.megatron_checkpoint import load_checkpoint, save_checkpoint
from tlt_megatron.mcore.model import build_stage
from tlt_megatron.mcore.optimizer import PolicyOptimizer, wrap_data_parallel
from tlt_megatron.mcore.routing_replay import RoutingReplay
from tlt_megatron.mcore.schedule import Predict, T, reduce_gradients, run_forward_backward
from tlt_megatron.mcore.weight_map import load_hf_weights
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.hf_io import HfReader
from tlt_megatron.runtime.device import Device
from tlt_megatron.runtime.process_groups import ProcessGroups
from tlt_megatron.types import LossResult, MicroBatch, OptimizerStats


class TrainedModel:
    """This rank's shard of the Hugging Face folder `model.path`. Every method is a collective.

    `groups` must come from `initialize_model_parallel` with the same `parallel`.
    """

    _has_value_head = False

    def __init__(
        self,
        *,
        model: ModelSection,
        parallel: ParallelSection,
        mcore: McoreSection,
        optimizer: OptimizerSection,
        groups: ProcessGroups,
        device: Device,
        num_updates: int = 1,
        keep_reference: bool = False,
    ) -> None:
        """`num_updates`: optimizer steps of the run, for a decay of the learning rate.

        `keep_reference`: keep the initial weights of this rank's shard in host memory. With
        adapters, the model has them.
        """
        from megatron.core.transformer.module import Float16Module

        dtype: torch.dtype = getattr(torch, model.dtype)
        self._groups = groups
        self._config = load_model_config(model.path)
        self._stage = build_stage(
            self._config,
            parallel=parallel,
            section=mcore,
            dtype=dtype,
            device=device,
            has_value_head=self._has_value_head,
            experts_apart=model.lora_rank > 0,
        )
        wrapped: list[torch.nn.Module] = [*self._stage]
        if dtype != torch.float32:
            wrapped = [Float16Module(chunk.config, chunk) for chunk in self._stage]
        load_hf_weights(self._stage, self._config, HfReader(Path(model.path)), groups)
        self._has_adapters = model.lora_rank > 0
        if self._has_adapters:
            add_adapters(self._stage, self._config, model, groups)
        self._replay = None
        if self._config.experts is not None and not self._has_value_head:
            self._replay = RoutingReplay(self._stage, self._config.experts, groups)
        self._model = [wrap_data_parallel(chunk) for chunk in wrapped]
        self._optimizer = PolicyOptimizer(self._model, optimizer, dtype, num_updates)
        # What divides the gradients accumulated so far; None: there are no gradients.
        self._count: int | None = None
        self._device = device
        self._offloads = mcore.offload_in_rollouts
        self._is_away = False
        self._reference: list[Tensor] | None = None
        if keep_reference and not self._has_adapters:
            self._reference = [
                parameter.detach().to("cpu", copy=True) for parameter in self._parameters()
            ]

    def optimizer_step(self, skipped_count: int = 0) -> OptimizerStats:
        """See TrainedModel. If the gradient is not finite, only zero the gradients."""
        assert self._count is not None  # a forward_backward came before
        reduce_gradients(self._model, self._count + skipped_count, self._groups)
        self._count = None
        return self._optimizer.step()

    def leave_device(self) -> None:
        """See PolicyModel. Cached memory goes too: an engine in another process cannot take it."""
        if self._offloads and not self._is_away:
            self._is_away = True
            self._optimizer.offload(self._device.is_cuda)
            self._move_frozen("cpu")
        self._device.release_cached()

    def enter_device(self) -> None:
        if self._is_away:
            self._is_away = False
            self._optimizer.reload(self._device.is_cuda)
            self._move_frozen(self._device.torch_device)

    def save(self, path: Path) -> None:
        save_checkpoint(path, self._stage, self._optimizer, self._groups)

    def load(self, path: Path) -> None:
        """See PolicyModel. A reference policy keeps the initial weights.

        A model that is away comes back while it loads.
        """
        was_away = self._is_away
        self.enter_device()
        load_checkpoint(path, self._stage, self._optimizer)
        self._count = None
        if was_away:
            self.leave_device()
        self._device.release_cached()

    def _move_frozen(self, place: torch.device | str) -> None:
        """Move the weights that have no gradient, beside adapters. Their export works from both."""
        for parameter in self._parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(place)

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        return chain.from_iterable(chunk.parameters() for chunk in self._stage)

    def _forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        predict: Predict[T],
        loss_fn: Callable[[T, MicroBatch], LossResult],
    ) -> dict[str, float]:
        """Accumulate the gradients; return metric sums."""
        assert not self._is_away
        sums, count = run_forward_backward(
            self._model, micro_batches, predict, loss_fn, self._groups, self._replay
        )
        self._count = (self._count or 0) + count
        return sums
