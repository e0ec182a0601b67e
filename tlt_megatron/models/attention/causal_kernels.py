"""Causal attention over packed sequences and its gradient on a CPU, compiled by numba.

Queries are taken in strips. The scores of a strip with all keys up to its end lie side by side, so
one softmax is enough. All products are made of tiles, whose sums stay in registers. The query heads
of a group add to the gradient of their kv head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llvmlite.binding
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from tlt_megatron.models.attention.sums import wide_dtype
from tlt_megatron.models.cpu_kernels import KINDS, compiled, exp, part, softmax, span, wide

# The sums of a tile are its rows times two vectors, as many as a machine has registers for.
_HAS_AVX512 = llvmlite.binding.get_host_cpu_features().get("avx512f", False)
_ROWS, _VECTOR_BYTES = (8, 64) if _HAS_AVX512 else (4, 32)
_STRIP = 8  # queries, a multiple of a tile's rows
_COLUMNS = 32  # padded to a multiple of it, which holds whole tiles


def attend_sequences(
    query_PNH: Tensor, key_PKH: Tensor, value_PKH: Tensor, lengths: Sequence[int], scale: float
) -> tuple[Tensor, Tensor]:
    """Return causal attention [P, N, H] within each sequence, and the log of its normalizer [P, N].

    The latter is in `wide_dtype`, in which all is computed.
    """
    dtype = wide_dtype(query_PNH.dtype)
    inputs = [_rows(each, dtype) for each in (query_PNH, key_PKH, value_PKH)]
    out_PNH, lse_PN = _empty(query_PNH, dtype), _empty(query_PNH[..., 0], dtype)
    outputs = out_PNH.data_ptr(), lse_PN.data_ptr()
    _attend(*_places(inputs), *outputs, *_sizes(query_PNH, key_PKH, lengths, scale), KINDS[dtype])
    return out_PNH.to(query_PNH.dtype), lse_PN


def differentiate_sequences(
    grad_PNH: Tensor,
    query_PNH: Tensor,
    key_PKH: Tensor,
    value_PKH: Tensor,
    out_PNH: Tensor,
    lse_PN: Tensor,
    lengths: Sequence[int],
    scale: float,
) -> list[Tensor]:
    """Return the gradients of query, key and value in `wide_dtype`.

    `out_PNH` and `lse_PN` may be of a larger context (see `kernels.differentiate_causal`).
    """
    dtype = wide_dtype(query_PNH.dtype)
    tensors = grad_PNH, query_PNH, key_PKH, value_PKH, out_PNH
    inputs, lse_PN = [_rows(each, dtype) for each in tensors], lse_PN.contiguous()
    grads = [_empty(each, dtype) for each in tensors[1:4]]
    outputs = [each.data_ptr() for each in grads]
    sizes = _sizes(query_PNH, key_PKH, lengths, scale)
    _differentiate(*_places(inputs), lse_PN.data_ptr(), *outputs, *sizes, KINDS[dtype])
    return grads


def _rows(x_PNH: Tensor, dtype: torch.dtype) -> Tensor:
    """Return heads in this dtype, those of a token side by side."""
    x_PNH = x_PNH.to(dtype)
    return x_PNH if x_PNH.stride()[1:] == (x_PNH.shape[2], 1) else x_PNH.contiguous()


def _places(tensors: Sequence[Tensor]) -> list[int]:
    return [place for x_PNH in tensors for place in (x_PNH.data_ptr(), x_PNH.stride(0))]


def _empty(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(like.shape, dtype=dtype)


def _sizes(
    query_PNH: Tensor, key_PKH: Tensor, lengths: Sequence[int], scale: float
) -> tuple[np.ndarray, tuple[int, int, int], float]:
    num_tokens, num_heads, size = query_PNH.shape
    num_kv_heads = key_PKH.shape[1]
    assert sum(lengths) == num_tokens == len(key_PKH)  # the loops take sizes on trust
    return np.cumsum([0, *lengths]), (num_kv_heads, num_heads // num_kv_heads, size), scale


@intrinsic
def _tile(_context, a, a_row, a_step, b, b_row, depth, c, c_row, adds, kind) -> Any:
    """Write the products of `_ROWS` rows of a [.., depth] and two vectors of columns of b
    [depth, ..] to c, or add them. The arguments a, b and c are addresses.
    """

    def generate(context, builder, _signature, arguments):
        a, a_row, a_step, b, b_row, depth, c, c_row, adds, _ = arguments
        value, number = context.get_data_type(kind), ir.IntType(64)
        size = kind.bitwidth // 8
        vector = ir.VectorType(value, _VECTOR_BYTES // size)
        zeros, lane = ir.Constant(vector, None), ir.Constant(ir.IntType(32), 0)
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), None)

        def place(address, row, stride, column=0):
            row = number(row) if isinstance(row, int) else row
            offset = builder.add(builder.mul(row, stride), number(column))
            return builder.gep(builder.inttoptr(address, value.as_pointer()), [offset])

        def vectors(address, row, stride):
            places = [place(address, row, stride, column) for column in (0, vector.count)]
            return [builder.bitcast(each, vector.as_pointer()) for each in places]

        targets = [each for row in range(_ROWS) for each in vectors(c, row, c_row)]
        before = [builder.select(adds, builder.load(x, align=size), zeros) for x in targets]
        entry, body = builder.block, builder.append_basic_block("tile")
        end = builder.append_basic_block("tile.end")
        builder.branch(body)
        builder.position_at_end(body)
        step, sums = builder.phi(number), [builder.phi(vector) for _ in targets]
        columns = [builder.load(each, align=size) for each in vectors(b, step, b_row)]
        start = builder.ptrtoint(place(a, step, a_step), number)
        after = []
        for row in range(_ROWS):
            factor = builder.load(place(start, row, a_row), align=size)
            first = builder.insert_element(zeros, factor, lane)
            factors = builder.shuffle_vector(first, zeros, lanes)
            for total, column in zip(sums[2 * row :][:2], columns, strict=True):
                product = builder.fmul(factors, column, flags=("contract",))
                after.append(builder.fadd(total, product, flags=("contract",)))
        following = builder.add(step, number(1))
        for phi, first, then in zip(
            [step, *sums], [number(0), *before], [following, *after], strict=True
        ):
            phi.add_incoming(first, entry)
            phi.add_incoming(then, body)
        builder.cbranch(builder.icmp_signed("<", following, depth), body, end)
        builder.position_at_end(end)
        for target, total in zip(targets, after, strict=True):
            builder.store(total, target, align=size)
        return context.get_dummy_value()

    arguments = a, a_row, a_step, b, b_row, depth, c, c_row, adds, kind
    return types.void(*arguments), generate


@part
def _multiply(a, a_row, a_step, b, depth, c, num_rows, num_columns, adds, kind):
    """Write the product of a [num_rows, depth] and the first rows of b to c, or add it."""
    size = c.itemsize
    a_at, b_at, c_at = np.int64(a.ctypes.data), np.int64(b.ctypes.data), np.int64(c.ctypes.data)
    for column in range(0, num_columns, 2 * _VECTOR_BYTES // size):
        for row in range(0, num_rows, _ROWS):
            source, target = a_at + row * a_row * size, c_at + row * c.shape[1] * size
            b_of, c_of = b_at + column * size, target + column * size
            places = source, a_row, a_step, b_of, b.shape[1], depth, c_of, c.shape[1]
            _tile(*places, adds, kind)  # pyright: ignore[reportCallIssue]


@part
def _load(source, place, row, target, num_rows, size, factor, kind):
    """Copy the head at a place of each token, times a factor, to a row of an array."""
    for t in range(num_rows):
        values = span(source, place + t * row, size, kind)
        for i in range(size):
            target[t, i] = values[i] * factor


@part
def _turn(source, place, row, target, num_rows, size, kind):
    """Copy the head at a place of each token to a column of an array."""
    for t in range(num_rows):
        values = span(source, place + t * row, size, kind)
        for i in range(size):
            target[i, t] = values[i]


@part
def _save(source, target, place, row, num_rows, size, factor, kind):
    """Copy each row of an array, times a factor, to the head at a place of a token."""
    for t in range(num_rows):
        values = span(target, place + t * row, size, kind)
        for i in range(size):
            values[i] = source[t, i] * factor


@part
def _padded(number):
    return (number + _COLUMNS - 1) // _COLUMNS * _COLUMNS


@part
def _zeros(num_rows, num_columns, kind):
    return np.full((num_rows, num_columns), wide(0, kind))


@compiled
def _attend(query, q_row, key, k_row, value, v_row, out, lse, starts, shape, scale, kind):
    num_kv_heads, repeat, size = shape
    num_heads, columns, one = num_kv_heads * repeat, _padded(size), wide(1, kind)
    factor, room = wide(scale, kind), _padded(np.diff(starts).max())
    keys_HS, values_SH = _zeros(size, room, kind), _zeros(room, columns, kind)
    queries, scores = _zeros(_STRIP, size, kind), _zeros(_STRIP, room, kind)
    sums, out_row = _zeros(_STRIP, columns, kind), num_heads * size
    for n in range(starts.size - 1):
        first, length = starts[n], starts[n + 1] - starts[n]
        for pair in range(num_kv_heads):
            _turn(key, first * k_row + pair * size, k_row, keys_HS, length, size, kind)
            _load(value, first * v_row + pair * size, v_row, values_SH, length, size, one, kind)
            for i in range(repeat * ((length + _STRIP - 1) // _STRIP)):
                head, start = pair * repeat + i % repeat, i // repeat * _STRIP
                num_rows, token = min(_STRIP, length - start), first + start
                seen, place = start + num_rows, token * q_row + head * size
                width = _padded(seen)
                _load(query, place, q_row, queries, num_rows, size, factor, kind)
                _multiply(queries, size, 1, keys_HS, size, scores, _STRIP, width, False, kind)
                log_sums = span(lse, token * num_heads, num_rows * num_heads, kind)
                for row in range(num_rows):
                    most, total = softmax(scores[row, :width], start + row + 1)
                    log_sums[row * num_heads + head] = most + np.log(total)
                _multiply(scores, room, 1, values_SH, seen, sums, _STRIP, columns, False, kind)
                _save(sums, out, token * out_row + head * size, out_row, num_rows, size, one, kind)


@compiled
def _differentiate(
    grad, g_row, query, q_row, key, k_row, value, v_row, out, o_row, lse,
    grad_query, grad_key, grad_value, starts, shape, scale, kind,
):  # fmt: skip
    num_kv_heads, repeat, size = shape
    num_heads, columns, one = num_kv_heads * repeat, _padded(size), wide(1, kind)
    factor, room = wide(scale, kind), _padded(np.diff(starts).max())
    keys_HS, values_HS = _zeros(size, room, kind), _zeros(size, room, kind)
    keys_SH, sums = _zeros(room, columns, kind), _zeros(_STRIP, columns, kind)
    to_keys, to_values = _zeros(room, columns, kind), _zeros(room, columns, kind)
    queries, grads = _zeros(_STRIP, columns, kind), _zeros(_STRIP, columns, kind)
    weights, slopes = _zeros(_STRIP, room, kind), _zeros(_STRIP, room, kind)
    query_row, kv_row = num_heads * size, num_kv_heads * size
    for n in range(starts.size - 1):
        first, length = starts[n], starts[n + 1] - starts[n]
        for pair in range(num_kv_heads):
            place = first * k_row + pair * size
            _turn(key, place, k_row, keys_HS, length, size, kind)
            _load(key, place, k_row, keys_SH, length, size, one, kind)
            _turn(value, first * v_row + pair * size, v_row, values_HS, length, size, kind)
            to_keys[:], to_values[:] = 0, 0
            for i in range(repeat * ((length + _STRIP - 1) // _STRIP)):
                head, start = pair * repeat + i % repeat, i // repeat * _STRIP
                num_rows, token = min(_STRIP, length - start), first + start
                seen, at = start + num_rows, head * size
                width = _padded(seen)
                _load(query, token * q_row + at, q_row, queries, num_rows, size, factor, kind)
                _load(grad, token * g_row + at, g_row, grads, num_rows, size, one, kind)
                _multiply(queries, columns, 1, keys_HS, size, weights, _STRIP, width, False, kind)
                _multiply(grads, columns, 1, values_HS, size, slopes, _STRIP, width, False, kind)
                log_sums = span(lse, token * num_heads, num_rows * num_heads, kind)
                for row in range(num_rows):
                    outs, mean = span(out, (token + row) * o_row + at, size, kind), wide(0, kind)
                    for j in range(size):
                        mean += outs[j] * grads[row, j]
                    log_sum = log_sums[row * num_heads + head]
                    own_weights, own_slopes = weights[row, :width], slopes[row, :width]
                    for j in range(width):
                        own_weights[j] = exp(own_weights[j] - log_sum)
                        own_slopes[j] = own_weights[j] * (own_slopes[j] - mean)
                    own_weights[start + row + 1 :] = 0
                    own_slopes[start + row + 1 :] = 0
                _multiply(weights, 1, room, grads, num_rows, to_values, seen, columns, True, kind)
                _multiply(slopes, 1, room, queries, num_rows, to_keys, seen, columns, True, kind)
                _multiply(slopes, room, 1, keys_SH, seen, sums, _STRIP, columns, False, kind)
                place = token * query_row + at
                _save(sums, grad_query, place, query_row, num_rows, size, factor, kind)
            place = first * kv_row + pair * size
            _save(to_keys, grad_key, place, kv_row, length, size, one, kind)
            _save(to_values, grad_value, place, kv_row, length, size, one, kind)
