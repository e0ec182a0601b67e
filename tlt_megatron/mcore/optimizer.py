"""Gradient reduction, clipping, Adam and the learning-rate schedule of the policy, all by Megatron.

Megatron sums the gradient over micro-batches and data-parallel ranks and divides once by the summed
count ("per-token loss"). If the gradient norm is not finite, the optimizer step changes nothing on
any rank.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tlt_megatron.config.schema import OptimizerSection
from tlt_megatron.mcore.optimizer_state import steps_to_host
from tlt_megatron.types import OptimizerStats

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import ChainedOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


def wrap_data_parallel(model: nn.Module) -> DistributedDataParallel:
    """Wrap a chunk of this rank's stage in Megatron's DistributedDataParallel, set up for a loss
    that is a fraction.

    Gradients are kept in float32 and reduced after the last backward pass. A collective of all
    ranks.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.utils import get_model_config

    config = get_model_config(model)
    config.finalize_model_grads_func = None  # schedule.reduce_gradients, once per update
    return DistributedDataParallel(
        config=config,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            # No overlap: a data-parallel rank without micro-batches has no backward pass to start
            # the reduction.
            overlap_grad_reduce=False,
            use_distributed_optimizer=True,
            check_for_nan_in_grad=False,  # PolicyOptimizer.step checks the norm instead
            average_in_collective=False,
        ),
        module=model,
    )


class PolicyOptimizer:
    """Adam over the parameters of `model`, the chunks of a stage, its schedule, and the skipping of
    updates that are not finite.

    `megatron` and `scheduler` are the Megatron objects, for megatron_checkpoint.py.
    """

    def __init__(
        self,
        model: list[DistributedDataParallel],
        section: OptimizerSection,
        dtype: torch.dtype,
        num_updates: int,
    ) -> None:
        """A decay of the learning rate reaches `min_lr` at update `num_updates`, the run's last."""
        from megatron.core.optimizer import (
            ChainedOptimizer,
            OptimizerConfig,
            get_megatron_optimizer,
            get_standard_config_overrides,
        )

        self._model = model
        self._clip_grad = section.clip_grad
        config = OptimizerConfig(
            optimizer="adam",
            lr=section.lr,
            min_lr=section.min_lr,
            weight_decay=section.weight_decay,
            adam_beta1=section.betas[0],
            adam_beta2=section.betas[1],
            adam_eps=section.eps,
            clip_grad=section.clip_grad,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=model[0].ddp_config.use_distributed_optimizer,
        )
        megatron = get_megatron_optimizer(
            config, [*model], config_overrides=get_standard_config_overrides(config)
        )
        assert isinstance(megatron, ChainedOptimizer)
        self.megatron = megatron
        self.scheduler: OptimizerParamScheduler = _make_scheduler(megatron, section, num_updates)
        self.zero_grad()

    def step(self) -> OptimizerStats:
        """Clip, step, advance the schedule, zero the gradients. A collective of all ranks.

        If the norm is not finite, weights, optimizer and schedule stay unchanged. Every rank sees
        the same norm.
        """
        from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
        from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

        lr = get_canonical_lr_for_logging(self.megatron.param_groups)
        assert lr is not None
        is_overflow = self.megatron.prepare_grads()
        assert not is_overflow  # there is no loss scaling in float32 and bfloat16
        grad_norm = float(self.megatron.get_grad_norm())
        is_finite = math.isfinite(grad_norm)
        if is_finite:
            if self._clip_grad > 0:
                for part in self.megatron.chained_optimizers:
                    parameters: list[Tensor] = [*part.get_parameters()]
                    clip_grad_by_total_norm_fp32(parameters, self._clip_grad, grad_norm)
            self.megatron.step_with_ready_grads()
            self.scheduler.step(1)
        self.zero_grad()
        return OptimizerStats(grad_norm=grad_norm, lr=float(lr), is_skipped=not is_finite)

    def offload(self, is_cuda: bool) -> None:
        """Free the gradient buffers, which are zero, and move optimizer state to host memory.

        Megatron moves the optimizer's own float32 weights, so those of the model must be bfloat16.
        """
        for chunk in self._model:
            chunk.offload_grad_buffers(synchronize=is_cuda, empty_cache=is_cuda)
        self.megatron.offload_to_cpu()

    def reload(self, is_cuda: bool) -> None:
        """Undo `offload`."""
        for chunk in self._model:
            chunk.restore_grad_buffers(synchronize=is_cuda)
        self.megatron.restore_from_cpu()
        steps_to_host(self.megatron)

    def zero_grad(self) -> None:
        for chunk in self._model:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()


def _make_scheduler(
    optimizer: ChainedOptimizer, section: OptimizerSection, num_updates: int
) -> OptimizerParamScheduler:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    warmup_steps = section.warmup_steps
    return OptimizerParamScheduler(
        optimizer,
        # Update k (from 0) of the warmup gets lr * (k + 1) / (warmup_steps + 1), so that no update
        # has a rate of zero.
        init_lr=section.lr / (warmup_steps + 1),
        max_lr=section.lr,
        min_lr=section.min_lr,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=max(num_updates, warmup_steps + 1),  # Megatron requires more than the warmup
        lr_decay_style=section.decay,
        start_wd=section.weight_decay,
        end_wd=section.weight_decay,
        wd_incr_steps=1,
        wd_incr_style="constant",
        # A resumed run keeps its own settings; only the position in the schedule comes from the
        # checkpoint.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
