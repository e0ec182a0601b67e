"""One rank of a policy on Megatron-core with tensors that have sizes and no numbers: what it
allocates, by part and by phase.

megatron-core's own model, DistributedDataParallel, optimizer and pipeline schedule run under
FakeTensorMode over a process group whose collectives do nothing. Transformer Engine is not there:
stand-ins for its attention, norm and rotary embedding save for the backward pass what its kernels
save. Not counted: communication buffers, workspaces, fragmentation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests import mcore_policy  # imports megatron.core
from tests.policy_batches import make_packed
from tlt_megatron.config.schema import RunConfig
from tlt_megatron.mcore import model as model_module
from tlt_megatron.mcore import schedule
from tlt_megatron.mcore.attention import SdpaCoreAttention
from tlt_megatron.mcore.lora import add_adapters
from tlt_megatron.mcore.optimizer import PolicyOptimizer, wrap_data_parallel
from tlt_megatron.models.config import load_model_config
from tlt_megatron.runtime.device import select_device
from tlt_megatron.runtime.process_groups import ProcessGroups, group_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicyBytes:
    """Bytes of one rank."""

    parameters: int
    adapters: int
    gradients: int
    optimizer: int
    activations: int  # the peak of a forward and backward pass above these four, logits included


class LiveBytes(TorchDispatchMode):
    """Counts the storages that are alive, and their peak.

    A number that the host reads back is `number`, since there is none.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._number = number
        self._storages: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._number
        results = func(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, Tensor):
                self._count(result.untyped_storage())
        return results

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._storages:
            return

        def free(_: object) -> None:
            del self._storages[key]
            self.now -= num_bytes

        self._storages[key] = weakref.ref(storage, free)
        self.now += num_bytes
        self.peak = max(self.peak, self.now)

    def peak_of(self, work: Callable[[], object]) -> int:
        """Run `work` and return its peak above the bytes that were alive before."""
        before = self.peak = self.now
        work()
        return self.peak - before


def measure_policy(config: RunConfig, world_size: int, stage: int) -> PolicyBytes:
    """Build `stage` of the policy of `config` and train two steps of two full micro-batches each.

    Changes torch and Megatron: call it in a forked process (`run_ranks(1, ..., has_world=False)`).
    """
    groups = _join_fake_world(config, world_size, stage)
    num_tokens = config.mcore.micro_batch_tokens
    section = dataclasses.replace(
        config.mcore, transformer={"bias_activation_fusion": True, "apply_rope_fusion": True}
    )
    hf_config = load_model_config(config.model.path)
    _install_stand_ins((num_tokens // groups.tp.size, 1, hf_config.hidden_size))
    torch.set_num_threads(2)  # with one, compiled loops would read tensors that are nowhere
    live = LiveBytes(number=num_tokens)
    with FakeTensorMode(allow_non_fake_inputs=True), live:
        from megatron.core.transformer.module import Float16Module

        [chunk] = model_module.build_stage(
            hf_config,
            parallel=config.parallel,
            section=section,
            dtype=torch.bfloat16,
            device=select_device("cpu"),
        )
        parameters = live.now
        if config.model.lora_rank:
            add_adapters([chunk], hf_config, config.model, groups)
        adapters = live.now - parameters
        wrapped = [wrap_data_parallel(Float16Module(chunk.config, chunk))]
        gradients = live.now - parameters - adapters
        optimizer = PolicyOptimizer(wrapped, config.optimizer, torch.bfloat16, config.num_updates)
        optimizer.megatron.get_grad_norm = lambda: 1.0
        batch = [make_packed([1.0] * num_tokens)] * 2

        def update() -> None:
            predict = schedule.label_logprobs(1.0, groups)
            schedule.run_forward_backward(wrapped, batch, predict, mcore_policy.tiny_loss, groups)
            schedule.reduce_gradients(wrapped, 1, groups)

        before = live.now
        update()
        kept = live.now - before
        optimizer.step()  # makes Adam's moments
        states = live.now - parameters - adapters - gradients - kept
        activations = live.peak_of(update)
    return PolicyBytes(
        parameters=parameters,
        adapters=adapters,
        gradients=gradients,
        optimizer=states,
        activations=activations,
    )


def _join_fake_world(config: RunConfig, world_size: int, stage: int) -> ProcessGroups:
    from megatron.core import parallel_state, tensor_parallel

    new_group, parallel = dist.new_group, config.parallel
    rank = stage * (world_size // parallel.pipeline)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    dist.new_group = lambda ranks=None, **_: new_group(ranks)  # none over gloo

    def all_gather_object(gathered: list[object], value: object, group: object = None) -> None:
        gathered[:] = [value] * len(gathered)

    dist.all_gather_object = all_gather_object
    parallel_state.initialize_model_parallel(parallel.tensor, parallel.pipeline)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    return ProcessGroups(
        world=group_of(dist.group.WORLD),
        tp=group_of(parallel_state.get_tensor_model_parallel_group()),
        pp=group_of(parallel_state.get_pipeline_model_parallel_group()),
        dp=group_of(parallel_state.get_data_parallel_group()),
    )


def _install_stand_ins(stage_shape: tuple[int, ...]) -> None:
    """`stage_shape` is that of the tensors between pipeline stages, which are never received
    here.
    """
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    torch.nn.Module._apply = lambda module, *_, **__: module  # all is on its device, in its dtype
    SdpaCoreAttention.forward = lambda _, *qkv, **__: _Attention.apply(*qkv[:3]).flatten(1)
    model_module.RMSNorm.forward = lambda norm, x: _Norm.apply(x, norm.weight)
    rope_utils.fused_apply_rotary_pos_emb = rope_utils.fused_apply_rotary_pos_emb_thd = (
        lambda x, *_, **__: _Rotation.apply(x)
    )
    param_and_grad_buffer._coalescing_manager = _issue_one_by_one
    schedule._share_metrics = lambda totals, groups: {}

    def communicate(
        _: object, *, recv_prev: bool, recv_next: bool, **__: object
    ) -> tuple[Tensor | None, Tensor | None, None]:
        def receive() -> Tensor:
            return torch.empty(stage_shape, dtype=torch.bfloat16, requires_grad=True)

        return receive() if recv_prev else None, receive() if recv_next else None, None

    P2PCommunicator._communicate = communicate


@contextlib.contextmanager
def _issue_one_by_one(*_: object, **__: object) -> Iterator[SimpleNamespace]:
    yield SimpleNamespace(wait=lambda: None)


class _Attention(torch.autograd.Function):
    """Flash attention keeps its inputs, its output and the log-sum of every row."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, lse = torch.empty_like(query), torch.empty(query.shape[:2])
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(saved) for saved in ctx.saved_tensors[:3])


class _Norm(torch.autograd.Function):
    """A fused norm keeps its input, its weight and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, torch.empty(x.shape[:-1]))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class _Rotation(torch.autograd.Function):
    """A fused rotary embedding keeps its angles alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.empty_like(grad)
