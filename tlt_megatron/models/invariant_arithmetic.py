"""Arithmetic for `rollout.batch_invariant`: a row's bits do not depend on the rows of its pass.

A kernel may add in another order for another number of rows. The compiled loops do not: they
compute a row or query at a time. So a small model runs all passes as `CompiledPass`. Products with
large matrices are faster by oneDNN, and use row tiles of tested sizes. That a row's result is the
same at every place of a tile, in tiles of two sizes, and beside other rows and queries, is checked
on this machine when the model is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_megatron.models.arithmetic import Arithmetic, compiled_arithmetic, require_equal
from tlt_megatron.models.attention.sums import wide_dtype
from tlt_megatron.models.attention.tables import AttendTables, TableRead, table_prefill
from tlt_megatron.models.config import ExpertsConfig, ModelConfig
from tlt_megatron.models.kv_cache import KvCache
from tlt_megatron.models.layers import DenseLayer, RotaryTable
from tlt_megatron.models.matrix import Matrix
from tlt_megatron.models.mlp import route
from tlt_megatron.runtime.device import has_numba, has_triton
from tlt_megatron.runtime.typed_command import pip_command

_BASE_ROWS = 16  # rows of the reference tile: all other tiles must agree with it
# Candidate tile sizes. Few rows are common, and each has a tile of its own if the machine allows
# it.
_TILE_ROWS = (*range(1, 33), *range(40, 129, 8), 160, 192, 224, 256)
# Pad to a larger tile if it has at most this many times the rows, else take a smaller one.
_PADDING_WASTE = 1.5


def invariant_arithmetic(
    config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Arithmetic:
    """Return it. RuntimeError if a check of a kernel fails. ValueError without Triton on a GPU, or
    numba on a CPU.
    """
    if device.type != "cpu":
        if not has_triton():
            raise ValueError(
                f"rollout.batch_invariant=True: must be false on device {device.type!r} without"
                " Triton, which CUDA builds of torch contain"
            )
        # Imported when needed: CPU builds of torch come without triton.
        from tlt_megatron.models.row_kernels import row_arithmetic

        return row_arithmetic(dtype, device)
    if not has_numba():
        raise ValueError(
            f"rollout.batch_invariant=True: must be false on a CPU without numba: {pip_command('numba')}"
        )
    # Imported when needed: the installation may lack numba.
    from tlt_megatron.models.compiled_layer import CompiledTables
    from tlt_megatron.models.compiled_pass import CompiledPass, is_small

    _check_attention(CompiledTables, config, dtype)
    if config.experts is not None:
        _check_exp(dtype)
        _check_routing(config.experts, dtype)
    # torch's prefill is faster, but its bits depend on the number of queries.
    prefill = partial(table_prefill, CompiledTables)
    found = replace(compiled_arithmetic(), matrix=InvariantMatrix, prefill=prefill, layers=None)
    if config.experts is None and is_small(config):
        found = replace(found, layers=partial(CompiledPass, has_all_rows=True))
        _check_layers(found, config, dtype)
    return found


# ---- matrix products


def cancelling(num_rows: int, size: int, seed: int, sign: float) -> Tensor:
    """Return [num_rows, size] whose second half mirrors the first, times `sign`.

    The product of one with sign +1 and one with -1 is 0 except for rounding. So another order of
    addition is visible even after rounding to bfloat16.
    """
    half = torch.randn(num_rows, size // 2, generator=torch.Generator().manual_seed(seed))
    middle = torch.zeros(num_rows, size % 2)
    return torch.cat((half, middle, sign * half.flip(1)), dim=1)


class RowTiles:
    """The row counts with which a kernel may be called, for matrices of one shape and dtype."""

    def __init__(self, num_out: int, num_in: int, dtype: torch.dtype, *, has_bias: bool) -> None:
        """Test `Matrix` on artificial values. RuntimeError if a row's place matters."""
        bias = torch.linspace(-1e-6, 1e-6, num_out).to(dtype) if has_bias else None
        probe = Matrix(cancelling(num_out, num_in, 0, 1.0).to(dtype), bias, min_rows=1)
        x = cancelling(max(_TILE_ROWS), num_in, 1, -1.0).to(dtype)
        order = torch.randperm(x.shape[0], generator=torch.Generator().manual_seed(2))
        expected = torch.cat([probe(tile) for tile in x.split(_BASE_ROWS)])
        shuffled = torch.cat([probe(tile) for tile in x[order].split(_BASE_ROWS)])
        what = f"a {dtype} product with a matrix of {num_out}x{num_in}"
        place = f"{what} depends on a row's place among {_BASE_ROWS} rows"
        require_equal([shuffled], [expected[order]], place)
        self.sizes = [
            size
            for size in _TILE_ROWS
            if torch.equal(probe(x[:size]), expected[:size])
            and torch.equal(probe(x[-size:]), expected[-size:])
        ]
        self.cover = cache(self._cover)

    def _cover(self, num_rows: int) -> list[int]:
        """Return the sizes of tiles that hold `num_rows` rows; the last may hold more."""
        found, left = [], num_rows
        while left > 0:
            larger = [size for size in self.sizes if left <= size <= _PADDING_WASTE * left]
            smaller = [size for size in self.sizes if size <= left]
            found.append(min(larger) if larger else max(smaller, default=self.sizes[0]))
            left -= found[-1]
        return found


@cache
def _row_tiles(
    num_out: int, num_in: int, dtype: torch.dtype, has_bias: bool, _num_threads: int
) -> RowTiles:
    """Test each kind of matrix once. Kernels divide their work by the number of threads."""
    return RowTiles(num_out, num_in, dtype, has_bias=has_bias)


