"""Loops of the CPU path, compiled by numba: norm, rotation, gate, and attention over the keys of
each row at the row's own length. `compiled_layer.py` calls them.

A loop computes whole rows, heads or queries, in an order that only their size decides. So bits do
not depend on the other rows. Loops run in one thread and read torch's memory by address, with
sizes and strides in values. A bfloat16 value is the upper half of a float32. numba compiles a loop
once for each dtype and keeps it on disk.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic, overload

# A value of each dtype, by which numba chooses what it compiles: the argument `kind`.
KINDS = {
    torch.float32: np.float32(0),
    torch.float64: np.float64(0),
    torch.bfloat16: np.uint16(0),
}
_AHEAD = 16  # keys: memory takes longer than the products with them
_LINE = 16  # values of a cache line at most, but float64's
_SCORES = 64  # scores of a query are a multiple of it, so no sum over them has a remainder
# Sums may be reordered and fused, else none is a vector's. Infinities and NaN count.
_FAST = {"reassoc", "contract", "arcp", "nsz"}
# A loop contains its parts. Else a loop from the disk, without its compiled parts in memory, would
# run others than when it was compiled, whose bits differ.
part = njit(error_model="numpy", fastmath=_FAST, forceinline=True)
_INLINED: Any = {"forceinline": True}
_PARTS = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]


def compiled(function: Callable[..., Any]) -> Any:
    """Return the function compiled, with all of its parts. Other threads run meanwhile."""
    # numba sees whether the function's own module has changed, and the name whether this one has.
    named = FunctionType(function.__code__, function.__globals__)
    named.__qualname__ = f"{function.__name__}_{_PARTS}"
    make = partial(njit, error_model="numpy", fastmath=_FAST, nogil=True)
    try:
        return make(cache=True)(named)
    except RuntimeError:  # there is no folder that it could be kept in
        return make()(named)


@intrinsic
def pointer(_context, address, offset, kind) -> Any:
    """Return a pointer to the value `offset` places after an address."""
    result = types.CPointer(kind)

    def generate(context, builder, _signature, arguments):
        start = builder.inttoptr(arguments[0], context.get_data_type(kind).as_pointer())
        return builder.gep(start, [arguments[1]])

    return result(address, offset, kind), generate


@part
def span(address, offset, size, kind):
    """Return `size` values, `offset` places after an address, as an array."""
    start = pointer(address, offset, kind)  # pyright: ignore[reportCallIssue]
    return carray(start, (size,))


def widen(value: Any) -> Any:
    """Return a value as a float32, or as the float64 that it is."""


def narrow(value: Any, kind: Any) -> Any:
    """Return a wide value in the dtype of `kind`, rounded to the nearest, to even in a tie."""


def wide(number: Any, kind: Any) -> Any:
    """Return a number as a wide value. numba makes a float64 of a float32 and an integer."""


def exp(value: Any) -> Any:
    """Return exp of a wide value below 88."""


@overload(widen, jit_options=_INLINED)
def _widen_of(value):
    if isinstance(value, types.Integer):
        return lambda value: np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)
    return lambda value: value


@overload(narrow, jit_options=_INLINED)
def _narrow_of(value, kind):
    if not isinstance(kind, types.Integer):
        return lambda value, kind: value

    def narrow(value, kind):
        bits = np.float32(value).view(np.uint32)
        is_odd = (bits >> np.uint32(16)) & np.uint32(1)
        rounded = np.uint16((bits + np.uint32(0x7FFF) + is_odd) >> np.uint32(16))
        return np.uint16(0x7FC0) if value != value else rounded

    return narrow


@overload(wide, jit_options=_INLINED)
def _wide_of(number, kind):
    if kind == types.float64:
        return lambda number, kind: np.float64(number)
    return lambda number, kind: np.float32(number)


@overload(exp, jit_options=_INLINED)
def _exp_of(value):
    if value == types.float64:
        return lambda value: math.exp(value)

    def exp(value):
        # exp(n log 2), times a polynomial of the rest (the coefficients of Cephes' expf).
        is_zero = value < np.float32(-87.0)
        value = np.float32(-87.0) if is_zero else value
        n = np.floor(value * np.float32(1.44269504) + np.float32(0.5))
        rest = value - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
        sums = np.float32(1.9875691500e-4) * rest + np.float32(1.3981999507e-3)
        sums = sums * rest + np.float32(8.3334519073e-3)
        sums = sums * rest + np.float32(4.1665795894e-2)
        sums = sums * rest + np.float32(1.6666665459e-1)
        sums = sums * rest + np.float32(5.0000001201e-1)
        sums = sums * rest * rest + rest + np.float32(1.0)
        power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
        return np.float32(0.0) if is_zero else sums * power

    return exp


@part
def _scale_of(values, eps, kind):
    """Return 1 / sqrt(mean(x^2) + eps) of an array."""
    total = wide(0, kind)
    for i in range(values.size):
        total += widen(values[i]) * widen(values[i])
    return wide(1, kind) / np.sqrt(total / wide(values.size, kind) + eps)


@compiled
def normalize(x, x_row, addend, addend_row, weight, eps, out, num_rows, size, kind):
    """Add a row of `addend` to that of x. Then write x * weight / sqrt(mean(x^2) + eps). The
    address 0 is no tensor.
    """
    for row in range(num_rows):
        values = span(x, row * x_row, size, kind)
        normed = span(out, row * size, size, kind)
        if addend:
            addends = span(addend, row * addend_row, size, kind)
            for i in range(size):
                values[i] = narrow(widen(values[i]) + widen(addends[i]), kind)
        scale = _scale_of(values, eps, kind)
        if weight:
            weights = span(weight, 0, size, kind)
            for i in range(size):
                unit = widen(narrow(widen(values[i]) * scale, kind))
                normed[i] = narrow(unit * widen(weights[i]), kind)
        else:
            for i in range(size):
                normed[i] = narrow(widen(values[i]) * scale, kind)


@compiled
def differentiate_norm(grad, x, weight, eps, out, sums, num_rows, size, kind):
    """Write the gradient of x, and add that of the weight to the array `sums`."""
    weights = span(weight, 0, size, kind)
    for row in range(num_rows):
        values, grads = span(x, row * size, size, kind), span(grad, row * size, size, kind)
        found = span(out, row * size, size, kind)
        scale, total = _scale_of(values, eps, kind), wide(0, kind)
        for i in range(size):
            slope = widen(grads[i]) * widen(values[i])
            total += slope * widen(weights[i])
            sums[i] += slope * scale
        share = total * scale * scale / wide(size, kind)
        for i in range(size):
            slope = widen(grads[i]) * widen(weights[i])
            found[i] = narrow((slope - widen(values[i]) * share) * scale, kind)


@compiled
def rotate(heads, heads_row, weight, eps, cos, sin, angles_row, shape, kind):
    """Normalize the heads of each token that rotate, if there is a weight, and turn them, in
    place.
    """
    num_tokens, num_rotated, size, half = shape
    for token in range(num_tokens):
        cosines = span(cos, token * angles_row, half, kind)
        sines = span(sin, token * angles_row + half, half, kind)
        for head in range(num_rotated):
            values = span(heads, token * heads_row + head * size, size, kind)
            if weight:
                weights = span(weight, head * size, size, kind)
                scale = _scale_of(values, eps, kind)
                for i in range(size):
                    unit = widen(narrow(widen(values[i]) * scale, kind))
                    values[i] = narrow(unit * widen(weights[i]), kind)
            others = span(heads, token * heads_row + head * size + half, half, kind)
            for i in range(half):
                first, second = widen(values[i]), widen(others[i])
                cosine, sine = widen(cosines[i]), widen(sines[i])
                values[i] = narrow(first * cosine - second * sine, kind)
                others[i] = narrow(second * cosine + first * sine, kind)


@compiled
def gate(gate, gate_row, up, up_row, out, num_rows, size, kind):
    """Write silu(gate) * up."""
    for row in range(num_rows):
        gates = span(gate, row * gate_row, size, kind)
        ups = span(up, row * up_row, size, kind)
        outs = span(out, row * size, size, kind)
        for i in range(size):
            value = widen(gates[i])
            power = exp(-value if value > wide(-87, kind) else wide(87, kind))
            silu = widen(narrow(value / (wide(1, kind) + power), kind))
            outs[i] = narrow(silu * widen(ups[i]), kind)


@compiled
def differentiate_gate(grad, halves, out, num_rows, size, kind):
    """Write the gradients of gate and up, which are the halves of a row."""
    one = wide(1, kind)
    for row in range(num_rows):
        grads, at = span(grad, row * size, size, kind), 2 * row * size
        gates, ups = span(halves, at, size, kind), span(halves, at + size, size, kind)
        to_gates, to_ups = span(out, at, size, kind), span(out, at + size, size, kind)
        for i in range(size):
            value, slope = widen(gates[i]), widen(grads[i])
            power = exp(-value if value > wide(-87, kind) else wide(87, kind))
            share = one / (one + power)
            to_ups[i] = narrow(slope * value * share, kind)
            rise = share * (one + value * (one - share))
            to_gates[i] = narrow(slope * widen(ups[i]) * rise, kind)


@compiled
def store(kv, row_size, slots, kv_cache, num_slots, num_heads, size, kind):
    """Copy the heads of new tokens to their slots."""
    for token in range(slots.size):
        for head in range(num_heads):
            source = span(kv, token * row_size + head * size, size, kind)
            target = span(kv_cache, (head * num_slots + slots[token]) * size, size, kind)
            for i in range(size):
                target[i] = source[i]


@intrinsic
def prefetch(_context, place) -> Any:
    """Have a value brought near, without waiting for it."""

    def generate(context, builder, _signature, arguments):
        number = ir.IntType(32)
        given = [arguments[0], number(0), number(3), number(1)]  # to read, for all caches, data
        signature = ir.FunctionType(ir.VoidType(), [each.type for each in given])
        builder.call(get_or_insert_function(builder.module, signature, "llvm.prefetch.p0"), given)
        return context.get_dummy_value()

    return types.void(place), generate


@part
def _four_keys(kv_cache, places, j, first, following, size, kind) -> Any:
    """Return four keys from slot `first` on, and have later ones brought near, in the end those
    from slot `following` on.
    """
    start = first if j + _AHEAD < places.size else following
    later = (start + places[(j + _AHEAD) % places.size]) * size
    for i in range(0, 4 * size, _LINE):
        prefetch(pointer(kv_cache, later + i, kind))  # pyright: ignore[reportCallIssue]
    return (
        span(kv_cache, (first + places[j]) * size, size, kind),
        span(kv_cache, (first + places[j + 1]) * size, size, kind),
        span(kv_cache, (first + places[j + 2]) * size, size, kind),
        span(kv_cache, (first + places[j + 3]) * size, size, kind),
    )


@part
def _score(queries, kv_cache, places, first, following, scores, kind):
    """Write the products of queries [X, H] with the keys at `places` from slot `first` on. Four
    keys at once make vectors of their sums.
    """
    size = queries.shape[1]
    for j in range(0, places.size, 4):
        a, b, c, d = _four_keys(kv_cache, places, j, first, following, size, kind)
        for x in range(queries.shape[0]):
            of_a = of_b = of_c = of_d = wide(0, kind)
            for i in range(size):
                query = queries[x, i]
                of_a += query * widen(a[i])
                of_b += query * widen(b[i])
                of_c += query * widen(c[i])
                of_d += query * widen(d[i])
            scores[x, j], scores[x, j + 1] = of_a, of_b
            scores[x, j + 2], scores[x, j + 3] = of_c, of_d


@part
def _add_values(weights, kv_cache, places, first, following, sums, kind):
    """Write the sums [X, H] of the values at `places` from slot `first` on, times weights."""
    size = sums.shape[1]
    sums[:] = 0
    for j in range(0, places.size, 4):
        a, b, c, d = _four_keys(kv_cache, places, j, first, following, size, kind)
        for x in range(sums.shape[0]):
            of_a, of_b = weights[x, j], weights[x, j + 1]
            of_c, of_d = weights[x, j + 2], weights[x, j + 3]
            for i in range(size):
                pair = of_a * widen(a[i]) + of_b * widen(b[i])
                sums[x, i] += pair + of_c * widen(c[i]) + of_d * widen(d[i])


@intrinsic
def _larger(_context, first, second) -> Any:
    """Return the larger number. LLVM makes vectors of its own form alone, not of a comparison."""

    def generate(_context, builder, _signature, arguments):
        kind = arguments[0].type
        signature = ir.FunctionType(kind, [kind, kind])
        function = builder.module.declare_intrinsic("llvm.maxnum", [kind], signature)
        return builder.call(function, arguments, fastmath=("nnan", "nsz"))

    return first(first, second), generate


@part
def largest(values):
    most = values[0]
    for j in range(1, values.size):
        most = _larger(most, values[j])  # pyright: ignore[reportCallIssue]
    return most


@part
def softmax(scores, length):
    """Replace the first scores by their softmax, and the others by 0. Return the largest score, and
    the sum of exp of the differences from it.
    """
    scores[length:] = -np.inf
    most = largest(scores)
    total = wide(0, scores[0])
    for j in range(scores.size):
        scores[j] = exp(scores[j] - most)
        total += scores[j]
    for j in range(scores.size):
        scores[j] /= total
    return most, total


@compiled
def attend(query, row_size, kv_cache, places, lengths, out, shape, kind):
    """Write the attention of each query of a row over as many of the row's places as `lengths`
    [rows, queries] has.
    """
    num_kv_heads, repeat, size, num_slots = shape
    num_queries = lengths.shape[1]
    scale = wide(1, kind) / np.sqrt(wide(size, kind))
    zero = wide(0, kind)
    width = (places.shape[1] + _SCORES - 1) // _SCORES * _SCORES
    scores = np.full((num_queries * repeat, width), zero)
    queries = np.full((num_queries * repeat, size), zero)
    sums = np.full((num_queries * repeat, size), zero)
    all_places = np.zeros(places.shape[1], np.int64)
    for row in range(lengths.shape[0]):
        length = lengths[row].max()
        own = all_places[: (length + 3) // 4 * 4]
        own[:] = places[row, 0]  # weight 0, but 0 times infinity of another row would show
        own[:length] = places[row, :length]
        num_used = (length + _SCORES - 1) // _SCORES * _SCORES
        for head in range(num_kv_heads):
            for x in range(num_queries * repeat):
                token = row * num_queries + x // repeat
                at = token * row_size + (head * repeat + x % repeat) * size
                source = span(query, at, size, kind)
                for i in range(size):
                    queries[x, i] = widen(source[i]) * scale
            keys, values = head * num_slots, (num_kv_heads + head) * num_slots
            _score(queries, kv_cache, own, keys, values, scores, kind)
            for x in range(num_queries * repeat):
                softmax(scores[x, :num_used], lengths[row, x // repeat])
            _add_values(scores, kv_cache, own, values, keys + num_slots, sums, kind)
            for x in range(num_queries * repeat):
                token = row * num_queries + x // repeat
                at = ((token * num_kv_heads + head) * repeat + x % repeat) * size
                target = span(out, at, size, kind)
                for i in range(size):
                    target[i] = narrow(sums[x, i], kind)
