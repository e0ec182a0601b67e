"""Compiles the Triton kernels as this project launches them, by Triton's compiler and assembler,
which need no GPU.

    python -m tests.kernels.compile_kernels 89 90 --only "7B" "head 256"
    python -m tests.kernels.compile_kernels --table   # prints the table of docs/hardware.md

The launchers of the package run on CPU tensors of real shapes under a driver of a GPU that is not
there. So each kernel is specialized as in a real launch: by pointers and sizes that 16 divides, and
by sizes of 1. `test_kernels_compile` runs it in a process of its own: where kernels are
interpreted, nothing is compiled.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from argparse import RawTextHelpFormatter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tlt_megatron.models import layer_kernels, row_kernels
from tlt_megatron.models.attention import fused_kernel, ordered_kernel
from tlt_megatron.models.attention.sums import result_buffers
from tlt_megatron.models.layers import RmsNorm
from tlt_megatron.speculation import noise_kernel

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
SHARED_KIB = {80: 163, 89: 99, 90: 227}  # shared memory of a block, by compute capability
MAX_STACK = 600  # bytes: few registers do not fit
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


class Shape(NamedTuple):
    """A model, as its kernels see it."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int


SHAPES = {
    "0.5B": Shape(896, 14, 2, 64, 4864, 151_936),
    "7B": Shape(3584, 28, 4, 128, 18_944, 152_064),
    "32B": Shape(5120, 40, 8, 128, 27_648, 152_064),
    "30B-A3B": Shape(2048, 32, 4, 128, 768, 151_936),
    "SmolLM2": Shape(576, 9, 3, 64, 1536, 49_152),
    "Llama 3": Shape(4096, 32, 8, 128, 14_336, 128_256),
    "head 192": Shape(3072, 32, 2, 192, 8192, 49_152),
    "head 256": Shape(2560, 16, 2, 256, 10_240, 49_152),
}
ROWS = (1, 17)  # tokens of a sequence in a pass: plain decoding, and a verify pass


