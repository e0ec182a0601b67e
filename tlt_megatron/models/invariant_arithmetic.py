"""Arithmetic for `rollout.batch_invariant`: a row's bits do not depend on the rows of its pass.

A kernel may add in another order for another number of rows. The compiled loops of a CPU add for
each row or query in the same order. That a row's result is the same beside other rows and queries
is checked on this machine when the model is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
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

    _check_attention(CompiledTables, config, dtype)
    if config.experts is not None:
        _check_exp(dtype)
        _check_routing(config.experts, dtype)
    # torch's prefill is faster, but its bits depend on the number of queries.
    found = replace(compiled_arithmetic(), prefill=partial(table_prefill, CompiledTables))
    if config.experts is None:
        _check_layers(found, config, dtype)
    return found


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

    hidden, ffn = min(config.hidden_size, 512), min(config.ffn_size, 512)
    one, cpu = replace(config, num_layers=1, hidden_size=hidden, ffn_size=ffn), torch.device("cpu")
    cache = KvCache(one, num_pages=5, page_size=64, dtype=dtype, device=cpu)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    def matrix(num_out: int, num_in: int) -> Matrix:
        return arithmetic.matrix(random(num_out, num_in), random(num_out))

    cache.kv_LKTH.copy_(random(*cache.kv_LKTH.shape))
    queries, norm = one.num_heads * one.head_dim, random(hidden)
    layer = DenseLayer(
        qkv=matrix(queries + 2 * one.num_kv_heads * one.head_dim, hidden),
        qk_norm=None,
        output=matrix(hidden, queries),
        post_norm=norm,
        gate_up=matrix(2 * ffn, hidden),
        down=matrix(hidden, ffn),
        next_norm=norm,
    )
    rotary = RotaryTable(one.rope, one.rotary_dim, dtype, cpu)
    rotary.reserve(100)
    assert arithmetic.layers is not None
    rms = arithmetic.norm(one.rms_norm_eps, dtype, cpu)
    layers = arithmetic.layers(one, [layer], rms, rotary, norm)

    def run(x_PD: Tensor) -> list[Tensor]:
        x_PD = x_PD.clone()
        positions_P, slots_P = torch.full((len(x_PD),), 99), 128 + torch.arange(len(x_PD))
        read = TableRead(torch.arange(100).repeat(len(x_PD), 1), positions_P.unsqueeze(1))
        attention = CompiledTables(cache, slots_P, [read])
        return [x_PD, *layers(x_PD, positions_P, attention)]

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
