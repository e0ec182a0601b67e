"""Compiles every Triton kernel by Triton's own compiler and assembler, which need no GPU.

`test_kernels_compile` runs it in a process of its own: where kernels are interpreted, nothing is
compiled. It writes to the working directory.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tlt_megatron.models import layer_kernels, row_kernels
from tlt_megatron.models.attention import fused_kernel, ordered_kernel
from tlt_megatron.speculation import noise_kernel

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
SHARED_KIB = {80: 163, 89: 99, 90: 227}  # shared memory of a block, by compute capability
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def compile_kernel(
    kernel: Any,
    pointers: Mapping[str, str],
    constants: Mapping[str, object],
    *,
    capabilities: Sequence[int] = (80, 89, 90),
    **options: object,
) -> list[Any]:
    """Return the compiled kernel for each compute capability. Parameters that are no pointers are
    int32.
    """
    own = {p.name: constants[p.name] for p in kernel.params if p.is_constexpr}
    signature = {p.name: pointers.get(p.name, "i32") for p in kernel.params}
    signature |= dict.fromkeys(own, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=own)
    found = []
    for capability in capabilities:
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert made.asm["cubin"]
        what = (kernel, capability, constants, made.metadata.shared)
        assert made.metadata.shared <= SHARED_KIB[capability] << 10, what
        found.append(made)
    return found


def check_stack(made: Any, what: object) -> None:
    """Few registers do not fit."""
    Path("cubin").write_bytes(made.asm["cubin"])
    used = subprocess.run([CUOBJDUMP, "-res-usage", "cubin"], capture_output=True, text=True)
    found = re.search(r"STACK:(\d+)", used.stdout)
    assert found is not None
    assert int(found[1]) <= 600, (what, found[1])  # bytes


def check_attention(name: str, head_dim: int, num_queries: int) -> None:
    dtype, inner = DTYPES[name], "*" + name
    wide = "*fp64" if name == "fp64" else "*fp32"
    given = dict.fromkeys(("query", "key", "value", "bias"), inner) | {"out": wide, "lse": wide}
    tables = dict.fromkeys(("table", "rows", "lengths"), "*i64")
    merged = {"outs": wide, "lses": wide, "out": inner, "lse": wide}
    options = fused_kernel.options_of(dtype, num_queries, head_dim)
    launch = {key: options[key] for key in ("num_stages", "num_warps")}
    for made in compile_kernel(fused_kernel._attend_part, given, options, **launch):
        check_stack(made, (name, head_dim, num_queries, made.metadata.target))
    compile_kernel(fused_kernel._merge_parts, merged, options, capabilities=(90,))
    options = ordered_kernel.ordered_options(dtype, 7, head_dim)
    compile_kernel(ordered_kernel._attend_ordered, given | tables, options, capabilities=(90,))


def check_layer(name: str, dtype: torch.dtype) -> None:
    parts = ("x", "addend", "weight", "out", "heads", "cos", "sin", "gate", "up", "bias")
    pointers = dict.fromkeys(parts, "*" + name) | {"eps": "*fp64" if name == "fp64" else "*fp32"}
    constants = {"HALF": 64, "WIDE": fused_kernel.triton_wide(dtype)}
    constants |= dict.fromkeys(("HAS_ADDEND", "HAS_WEIGHT", "HAS_BIAS"), True)
    for kernel, size, block in (
        (layer_kernels._normalize, 3584, 4096),
        (layer_kernels._rotate, 128, 128),
        (layer_kernels._gate, 0, 1024),
    ):
        compile_kernel(kernel, pointers, constants | {"SIZE": size, "BLOCK": block})
    tiles = constants | row_kernels.tile_options(dtype)
    compile_kernel(row_kernels._multiply, pointers, tiles, capabilities=(90,))


def check_noise() -> None:
    keys = {"seeds": "*i64", "positions": "*i64"}
    add = keys | {"logits": "*bf16", "scale": "*fp64", "factors": "*fp64", "ids": "*i64"}
    argmax = keys | {"logits": "*fp32", "largest": "*fp64", "winners": "*i64"}
    for kernel, pointers, has_ids in (
        (noise_kernel._argmax_of_block, argmax, False),
        (noise_kernel._add, add | {"out": "*fp32"}, False),
        (noise_kernel._add, add | {"out": "*fp32"}, True),
    ):
        constants = {"BLOCK": noise_kernel._BLOCK, "HAS_IDS": has_ids}
        compile_kernel(kernel, pointers, constants, **noise_kernel._OPTIONS)


if __name__ == "__main__":
    for name, head_dim, num_queries in (
        ("bf16", 128, 7),
        ("bf16", 128, 119),
        ("fp32", 80, 7),
        ("fp64", 128, 1),
        ("fp32", 128, 119),
        ("fp64", 128, 119),
    ):
        check_attention(name, head_dim, num_queries)
    for name, dtype in DTYPES.items():
        check_layer(name, dtype)
    check_noise()