class AbsentGpu:
    """What the launcher asks of Triton's driver. The device's number is its compute capability."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


class Use(NamedTuple):
    """The resources of one compiled kernel."""

    kernel: str
    what: str
    capability: int
    shared: int  # bytes
    stack: int  # bytes, spilled registers included
    registers: int


class Compiler:
    """Compiles instead of launching, and holds the resources of every kernel that it made."""

    def __init__(self) -> None:
        self.uses: list[Use] = []
        self.what = ""
        self._known: set[str] = set()
        run = JITFunction.run

        def compile_only(
            function: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any
        ) -> Any:
            made = run(function, *args, grid=grid, warmup=True, **kwargs)
            if made.hash not in self._known:
                self._known.add(made.hash)
                self.uses.append(self._measure(made))
            return made

        JITFunction.run = compile_only

    def _measure(self, made: Any) -> Use:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(made.asm["cubin"])
            command = [CUOBJDUMP, "-res-usage", file.name]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = re.search(r"REG:(\d+) STACK:(\d+)", said)
        assert found is not None, said
        registers, stack = map(int, found.groups())
        capability, shared = made.metadata.target.arch, made.metadata.shared
        return Use(made.metadata.name, self.what, capability, shared, stack, registers)


def attend(shape: Shape, dtype: torch.dtype, num_rows: int, num_keys: int = 2048) -> None:
    """Attention over lanes, and over tables of slots, of two sequences."""
    repeat = shape.num_heads // shape.num_kv_heads
    query = torch.empty(2, shape.num_kv_heads, repeat * num_rows, shape.head_dim, dtype=dtype)
    cache = torch.empty(2 * shape.num_kv_heads, 2 * num_keys, shape.head_dim, dtype=dtype)
    lanes = cache.view(2 * shape.num_kv_heads, 2, num_keys, shape.head_dim).transpose(0, 1)
    key, value = lanes.chunk(2, dim=1)
    bias = torch.empty(2, 1, num_rows, num_keys, dtype=dtype)
    for starts_B, part in ((torch.zeros(2, dtype=torch.int64), 512), (None, 64)):
        whole, parts = result_buffers(query, num_keys, part)
        fused_kernel.launch(query, key, value, bias, starts_B, whole, parts, part)
    tokens = torch.empty(2 * num_rows, shape.num_heads, shape.head_dim, dtype=dtype)
    table = torch.zeros(2, num_keys, dtype=torch.int64)
    rows = torch.zeros(2 * num_rows, dtype=torch.int64)
    ordered_kernel.attend_ordered(tokens, cache, table, rows, rows)


def run_layer(shape: Shape, dtype: torch.dtype, num_rows: int) -> None:
    """The kernels between the matrices of a layer, and the batch-invariant product."""
    x, weight = torch.empty(num_rows, shape.hidden, dtype=dtype), torch.ones(shape.hidden)
    norm = RmsNorm(1e-6, dtype, x.device)
    layer_kernels.normalize(x, weight.to(dtype), norm.eps, x.clone())
    layer_kernels.normalize(x, None, norm.eps)
    heads = torch.empty(
        num_rows, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim, dtype=dtype
    )
    angles = torch.empty(num_rows, 1, shape.head_dim, dtype=dtype)
    of_head = torch.ones(shape.num_heads + shape.num_kv_heads, shape.head_dim, dtype=dtype)
    for scale in (None, of_head):
        num_rotated = shape.num_heads + shape.num_kv_heads
        layer_kernels.rotate(heads, num_rotated, (angles, angles), norm, scale)
    both = torch.empty(num_rows, 2 * shape.ffn, dtype=dtype)
    layer_kernels.gate_silu(*both.chunk(2, dim=1))
    row_kernels.multiply(x, torch.empty(shape.ffn, shape.hidden, dtype=dtype), None)


def draw(shape: Shape, num_rows: int) -> None:
    """Noise over the vocabulary, for the sampled token and for a draft head of 8,192 ids."""
    keys = torch.zeros(num_rows, dtype=torch.int64)
    noise_kernel.noisy_argmax(torch.empty(num_rows, shape.vocab), keys, keys)
    one = torch.ones((), dtype=torch.float64)
    for vocab in (shape.vocab, 8192):
        ids = torch.zeros(vocab, dtype=torch.int64) if vocab == 8192 else None
        logits: Tensor = torch.empty(num_rows, vocab, dtype=torch.bfloat16)
        noise_kernel.add_noise(logits, keys, keys, one, one, ids)


def compile_all(capability: int, names: Sequence[str]) -> Iterator[Use]:
    """Yield the resources of every kernel that the shapes need on one kind of GPU."""
    compiler = Compiler()
    driver.set_active(AbsentGpu(capability))
    for name in names:
        shape = SHAPES[name]
        for kind, dtype in DTYPES.items():
            for num_rows in ROWS:
                compiler.what = f"{name} {kind}, {num_rows} rows"
                attend(shape, dtype, num_rows)
                if name in ("7B", "0.5B"):
                    run_layer(shape, dtype, num_rows)
        compiler.what = f"{name}, vocabulary {shape.vocab:,}"
        draw(shape, 2)
        yield from compiler.uses
        compiler.uses.clear()


def main() -> None:
    """Print the table if asked to, and name every kernel that does not fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("capabilities", type=int, nargs="*", default=list(SHARED_KIB))
    parser.add_argument("--only", nargs="*", choices=SHAPES, default=tuple(SHAPES))
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print("| kernel | shape | capability | shared bytes | stack bytes | registers |")
        print("|---|---|---|---|---|---|")
    wrong = []
    for use in chain.from_iterable(compile_all(c, options.only) for c in options.capabilities):
        if options.table:
            print("|", " | ".join(map(str, use)), "|", flush=True)
        if use.shared > SHARED_KIB[use.capability] << 10 or use.stack > MAX_STACK:
            wrong.append(f"does not fit: {use}")
    sys.exit("\n".join(wrong) or None)


if __name__ == "__main__":
    main()
