"""LoRA: low-rank adapters on Megatron's column- and row-parallel linears, with frozen weights.

Each projection has factors of its own, under its name of Hugging Face: q_proj, gate_proj, ...
A pass uses the merged weight W + alpha / r * B A, rounded to the model's dtype. Rollout engines get
the same bits, so training and rollouts have one policy. With the adapters beside the weight, an
engine in bfloat16 would round most of an early update away. The price is the backward pass of full
fine-tuning: the gradient of W is computed, then projected on A and B.

A merged weight lives from its use to the next linear. The backward pass merges it again.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tlt_megatron.config.policy_sections import ModelSection
from tlt_megatron.mcore.weight_map import (
    Layout,
    Row,
    chunk_layers,
    expert_rows,
    fuse,
    hf_shapes,
    layer_rows,
    num_local_experts,
)
from tlt_megatron.models.config import ModelConfig
from tlt_megatron.runtime.collectives import gather_objects
from tlt_megatron.runtime.process_groups import ProcessGroups

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

A, B = "lora_a", "lora_b"  # parts of parameter names; no other parameter has them


class AdaptedLinear(nn.Module):
    """What a Megatron linear becomes: its class is a subclass of this one and of its own.

    `lora_a` has A [r, in] of each projection, `lora_b` has B [out, r]. Tensor parallelism cuts
    `out` of a column-parallel linear and `in` of a row-parallel one, as it cuts the weight. The
    other factor is the same on every rank, and its gradient is the sum over the ranks. An expert is
    whole on one rank of the expert-parallel group, and so are its factors.
    """

    lora_a: nn.ParameterDict
    lora_b: nn.ParameterDict
    hf_names: Mapping[str, str]  # of the adapted weights, by projection
    is_on: bool
    _out_sizes: Mapping[str, int]  # of each projection on this rank, in the weight's order
    _row: Row
    _num_kv_heads: int  # on this rank
    _scale: float

    @property
    def sharded_factor(self) -> str:
        """Return the name of the factor that tensor parallelism cuts."""
        return A if self._row.layout is Layout.COLUMNS else B

    @property
    def is_expert(self) -> bool:
        return self._row.is_expert

    def merged_weight(self) -> Tensor:
        """Return this rank's shard of W + alpha / r * B A, in the dtype of W."""
        weight = self._parameters["weight"]
        assert weight is not None
        device = next(self.lora_a.parameters()).device
        changes = [
            self.lora_b[name] @ self.lora_a[name]
            if name in self.lora_a
            else weight.new_zeros(size, weight.size(1), device=device)
            for name, size in self._out_sizes.items()
        ]
        change = fuse(self._row, changes, self._num_kv_heads)
        return weight.to(change.device).add(change, alpha=self._scale)  # it may be away

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the linear of Megatron with the merged weight."""
        if not self.is_on:
            return super().forward(*args, **kwargs)
        merged = self.merged_weight()
        place = id(merged)  # autograd keeps `pack`, so that must not keep the tensor

        def pack(tensor: Tensor) -> Tensor | None:
            return None if id(tensor) == place else tensor

        @torch.no_grad()
        def unpack(tensor: Tensor | None) -> Tensor:
            return self.merged_weight() if tensor is None else tensor

        vars(self)["weight"] = merged  # found before the parameter of this name
        try:
            with saved_tensors_hooks(pack, unpack):
                return super().forward(*args, **kwargs)
        finally:
            del vars(self)["weight"]

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Sequence[tuple[int, int, int]] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the factors as Megatron's sharded tensors. The linear's own method would save a
        cut factor as one that all ranks share.
        """
        from megatron.core import parallel_state
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        assert metadata is not None
        state = self.state_dict(prefix="", keep_vars=True)
        factors = {name: value for name, value in state.items() if name.startswith((A, B))}
        axis = 1 if self.sharded_factor == A else 0
        cut = {name: axis for name in factors if name.startswith(self.sharded_factor)}
        return make_sharded_tensors_for_checkpoint(
            factors,
            prefix,
            cut,
            sharded_offsets,
            tp_group=(
                parallel_state.get_expert_tensor_parallel_group()
                if self.is_expert
                else parallel_state.get_tensor_model_parallel_group()
            ),  # pyright: ignore[reportArgumentType]
            dp_cp_group=metadata["dp_cp_group"],
        )


def add_adapters(
    stage: Sequence[GPTModel], config: ModelConfig, section: ModelSection, groups: ProcessGroups
) -> None:
    """Freeze the weights of this rank's stage and put adapters on the linears of
    `section.lora_targets`.

    B is 0, so the policy stays the same. A depends on its name alone, not on the layout.
    """
    for chunk in stage:
        chunk.requires_grad_(False)
        for local_index, layer in enumerate(chunk_layers(chunk)):
            rows = layer_rows(config, local_index, layer)
            for expert in range(num_local_experts(config, layer, groups.ep)):
                rows += expert_rows(config, local_index, layer, expert, groups.ep, groups.ep.rank)
            for row in rows:
                name, _, kind = row.mcore_names[0].rpartition(".")
                hf_names = {hf_name.split(".")[-2]: hf_name for hf_name in row.hf_names}
                if kind == "weight" and not hf_names.keys().isdisjoint(section.lora_targets):
                    _adapt(chunk.get_submodule(name), row, hf_names, config, section, groups)
        if chunk.pre_process:
            # Recomputed layers have a gradient only if their input has one.
            chunk.embedding.register_forward_hook(lambda _, __, output: output.requires_grad_())