class InvariantMatrix(Matrix):
    """`Matrix` that multiplies by row tiles."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """RuntimeError if this machine has no kernel for it; see `RowTiles`."""
        super().__init__(weight, bias, min_rows=1)
        kind = *weight.shape, weight.dtype, bias is not None
        self._tiles = _row_tiles(*kind, torch.get_num_threads())

    def __call__(self, x: Tensor, addend: Tensor | None = None) -> Tensor:
        num_rows = x.shape[0]
        tiles = self._tiles.cover(num_rows)
        if tiles == [num_rows]:
            out = super().__call__(x)
            return out if addend is None else out.add_(addend)
        num_padded = sum(tiles) - num_rows
        if num_padded:
            x = F.pad(x, (0, 0, 0, num_padded))
        outs = [super(InvariantMatrix, self).__call__(tile) for tile in x.split(tiles)]
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        if num_padded:
            out = out[:num_rows]
        return out if addend is None else out.add_(addend)


# ---- all else


def _check_attention(attend_tables: AttendTables, config: ModelConfig, dtype: torch.dtype) -> None:
    """Raise RuntimeError if a query's result here depends on a query beside it that sees more."""
    one = replace(config, num_layers=1)
    cache = KvCache(one, num_pages=5, page_size=64, dtype=dtype, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(cache.layers[0][:, :128].shape, generator=generator)
    mirrored = half.flip(1)
    mirrored[config.num_kv_heads :] *= -1  # values that cancel: see `cancelling`
    cache.layers[0][:, :256] = torch.cat((half, mirrored), dim=1)
    query = torch.randn(40, config.num_heads, config.head_dim, generator=generator).to(dtype)
    kv, slots = query.new_empty(0, *half[:, 0].shape), torch.arange(0)
    positions = torch.tensor([255] * 39 + [299])

    def attend(start: int, end: int) -> Tensor:
        table = torch.arange(int(positions[start:end].max()) + 1)
        read = TableRead(table[None], positions[None, start:end])
        return attend_tables(cache, slots, [read]).attend(0, query[start:end], kv)

    what = f"{dtype} attention of a query depends on those beside it"
    require_equal([attend(0, 40)], [torch.cat([attend(i, i + 1) for i in range(40)])], what)


def _check_layers(arithmetic: Arithmetic, config: ModelConfig, dtype: torch.dtype) -> None:
    """Raise RuntimeError if a row of a pass through a layer depends on the other rows."""
    from tlt_megatron.models.compiled_layer import CompiledTables
    from tlt_megatron.models.compiled_pass import layer_shapes

    one, cpu = replace(config, num_layers=1), torch.device("cpu")
    cache = KvCache(one, num_pages=5, page_size=64, dtype=dtype, device=cpu)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    cache.kv_LKTH.copy_(random(*cache.kv_LKTH.shape))
    qkv, output, gate_up, down = (random(*shape) for shape in layer_shapes(one))
    norm = random(one.hidden_size)
    layer = DenseLayer(
        qkv=qkv,
        qkv_bias=random(len(qkv)),
        qk_norm=None,
        output=output,
        post_norm=norm,
        gate_up=gate_up,
        down=down,
        next_norm=norm,
    )
    assert arithmetic.layers is not None
    layers = arithmetic.layers(one, [layer], arithmetic.norm(one.rms_norm_eps, dtype, cpu))
    rotary = RotaryTable(one.rope, one.rotary_dim, dtype, cpu)
    rotary.reserve(100)

    def run(x_PD: Tensor) -> list[Tensor]:
        x_PD, normed_PD = x_PD.clone(), x_PD.clone()
        positions_P, slots_P = torch.full((len(x_PD),), 99), 128 + torch.arange(len(x_PD))
        read = TableRead(torch.arange(100).repeat(len(x_PD), 1), positions_P.unsqueeze(1))
        attention = CompiledTables(cache, slots_P, [read])
        layers(x_PD, normed_PD, rotary.lookup(positions_P), attention)
        return [x_PD, normed_PD]

    _check_rows(run, random(131, one.hidden_size), f"a {dtype} layer")


def _check_exp(dtype: torch.dtype) -> None:
    """Raise RuntimeError if an element's exp depends on its place in the tensor."""
    x = torch.linspace(-30.0, 30.0, 4099, dtype=wide_dtype(dtype))
    expected = x.exp()
    parts = torch.cat([part.exp() for size in (1, 7, 18) for part in x.clone().split(size)])
    require_equal([parts], [expected.repeat(3)], "exp depends on the place")


def _check_routing(config: ExpertsConfig, dtype: torch.dtype) -> None:
    """Raise RuntimeError if the experts of a row or their weights depend on the other rows."""
    size, wide = config.num_experts, wide_dtype(dtype)
    scores_PE = torch.linspace(-30.0, 30.0, 131 * size, dtype=wide).view(size, 131).t().contiguous()
    bias_E = torch.linspace(-0.1, 0.1, size, dtype=wide) if config.is_sigmoid else None
    _check_rows(lambda x: route(x, bias_E, config), scores_PE, f"routing among {size} experts")


def _check_rows(run: Callable[[Tensor], Sequence[Tensor]], x: Tensor, what: str) -> None:
    """Raise RuntimeError if a row of the results of `run` depends on the other rows of x."""
    alone = [run(row) for row in x.split(1)]
    expected = [torch.cat(part) for part in zip(*alone, strict=True)]
    for num_rows in (2, 7, 32, 131):
        otherwise = f"{what} of {num_rows} rows is not that of each row"
        require_equal(run(x[:num_rows]), [part[:num_rows] for part in expected], otherwise)
