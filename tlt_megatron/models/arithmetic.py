"""The operations of a forward pass, chosen when a model is made. `fastest_arithmetic` is the
fastest choice.

`invariant_arithmetic.invariant_arithmetic` makes the one whose results do not depend on the other
rows of a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_megatron.models.attention import Attention, PageAttention
from tlt_megatron.models.attention.lanes import LaneTreeAttention
from tlt_megatron.models.attention.paged import PagedAttention, PrefillAttention, PrefillSegment
from tlt_megatron.models.attention.tables import TablePages
from tlt_megatron.models.kv_cache import KvCache
from tlt_megatron.models.layers import RmsNorm, apply_rope_
from tlt_megatron.models.matrix import Matrix
from tlt_megatron.runtime.device import has_loops, has_triton


def gate_silu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate).mul_(up)


def rotate_in_place(
    heads_PAH: Tensor,
    num_rotated: int,
    angles: tuple[Tensor, Tensor],
    norm: RmsNorm,
    weight: Tensor | None,
) -> Tensor:
    """Normalize the first heads, if there is a `weight` [num_rotated, H], and turn them by (cos,
    signed sin).

    Return all heads. They are the given ones, changed in place.
    """
    rotated = heads_PAH[:, :num_rotated]
    if weight is not None:
        rotated.copy_(norm(rotated, weight))
    apply_rope_(rotated[..., : angles[0].shape[-1]], *angles)
    return heads_PAH


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """The operations of a forward pass."""

    matrix: type[Matrix] = Matrix
    norm: type[RmsNorm] = RmsNorm
    # heads, the number of those that rotate, their angles, and their norm with its weights
    rotate: Callable[..., Tensor] = rotate_in_place
    gate: Callable[[Tensor, Tensor], Tensor] = gate_silu
    prefill: Callable[[KvCache, Sequence[PrefillSegment]], Attention] = PrefillAttention
    paged: Callable[[KvCache], PageAttention] = PagedAttention
    # view, slots and `Visible`; a drafter's has a `first_layer` too
    lanes: Callable[..., Attention] = LaneTreeAttention
    # None, or what runs all layers of a pass of few rows at once: see `CompiledPass`
    layers: Callable[..., Any] | None = None
    # None, or what computes new pairs and the chains after them at once: see `CompiledChains`
    chains: Callable[..., Any] | None = None
    has_loose_lanes: bool = True  # whether `lanes` takes a `LooseView`


PLAIN = Arithmetic()


def fastest_arithmetic(device: torch.device) -> Arithmetic:
    """Return the compiled kernels on CUDA with Triton, and on a CPU with numba and one thread. Else
    return `PLAIN`.
    """
    if has_loops(device):
        return compiled_arithmetic()
    if device.type != "cuda" or not has_triton():
        return PLAIN
    # Imported when needed: CPU builds of torch come without triton.
    from tlt_megatron.models import layer_kernels

    return Arithmetic(
        norm=layer_kernels.FusedNorm, rotate=layer_kernels.rotate, gate=layer_kernels.gate_silu
    )


@cache
def compiled_arithmetic() -> Arithmetic:
    """Return the loops of a CPU."""
    # Imported when needed: the installation may lack numba.
    from tlt_megatron.models import compiled_layer
    from tlt_megatron.models.compiled_chain import CompiledChains
    from tlt_megatron.models.compiled_pass import CompiledMatrix, CompiledPass

    return Arithmetic(
        matrix=CompiledMatrix,
        norm=compiled_layer.CompiledNorm,
        rotate=compiled_layer.rotate,
        gate=compiled_layer.gate_silu,
        paged=partial(TablePages, compiled_layer.CompiledTables),
        lanes=compiled_layer.compiled_lanes,
        layers=CompiledPass,
        chains=CompiledChains,
    )


def require_equal(found: Iterable[Tensor], expected: Iterable[Tensor], otherwise: str) -> None:
    """Raise RuntimeError if tensors differ. `otherwise` says what that means on this machine."""
    if not all(map(torch.equal, found, expected)):
        raise RuntimeError(f"rollout.batch_invariant=True: on this machine {otherwise}")
