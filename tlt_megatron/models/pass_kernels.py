"""Products, and all layers of a pass as one loop, compiled by numba. `compiled_pass.py` calls them.

Between two calls from Python lie several microseconds, as many as a product with few rows takes. So
a pass is one call. A matrix lies in panels of `PANEL` of its rows, in which the values of one
column are side by side: vectors of a panel times one value of x add to the sums of as many outputs.
A sum is added in the order of the columns, so its bits do not depend on the number of rows.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic

from tlt_megatron.models import cpu_kernels
from tlt_megatron.models.cpu_kernels import compiled, narrow, part, span, wide, widen

PANEL = 32
_FEATURES = llvmlite.binding.get_host_cpu_features()
# The sums of so many rows of x stay in registers.
_VECTOR_BYTES, _ROWS = (64, 8) if _FEATURES.get("avx512f") else (32, 2)
# An instruction for pairs of bfloat16, by the name and types of newer LLVM.
_HAS_PAIRS = bool(_FEATURES.get("avx512bf16")) and llvmlite.binding.llvm_version_info[0] >= 20
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


class _Bfloat(ir.Type):
    """bfloat16, for which llvmlite has no type."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat)

    def __hash__(self) -> int:
        return hash("bfloat")


@intrinsic
def _tile(_context, x, panel, depth, sums, num_rows, number, kind) -> Any:
    """Write the products of at most `_ROWS` rows of x with a panel, [num_rows, PANEL]. x, panel and
    sums are addresses; the sums have the dtype of `number`, and x and the panel that of `kind`.

    Of bfloat16 a step has the values of two columns, as one integer. `depth` is the number of
    steps.
    """
    is_pairs = isinstance(kind, types.Integer)

    def generate(context, builder, _signature, arguments):
        x, panel, depth, sums, num_rows, *_ = arguments
        integer, lane = ir.IntType(64), ir.IntType(32)
        value = context.get_data_type(number)
        width = _VECTOR_BYTES // (number.bitwidth // 8)
        vector, starts = ir.VectorType(value, width), range(0, PANEL, width)
        read = lane if is_pairs else value
        reads, align = ir.VectorType(read, width), number.bitwidth // 8
        signature = ir.FunctionType(vector, [vector, *[ir.VectorType(_Bfloat(), 2 * width)] * 2])

        def load(place):
            return builder.load(place, align=align)

        def splat(one):
            first = builder.insert_element(ir.Constant(reads, None), one, lane(0))
            order = ir.Constant(ir.VectorType(lane, width), None)
            return builder.shuffle_vector(first, first, order)

        def upper(pairs, is_second):
            """Return the second values of pairs, or the first ones, as float32."""
            number = 0xFFFF0000 if is_second else 16
            operand = ir.Constant(reads, [number] * width)
            found = builder.and_(pairs, operand) if is_second else builder.shl(pairs, operand)
            return builder.bitcast(found, vector)

        def add_product(total, one, other):
            if not is_pairs:
                product = builder.fmul(one, other, flags=("contract",))
                return builder.fadd(total, product, flags=("contract",))
            if _HAS_PAIRS:
                name = "llvm.x86.avx512bf16.dpbf16ps.512"
                function = get_or_insert_function(builder.module, signature, name)
                pairs = [builder.bitcast(each, signature.args[1]) for each in (one, other)]
                return builder.call(function, [total, *pairs])
            for is_second in (False, True):
                factors = upper(one, is_second), upper(other, is_second)
                product = builder.fmul(*factors, flags=("contract",))
                total = builder.fadd(total, product, flags=("contract",))
            return total

        rows, panel = (builder.inttoptr(each, read.as_pointer()) for each in (x, panel))
        target = builder.inttoptr(sums, vector.as_pointer())
        end = builder.append_basic_block("tile.end")

        def write(count, entry):
            """Write the products of `count` rows: the loop of a number that the compiler knows."""
            body, after = (builder.append_basic_block(f"tile.{count}") for _ in range(2))
            builder.position_at_end(entry)
            builder.branch(body)
            builder.position_at_end(body)
            step = builder.phi(integer)
            totals = [builder.phi(vector) for _ in starts for _ in range(count)]
            columns = []
            for start in starts:
                place = builder.add(builder.mul(step, integer(PANEL)), integer(start))
                place = builder.bitcast(builder.gep(panel, [place]), reads.as_pointer())
                columns.append(load(place))
            added = []
            for row in range(count):
                place = builder.add(builder.mul(integer(row), depth), step)
                factor = splat(load(builder.gep(rows, [place])))
                added += [
                    add_product(totals[row * len(columns) + i], factor, column)
                    for i, column in enumerate(columns)
                ]
            following = builder.add(step, integer(1))
            zeros = [ir.Constant(vector, None) for _ in totals]
            for phi, first, then in zip(
                [step, *totals], [integer(0), *zeros], [following, *added], strict=True
            ):
                phi.add_incoming(first, entry)
                phi.add_incoming(then, body)
            builder.cbranch(builder.icmp_signed("<", following, depth), body, after)
            builder.position_at_end(after)
            for i, total in enumerate(added):
                builder.store(total, builder.gep(target, [integer(i)]), align=align)
            builder.branch(end)

        entries = [builder.append_basic_block("tile.entry") for _ in range(_ROWS)]
        switch = builder.switch(num_rows, entries[-1])
        for count, entry in enumerate(entries, 1):
            if count < _ROWS:
                switch.add_case(integer(count), entry)
            write(count, entry)
        builder.position_at_end(end)
        return context.get_dummy_value()

    arguments = x, panel, depth, sums, num_rows, number, kind
    return types.void(*arguments), generate


