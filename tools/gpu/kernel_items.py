"""Stage 1: the Triton kernels at the shapes of a 7B against torch: error, microseconds in a graph,
GB/s.

On a CPU they are interpreted, at tiny sizes and in float32 instead of bfloat16, which Triton's
interpreter multiplies wrongly. A shape that fails does not keep the others from running.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_megatron.models.attention.kernels import attend_fused, attend_in_chunks
from tlt_megatron.models.attention.ordered_kernel import attend_ordered
from tlt_megatron.models.layer_kernels import normalize
from tlt_megatron.models.row_kernels import multiply
from tlt_megatron.runtime.device import Device
from tlt_megatron.speculation import noise_kernel
from tlt_megatron.speculation.sampling import gumbel_of, row_keys
from tools.gpu.machine import Figures, Machine, copies_beyond_cache, kernel_seconds, relative_error
from tools.gpu.shapes import QWEN_2_5_7B, TINY

# Largest relative error. Inputs and outputs are rounded to 8, 24 and 53 bits.
_TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-5, torch.float64: 1e-12}
_WIDE = {torch.bfloat16: torch.float32, torch.float32: torch.float64, torch.float64: torch.float64}
# Batch, query tokens of a row (1: plain; 7 and 17: verify passes of 6_1_6 and 6_4_16), context.
_ATTENTION = [(b, 1, s) for b in (1, 8, 64) for s in (512, 2048, 18_432)]
_ATTENTION += [(1, 7, 2048), (8, 7, 2048), (1, 7, 18_432), (1, 17, 2048), (16, 17, 2048)]


def _run_all(cases: Mapping[str, Callable[[], Figures]]) -> Iterator[Figures]:
    """Yield the figures of all cases. RuntimeError at the end names those that failed."""
    failed, summary = [], ""
    for name, case in cases.items():
        try:
            figures = case()
            summary += f" {name} {figures.get('us', figures.get('us_1')):.1f}us"
            summary += f" {figures['gb_s']:.0f}GB/s" if "gb_s" in figures else ""
            yield {name: figures, "summary": summary}
        except Exception as error:
            traceback.print_exc()
            failed.append(f"{name}: {type(error).__name__}: {error}"[:120])
            yield {"failed": failed}
    if failed:
        raise RuntimeError(f"{len(failed)} cases, the first is {failed[0]}")


def _check(found: Tensor, expected: Tensor, dtype: torch.dtype) -> float:
    error = relative_error(found, expected)
    if not error <= _TOLERANCE[dtype]:
        raise RuntimeError(f"relative error {error:.2g}: must be <= {_TOLERANCE[dtype]:g}")
    return error


def _timed(
    device: Device, run: Callable[[int], object], error: float, num_bytes: int = 0
) -> Figures:
    """Return the time of a kernel beside its error. `num_bytes` are those that it reads."""
    seconds = kernel_seconds(device, run)
    rate = {"gb_s": 1e-9 * num_bytes / seconds} if num_bytes else {}
    return {"error": error, "us": 1e6 * seconds, **rate}


def noise(machine: Machine) -> Iterator[Figures]:
    """Yield how the noise kernels agree with the torch form, and their times, for 1 to 320 rows of
    logits.
    """
    device = machine.kernel_device()
    vocab_size = machine.pick(QWEN_2_5_7B.vocab_size, 1025)
    for_drafts = machine.pick(8192, 300)

    def argmax(num_rows: int) -> Figures:
        logits = torch.randn(num_rows, vocab_size, device=device.torch_device)
        keys = _keys(num_rows, device)
        ids = torch.arange(vocab_size, device=device.torch_device)
        expected = (gumbel_of(row_keys(*keys), ids) + logits).argmax(dim=1)
        found = noise_kernel.noisy_argmax(logits, *keys)
        if (differing := int((found != expected).sum())) > 0:
            raise RuntimeError(f"{differing} of {num_rows} tokens differ")
        run = partial(noise_kernel.noisy_argmax, logits, *keys)
        return _timed(device, lambda _: run(), 0.0, logits.nbytes)

    def add(num_rows: int) -> Figures:
        dtype = torch.float32 if machine.is_cpu else torch.bfloat16
        logits = torch.randn(num_rows, for_drafts, device=device.torch_device).to(dtype)
        keys = _keys(num_rows, device)
        one = torch.ones((), dtype=torch.float64, device=device.torch_device)
        ids = 3 * torch.arange(for_drafts, device=device.torch_device)
        given = (logits, *keys, one, one, ids)
        found = noise_kernel.add_noise(*given)
        error = _check(found, gumbel_of(row_keys(*keys), ids) + logits, torch.float32)
        return _timed(device, lambda _: noise_kernel.add_noise(*given), error)

    counts = machine.pick((1, 8, 64, 320), (1, 3))
    cases = {f"argmax_{n}": partial(argmax, n) for n in counts}
    yield from _run_all(cases | {f"add_{n}": partial(add, n) for n in counts[:-1]})


def _keys(num_rows: int, device: Device) -> tuple[Tensor, Tensor]:
    """Return seeds and positions."""
    seeds = torch.arange(num_rows, device=device.torch_device)
    return seeds * 7919, seeds + 5


def attention(machine: Machine, dtype_name: str) -> Iterator[Figures]:
    """Yield error and time of the attention kernels: over lanes, and in bfloat16 also in the order
    of a slot table.
    """
    device, dtype = machine.kernel_device(), getattr(torch, dtype_name)
    if machine.is_cpu and dtype == torch.bfloat16:
        dtype = torch.float32
    shapes = machine.pick(_ATTENTION, [(2, 1, 40), (1, 3, 530)])
    is_main = dtype_name == "bfloat16"
    lanes = shapes
    if not is_main and not machine.is_tiny:  # other dtypes are for tests: a few shapes
        lanes = [shape for shape in shapes if shape[0] == 1]
    cases = {_name(s): partial(_attend_lanes, machine, device, dtype, s) for s in lanes}
    if is_main:
        plain = [shape for shape in shapes if shape[1] == 1]
        ordered = partial(_attend_ordered, machine, device, dtype)
        cases |= {f"ordered_{_name(s)}": partial(ordered, s) for s in plain}
    yield from _run_all(cases)


def _name(shape: tuple[int, int, int]) -> str:
    batch_size, num_rows, context = shape
    return f"b{batch_size}_r{num_rows}_s{context}"


def _attend_lanes(
    machine: Machine, device: Device, dtype: torch.dtype, shape: tuple[int, int, int]
) -> Figures:
    """Each row sees its context, and of the last `num_rows` positions those up to its own."""
    batch_size, num_rows, context = shape
    c, gpu = machine.pick(QWEN_2_5_7B, TINY), device.torch_device
    num_kv, head_dim, repeat = c.num_kv_heads, c.head_dim, c.num_heads // c.num_kv_heads
    kv_bytes = 2 * num_kv * batch_size * context * head_dim * dtype.itemsize
    pools = [
        torch.randn(2 * num_kv, batch_size * context, head_dim, device=gpu).to(dtype)
        for _ in range(copies_beyond_cache(kv_bytes) if device.is_cuda else 1)
    ]
    lanes = [p.unflatten(1, (batch_size, context)).transpose(0, 1).chunk(2, dim=1) for p in pools]
    query = torch.randn(batch_size, num_kv, num_rows * repeat, head_dim, device=gpu).to(dtype)
    bias = torch.zeros(batch_size, 1, num_rows, context, dtype=dtype, device=gpu)
    hidden = torch.ones(num_rows, num_rows, dtype=torch.bool, device=gpu).triu_(1)
    bias[..., context - num_rows :].masked_fill_(hidden, -torch.inf)
    wide = _WIDE[dtype]
    inputs = (query, *lanes[0], bias.repeat_interleave(repeat, dim=2))
    expected, _ = attend_in_chunks(*(tensor.to(wide) for tensor in inputs))

    def attend(number: int) -> Tensor:
        keys, values = lanes[number % len(lanes)]
        return attend_fused(query, keys, values, bias)[0]

    return _timed(device, attend, _check(attend(0), expected, dtype), kv_bytes)


def _attend_ordered(
    machine: Machine, device: Device, dtype: torch.dtype, shape: tuple[int, int, int]
) -> Figures:
    """One token of each row over all of its context, which lies anywhere in the pool."""
    batch_size, _, context = shape
    c, gpu = machine.pick(QWEN_2_5_7B, TINY), device.torch_device
    num_kv, head_dim = c.num_kv_heads, c.head_dim
    num_slots = batch_size * context
    kv = torch.randn(2 * num_kv, num_slots, head_dim, device=gpu).to(dtype)
    query = torch.randn(batch_size, c.num_heads, head_dim, device=gpu).to(dtype)
    table = torch.randperm(num_slots, device=gpu).view(batch_size, context)
    rows = torch.arange(batch_size, device=gpu)
    given = (query, kv, table, rows, torch.full_like(rows, context))
    keys, values = kv[:, table].transpose(0, 1).to(_WIDE[dtype]).chunk(2, dim=1)
    grouped = query.view(batch_size, num_kv, -1, head_dim).to(_WIDE[dtype])
    expected = attend_in_chunks(grouped, keys, values)[0].view(batch_size, -1)
    error = _check(attend_ordered(*given), expected, dtype)
    return _timed(device, lambda _: attend_ordered(*given), error, kv.nbytes)


def rows(machine: Machine) -> Iterator[Figures]:
    """Yield error and time of the batch-invariant product and norm, and that a row has the same
    bits in every batch.
    """
    device = machine.kernel_device()
    dtype = torch.float32 if machine.is_cpu else torch.bfloat16
    c, gpu = machine.pick(QWEN_2_5_7B, TINY), device.torch_device
    matrices = {
        "qkv": ((c.num_heads + 2 * c.num_kv_heads) * c.head_dim, c.hidden_size),
        "gate_up": (2 * c.ffn_size, c.hidden_size),
        "down": (c.hidden_size, c.ffn_size),
        "head": (c.vocab_size, c.hidden_size),
    }

    def product(shape: tuple[int, int]) -> Figures:
        weight = torch.randn(shape, device=gpu).to(dtype)
        x = torch.randn(64, shape[1], device=gpu).to(dtype)
        found = multiply(x, weight, None)
        figures: Figures = {"error": _check(found, F.linear(x.float(), weight.float()), dtype)}
        for size in (1, 8, 64):
            part = x[:size]
            if not torch.equal(multiply(part, weight, None), found[:size]):
                raise RuntimeError(f"{size} rows have other bits than 64 rows")
            ours = kernel_seconds(device, lambda _, part=part: multiply(part, weight, None))
            torch_s = kernel_seconds(device, lambda _, part=part: F.linear(part, weight))
            figures |= {f"us_{size}": 1e6 * ours, f"torch_us_{size}": 1e6 * torch_s}
        return figures

    def norm() -> Figures:
        x, eps = torch.randn(64, c.hidden_size, device=gpu).to(dtype), torch.tensor(1e-6).to(gpu)
        weight = torch.randn(c.hidden_size, device=gpu).to(dtype)
        expected = F.rms_norm(x.float(), x.shape[1:], eps=1e-6) * weight.float()
        found = normalize(x, weight, eps)
        if not torch.equal(normalize(x[:1], weight, eps), found[:1]):
            raise RuntimeError("one row has other bits than 64 rows")
        error = _check(found, expected, dtype)
        return _timed(device, lambda _: normalize(x, weight, eps), error)

    cases = {name: partial(product, shape) for name, shape in matrices.items()}
    yield from _run_all({**cases, "norm": norm})