def _adapt(
    linear: nn.Module,
    row: Row,
    hf_names: Mapping[str, str],
    config: ModelConfig,
    section: ModelSection,
    groups: ProcessGroups,
) -> None:
    weight, rank = linear.weight, section.lora_rank
    assert isinstance(weight, Tensor)
    tp_rank, tp_size = (0, 1) if row.is_expert else (groups.tp.rank, groups.tp.size)
    kind = type(linear)
    linear.__class__ = type(f"Adapted{kind.__name__}", (AdaptedLinear, kind), {})
    assert isinstance(linear, AdaptedLinear)
    linear.is_on, linear._row, linear._scale = True, row, section.lora_alpha / rank
    linear._num_kv_heads = config.num_kv_heads // tp_size
    linear.hf_names = {name: hf_names[name] for name in hf_names if name in section.lora_targets}
    linear.lora_a, linear.lora_b = nn.ParameterDict(), nn.ParameterDict()
    cuts_in = linear.sharded_factor == A
    out_sizes = {}
    for (name, hf_name), (num_out, num_in) in zip(
        hf_names.items(), hf_shapes(row, config), strict=True
    ):
        out_sizes[name] = num_out if cuts_in else num_out // tp_size
        if name not in linear.hf_names:
            continue
        bound = 1 / math.sqrt(num_in)  # as PEFT
        generator = torch.Generator().manual_seed(zlib.crc32(hf_name.encode()))
        whole = torch.empty(rank, num_in).uniform_(-bound, bound, generator=generator)
        lora_a = whole.chunk(tp_size, dim=1)[tp_rank] if cuts_in else whole
        lora_b = weight.new_zeros(out_sizes[name], rank)
        # No two tensor-parallel ranks have the same expert: all of it counts as cut.
        is_cut = {A: cuts_in or row.is_expert, B: not cuts_in or row.is_expert}
        linear.lora_a[name] = _parameter(lora_a.to(weight), weight, is_cut=is_cut[A], dim=1)
        linear.lora_b[name] = _parameter(lora_b, weight, is_cut=is_cut[B], dim=0)
    linear._out_sizes = out_sizes


def _parameter(value: Tensor, weight: Tensor, *, is_cut: bool, dim: int) -> nn.Parameter:
    """Return a parameter with Megatron's marks: for the gradient norm, which counts a cut tensor
    on every rank, or for "sum my gradient over the tensor-parallel ranks". An expert's
    gradient is not summed over the expert-parallel ranks, as its `weight` says.
    """
    from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

    parameter = nn.Parameter(value.contiguous())
    if is_cut:
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dim, stride=1)
    else:
        vars(parameter)["sequence_parallel"] = True  # without effect on a single rank
    vars(parameter)["allreduce"] = getattr(weight, "allreduce", True)
    return parameter


def adapted_linears(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, AdaptedLinear]]:
    """Yield the linears with adapters by the name in their chunk."""
    for chunk in chunks:
        for name, module in chunk.named_modules():
            if isinstance(module, AdaptedLinear):
                yield name, module


def has_adapters(chunks: Sequence[nn.Module]) -> bool:
    """Return whether a linear of these chunks has adapters."""
    return next(adapted_linears(chunks), None) is not None


def merged_weights(chunk: nn.Module) -> dict[str, Tensor]:
    """Return the merged weights of a chunk's adapted linears, under the names of its state."""
    linears = adapted_linears([chunk])
    return {f"{name}.weight": linear.merged_weight() for name, linear in linears}


def adapters_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a chunk's state that belong to adapters."""
    return {name: value for name, value in state.items() if f".{A}." in name or f".{B}." in name}


@contextmanager
def without_adapters(stage: Sequence[GPTModel]) -> Iterator[None]:
    """Run passes with the frozen weights alone: the policy before training."""
    linears = [linear for _, linear in adapted_linears(stage)]
    for linear in linears:
        linear.is_on = False
    try:
        yield
    finally:
        for linear in linears:
            linear.is_on = True


def gather_adapters(stage: Sequence[GPTModel], groups: ProcessGroups) -> dict[str, Tensor]:
    """Return the whole factors of all layers, in host memory, under PEFT's names. A collective of
    all ranks.
    """
    own: dict[str, tuple[int | None, Tensor]] = {}  # with the axis that is cut
    for _, linear in adapted_linears(stage):
        for factor, axis, suffix in ((A, 1, "lora_A"), (B, 0, "lora_B")):
            is_cut = factor == linear.sharded_factor and not linear.is_expert
            cut = axis if is_cut else None
            for name, value in getattr(linear, factor).items():
                module = linear.hf_names[name].removesuffix(".weight")
                key = f"base_model.model.{module}.{suffix}.weight"
                own[key] = cut, value.detach().to("cpu", copy=True)
    shards = gather_objects(own, groups.tp)
    whole = {
        key: value if axis is None else torch.cat([shard[key][1] for shard in shards], dim=axis)
        for key, (axis, value) in own.items()
    }
    for group in (groups.ep, groups.pp):
        parts = gather_objects(whole, group)
        whole = {key: value for part in parts for key, value in part.items()}
    return whole