@part
def _save(sums, out, place, addend, addend_place, size, kind):
    """Write the first sums, plus the addend, whose address may be 0."""
    values = span(out, place, size, kind)
    if addend:
        addends = span(addend, addend_place, size, kind)
        for i in range(size):
            values[i] = narrow(sums[i] + widen(addends[i]), kind)
    else:
        for i in range(size):
            values[i] = narrow(sums[i], kind)


@part
def _multiply(x, panels, addend, addend_row, out, num_rows, num_out, steps, kind):
    """Write x times a matrix, plus a row of `addend`, whose address may be 0. A row of x and of a
    panel is `steps` reads of `_tile`.
    """
    number = wide(0, kind)
    sums = np.full((_ROWS, PANEL), number)
    to = np.int64(sums.ctypes.data)
    for o in range(0, num_out, PANEL):
        panel, size = panels + o * steps * sums.itemsize, min(PANEL, num_out - o)
        for r in range(0, num_rows, _ROWS):
            count, source = min(_ROWS, num_rows - r), x + r * steps * sums.itemsize
            _tile(source, panel, steps, to, count, number, kind)  # pyright: ignore[reportCallIssue]
            for i in range(count):
                place, addend_place = (r + i) * num_out + o, (r + i) * addend_row + o
                _save(sums[i], out, place, addend, addend_place, size, kind)


multiply = compiled(_multiply.py_func)


@part
def _copy(source, source_at, target, target_at, size, kind):
    values, copies = span(source, source_at, size, kind), span(target, target_at, size, kind)
    for i in range(size):
        copies[i] = values[i]


@compiled
def run_layers(rows, first_norm, weights, taps, read, turns, heads_row, eps, shape, kind):
    """Run rows through layers. See `compiled_pass.CompiledPass`.

    Each layer has a row of `weights`, addresses in the order of `DenseLayer`, and in `taps` the
    address that its residual stream is copied to, or 0. Without the address `first_norm`, rows are
    normalized already.
    """
    x, normed, heads, rooms = rows
    slots, places, lengths, cache, cache_bytes, num_slots = read
    table, positions, half = turns
    hidden, num_heads, num_kv_heads, size, ffn, item, values = shape
    num_rows, num_pairs = slots.size, 2 * num_kv_heads
    num_fused, width = (num_heads + num_pairs) * size, num_heads * size
    cos, sin = rooms, rooms + 2 * half * item
    projected = rooms + num_rows * 4 * half * item
    heads = heads or projected
    context = projected + num_rows * num_fused * item
    halves = context + num_rows * width * item
    gated = halves + num_rows * 2 * ffn * item
    out = gated + num_rows * ffn * item
    kv, up = heads + width * item, halves + ffn * item
    # Steps of a row of each width.
    hidden_steps, width_steps, ffn_steps = hidden // values, width // values, ffn // values
    turned = num_rows, num_heads + num_kv_heads, size, half
    grouped = num_kv_heads, num_heads // num_kv_heads, size, num_slots
    for p in range(num_rows):
        _copy(table, positions[p] * 4 * half, cos, p * 4 * half, 4 * half, kind)
    if first_norm:
        _normalize(x, hidden, 0, 0, first_norm, eps, normed, num_rows, hidden, kind)
    for layer in range(weights.shape[0]):
        qkv, qkv_bias, qk_norm, output, post_norm, gate_up, down, next_norm = weights[layer]
        if qkv:
            _multiply(normed, qkv, qkv_bias, 0, heads, num_rows, num_fused, hidden_steps, kind)
        _rotate(heads, heads_row, qk_norm, eps, cos, sin, 4 * half, turned, kind)
        _store(kv, heads_row, slots, cache, num_slots, num_pairs, size, kind)
        _attend(heads, heads_row, cache, places, lengths, context, grouped, kind)
        _multiply(context, output, 0, 0, out, num_rows, hidden, width_steps, kind)
        _normalize(out, hidden, x, hidden, post_norm, eps, normed, num_rows, hidden, kind)
        _multiply(normed, gate_up, 0, 0, halves, num_rows, 2 * ffn, hidden_steps, kind)
        _gate(halves, 2 * ffn, up, 2 * ffn, gated, num_rows, ffn, kind)
        _multiply(gated, down, 0, 0, x, num_rows, hidden, ffn_steps, kind)
        _normalize(x, hidden, out, hidden, next_norm, eps, normed, num_rows, hidden, kind)
        if taps[layer]:
            _copy(x, 0, taps[layer], 0, num_rows * hidden, kind)
        cache += cache_bytes


