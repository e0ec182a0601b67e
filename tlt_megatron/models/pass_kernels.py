"""Layers of a pass of few rows as one loop, compiled by numba. `compiled_pass.py` calls it.

Between two calls from Python lie several microseconds, as many as a product with few rows takes. So
a pass is one call. Matrices are read where the model keeps them, row by row: a packed copy pays for
many rows alone. The loops of `cpu_kernels.py` are its parts, so all else has their bits.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tlt_megatron.models import cpu_kernels
from tlt_megatron.models.cpu_kernels import (
    compiled,
    narrow,
    part,
    pointer,
    prefetch,
    span,
    wide,
    widen,
)

# The sums of a tile are vectors of so many bytes, of four rows of a matrix times those of x. They
# stay in registers.
_HAS_AVX512 = llvmlite.binding.get_host_cpu_features().get("avx512f", False)
_VECTOR_BYTES, _ROWS = (64, 4) if _HAS_AVX512 else (32, 2)
# Values of a matrix that are asked for early, and those between two requests: a part of a cache
# line, because the machine drops some requests.
_AHEAD, _LINE = 2048, 8
_normalize, _rotate, _gate, _store, _attend = (
    part(loop.py_func)
    for loop in (
        cpu_kernels.normalize,
        cpu_kernels.rotate,
        cpu_kernels.gate,
        cpu_kernels.store,
        cpu_kernels.attend,
    )
)


@intrinsic(prefer_literal=True)
def _dots(_context, x, weight, size, sums, num_rows, number, kind) -> Any:
    """Write the products of `num_rows` rows of x with four rows of a matrix. All arguments but the
    numbers are addresses. x and the sums have the dtype of `number`, and the matrix that of `kind`.

    A sum is always added in the same order: vector by vector, then the values of the vector.
    """
    count = num_rows.literal_value

    def generate(context, builder, _signature, arguments):
        x, weight, size, sums, *_ = arguments
        wide_kind, integer, lane = context.get_data_type(number), ir.IntType(64), ir.IntType(32)
        width = _VECTOR_BYTES // (number.bitwidth // 8)
        vector, lanes = ir.VectorType(wide_kind, width), ir.VectorType(lane, width)

        def load(address, row, step, kind):
            """Return the vector at a step of a row, as wide values."""
            value = context.get_data_type(kind)
            offset = builder.add(builder.mul(integer(row), size), step)
            place = builder.gep(builder.inttoptr(address, value.as_pointer()), [offset])
            place = builder.bitcast(place, ir.VectorType(value, width).as_pointer())
            found = builder.load(place, align=kind.bitwidth // 8)
            if value == wide_kind:
                return found
            upper = builder.shl(builder.zext(found, lanes), ir.Constant(lanes, [16] * width))
            return builder.bitcast(upper, vector)

        entry, body = builder.block, builder.append_basic_block("dots")
        builder.branch(body)
        builder.position_at_end(body)
        step, totals = builder.phi(integer), [builder.phi(vector) for _ in range(4 * count)]
        columns = [load(weight, row, step, kind) for row in range(4)]
        after = []
        for row in range(count):
            values = load(x, row, step, number)
            for column in columns:
                product = builder.fmul(values, column, flags=("contract",))
                after.append(builder.fadd(totals[len(after)], product, flags=("contract",)))
        following = builder.add(step, integer(width))
        zeros = [ir.Constant(vector, None) for _ in totals]
        for phi, first, then in zip(
            [step, *totals], [integer(0), *zeros], [following, *after], strict=True
        ):
            phi.add_incoming(first, entry)
            phi.add_incoming(then, body)
        end = builder.append_basic_block("dots.end")
        builder.cbranch(builder.icmp_signed("<", following, size), body, end)
        builder.position_at_end(end)

        def pick(first, second, places):
            order = ir.Constant(ir.VectorType(lane, len(places)), places)
            return builder.shuffle_vector(first, second, order)

        def halve(total):
            while total.type.count > 4:
                places, middle = list(range(total.type.count)), total.type.count // 2
                parts = pick(total, total, places[:middle]), pick(total, total, places[middle:])
                total = builder.fadd(*parts)
            return total

        def join(pair, low, high):
            first, second = pair
            return builder.fadd(pick(first, second, low), pick(first, second, high))

        target = builder.inttoptr(sums, ir.VectorType(wide_kind, 4).as_pointer())
        for row in range(count):
            a, b, c, d = map(halve, after[4 * row :][:4])
            pairs = [join(pair, [0, 4, 1, 5], [2, 6, 3, 7]) for pair in ((a, b), (c, d))]
            four = join(pairs, [0, 1, 4, 5], [2, 3, 6, 7])
            builder.store(four, builder.gep(target, [integer(row)]), align=number.bitwidth // 8)
        return context.get_dummy_value()

    arguments = x, weight, size, sums, num_rows, number, kind
    return types.void(*arguments), generate


@part
def _save(sums, out, place, addend, addend_place, kind):
    """Write four sums, plus the addend."""
    values = span(out, place, 4, kind)
    if addend:
        addends = span(addend, addend_place, 4, kind)
        for i in range(4):
            values[i] = narrow(sums[i] + widen(addends[i]), kind)
    else:
        for i in range(4):
            values[i] = narrow(sums[i], kind)


@part
def _multiply(x, weight, addend, addend_row, out, num_rows, num_out, size, kind):
    """Write x times each row of a matrix, plus a row of `addend`, whose address may be 0."""
    number = wide(0, kind)
    rows, sums = np.full((num_rows, size), number), np.full((_ROWS, 4), number)
    for r in range(num_rows):
        source = span(x, r * size, size, kind)
        for i in range(size):
            rows[r, i] = widen(source[i])
    rows_at, sums_at = np.int64(rows.ctypes.data), np.int64(sums.ctypes.data)
    for o in range(0, num_out, 4):
        at = np.int64(span(weight, o * size, size, kind).ctypes.data)
        for i in range(o * size + _AHEAD, (o + 4) * size + _AHEAD, _LINE):
            prefetch(pointer(weight, i, kind))  # pyright: ignore[reportCallIssue]
        r = 0
        while r < num_rows:
            source, left = rows_at + r * size * rows.itemsize, num_rows - r
            if left >= _ROWS:
                done = _ROWS
                _dots(source, at, size, sums_at, _ROWS, number, kind)
            elif left >= 2:
                done = 2
                _dots(source, at, size, sums_at, 2, number, kind)
            else:
                done = 1
                _dots(source, at, size, sums_at, 1, number, kind)
            for row in range(r, r + done):
                place, addend_place = row * num_out + o, row * addend_row + o
                _save(sums[row - r], out, place, addend, addend_place, kind)
            r += done


multiply = compiled(_multiply.py_func)


@compiled
def run_layers(rows, weights, caches, taps, read, angles, heads_row, eps, shape, kind):
    """Run rows through layers. See `compiled_pass.CompiledPass`.

    Each layer has a row of `weights`, addresses in the order of `DenseLayer`, its KV in `caches`,
    and in `taps` the address that its residual stream is copied to, or 0.
    """
    x, normed, heads, rooms = rows
    slots, places, lengths, num_slots = read
    cos, sin, angles_row, half = angles
    hidden, num_heads, num_kv_heads, size, ffn, item = shape
    num_rows, num_pairs = slots.size, 2 * num_kv_heads
    num_fused, width = (num_heads + num_pairs) * size, num_heads * size
    context = rooms + num_rows * num_fused * item
    halves = context + num_rows * width * item
    gated = halves + num_rows * 2 * ffn * item
    out = gated + num_rows * ffn * item
    kv, up = heads + width * item, halves + ffn * item
    turned = num_rows, num_heads + num_kv_heads, size, half
    grouped = num_kv_heads, num_heads // num_kv_heads, size, num_slots
    for layer in range(weights.shape[0]):
        qkv, qkv_bias, qk_norm, output, post_norm, gate_up, down, next_norm = weights[layer]
        if qkv:
            _multiply(normed, qkv, qkv_bias, 0, heads, num_rows, num_fused, hidden, kind)
        _rotate(heads, heads_row, qk_norm, eps, cos, sin, angles_row, turned, kind)
        _store(kv, heads_row, slots, caches[layer], num_slots, num_pairs, size, kind)
        _attend(heads, heads_row, caches[layer], places, lengths, context, grouped, kind)
        _multiply(context, output, 0, 0, out, num_rows, hidden, width, kind)
        _normalize(out, hidden, x, hidden, post_norm, eps, normed, num_rows, hidden, kind)
        _multiply(normed, gate_up, 0, 0, halves, num_rows, 2 * ffn, hidden, kind)
        _gate(halves, 2 * ffn, up, 2 * ffn, gated, num_rows, ffn, kind)
        _multiply(gated, down, 0, 0, x, num_rows, hidden, ffn, kind)
        _normalize(x, hidden, out, hidden, next_norm, eps, normed, num_rows, hidden, kind)
        if taps[layer]:
            stream = span(x, 0, num_rows * hidden, kind)
            kept = span(taps[layer], 0, num_rows * hidden, kind)
            for i in range(num_rows * hidden):
                kept[i] = stream[i]