@part
def _run_pairs(tokens, hidden, rows, matrices, weights, read, turns, sizes, eps, shape, kind):
    """Run the pairs of tokens and hidden states through the drafter's layer, to x and normed."""
    inputs, fused, x, normed, rooms = rows
    embedding, in_panels, in_bias, _ = matrices
    _, in_width, start, has_norms = sizes
    width, num_rows = shape[0], tokens.size
    for p in range(num_rows):
        _copy(embedding, tokens[p] * width, inputs, 2 * p * width, width, kind)
        _copy(hidden, p * width, inputs, (2 * p + 1) * width, width, kind)
    if has_norms:
        _normalize(inputs, width, 0, 0, 0, eps, inputs, 2 * num_rows, width, kind)
    steps = 2 * width // shape[6]
    _multiply(inputs, in_panels, in_bias, 0, fused, num_rows, in_width, steps, kind)
    for p in range(num_rows):
        if start:
            _copy(fused, p * in_width, x, p * width, width, kind)
        else:
            _copy(hidden, p * width, x, p * width, width, kind)
    states, taps = (x, normed, fused + start * shape[5], rooms), np.zeros(1, np.int64)
    run_layers(states, np.int64(0), weights, taps, read, turns, in_width, eps, shape, kind)


@compiled
def draft_chains(
    tokens, pairs, rows, matrices, weights, read, table, scores, sizes, eps, shape, kind
):
    """Compute the last pairs of each row, and write the likeliest token of each depth to `tokens`
    [rows, depths]. See `compiled_chain.CompiledChains`.
    """
    new, hidden, positions = pairs
    logits, newest, rooms = rows
    slots, places, lengths, cache, cache_bytes, num_slots = read
    offsets, scale = scores
    num_ids, width = sizes[0], shape[0]
    steps, heads = width // shape[6], rooms[3] if sizes[3] else rooms[2]
    num_rows, depth = tokens.shape
    # Of the pair after the newest one of each row.
    next_slots, next_new = np.empty(num_rows, np.int64), np.empty(num_rows, np.int64)
    next_positions = np.empty(num_rows, np.int64)
    next_lengths = np.empty((num_rows, 1), np.int64)
    for d in range(depth):
        count, turns = new.size // num_rows, (table[0], positions, table[1])
        keys = slots, places, lengths, cache, cache_bytes, num_slots
        _run_pairs(new, hidden, rooms, matrices, weights, keys, turns, sizes, eps, shape, kind)
        hidden = newest
        for b in range(num_rows):
            last = (b + 1) * count - 1
            _copy(rooms[2], last * width, hidden, b * width, width, kind)
            _copy(heads, last * width, heads, b * width, width, kind)
        _multiply(heads, matrices[3], 0, 0, logits, num_rows, num_ids, steps, kind)
        for b in range(num_rows):
            of_row, best, most = span(logits, b * num_ids, num_ids, kind), 0, -np.inf
            for i in range(num_ids):
                score = widen(of_row[i]) * wide(scale, kind) + offsets[b, d, i]
                if score > most:
                    best, most = i, score
            last = (b + 1) * count - 1
            tokens[b, d] = next_new[b] = best
            next_positions[b], next_slots[b] = positions[last] + 1, slots[last] + 1
            next_lengths[b, 0] = lengths[b, count - 1] + 1
        new, positions, slots, lengths = next_new, next_positions, next_slots, next_lengths
