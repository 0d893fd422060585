"""Kernels for CPUs: what lies between the matrix products of a decoder layer, compiled by numba when first needed.

Each kernel does in one call what takes torch many, and none of its rows depends on the others in any bit: sums have an
order that is spelt out, or one that only the width of a row decides. So a token's attention is the same whether it is
decoded alone, in a batch, or verified in a tree among others. Values are float32 inside; tensors are float32 or
bfloat16, and rounded once.

The first half is a small vector language for numba, sixteen float32 wide; the second the kernels, each a function of a
pointer to int64 arguments. Tasks are claimed by a counter, so any number of threads may run the same call; they are
torch's own (`Kernel`). Not for other devices, nor for gradients: see `fused`.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any, no_type_check

import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16
ROWS_AT_ONCE, KEYS_AT_ONCE = 4, 32
"""Of attention's products: a block of scores is so many queries by so many keys."""

# -- a vector language -----------------------------------------------------------------------------------------------

_I16, _I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_VECTOR, _INTEGERS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_BLOCK = ir.ArrayType(_VECTOR, 2 * ROWS_AT_ONCE)
FLOATS, HALVES, INTEGERS = (types.CPointer(one) for one in (types.float32, types.uint16, types.int64))


class _Lanes(types.Type):
    def __init__(self) -> None:
        super().__init__("speclight.Lanes")


class _Block(types.Type):
    def __init__(self) -> None:
        super().__init__("speclight.Block")


_lanes, _block = _Lanes(), _Block()


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):
    @no_type_check
    def __init__(self, manager, kind):
        super().__init__(manager, kind, _VECTOR)


@register_model(_Block)
class _BlockModel(models.PrimitiveModel):
    @no_type_check
    def __init__(self, manager, kind):
        super().__init__(manager, kind, _BLOCK)


@no_type_check
def _all(value):
    return ir.Constant(_VECTOR, [value] * LANES)


@no_type_check
def _whole(value):
    return ir.Constant(_INTEGERS, [value] * LANES)


@no_type_check
def _shuffled(builder, one, other, lanes):
    return builder.shuffle_vector(one, other, ir.Constant(_INTEGERS, lanes))


@no_type_check
def _splat(builder, value):
    none = ir.Constant(_VECTOR, ir.Undefined)
    return _shuffled(builder, builder.insert_element(none, value, ir.Constant(_I32, 0)), none, [0] * LANES)


@no_type_check
def _place(builder, pointer, at, vector=_VECTOR):
    return builder.bitcast(builder.gep(pointer, [at]), vector.as_pointer())


@no_type_check
def _load(builder, pointer, at):
    return builder.load(_place(builder, pointer, at), align=4)


@no_type_check
def _load_wide(builder, pointer, at, kind):
    """Sixteen values in float32; bfloat16 is its upper half."""
    if kind == FLOATS:
        return _load(builder, pointer, at)
    halves = builder.load(_place(builder, pointer, at, ir.VectorType(_I16, LANES)), align=2)
    return builder.bitcast(builder.shl(builder.zext(halves, _INTEGERS), _whole(16)), _VECTOR)


@no_type_check
def _store(builder, value, pointer, at):
    builder.store(value, _place(builder, pointer, at), align=4)


@no_type_check
def _call(builder, name, *arguments):
    """A vector instruction of LLVM, such as fma."""
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * len(arguments))
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v{LANES}f32"), arguments)


@no_type_check
def _offset(builder, at, stride, count):
    return builder.add(at, builder.mul(stride, ir.Constant(_I64, count)))


@no_type_check
@intrinsic
def at_address(typing, address, like):
    """The address as a pointer of the kind of `like`."""

    def build(context, builder, signature, values):
        return builder.inttoptr(values[0], context.get_value_type(like))

    return like(types.int64, like), build


@no_type_check
def _pointers(kind):
    @intrinsic
    def at(typing, address):
        def build(context, builder, signature, values):
            return builder.inttoptr(values[0], context.get_value_type(kind))

        return kind(types.int64), build

    return at


floats_at, halves_at, integers_at = _pointers(FLOATS), _pointers(HALVES), _pointers(INTEGERS)


@no_type_check
@intrinsic
def claim(typing, counter):
    """What the counter was; it is one more now. Several threads may ask."""

    def build(context, builder, signature, values):
        return builder.atomic_rmw("add", values[0], ir.Constant(_I64, 1), "monotonic")

    return types.int64(INTEGERS), build


@no_type_check
@intrinsic
def float_of(typing, bits):
    def build(context, builder, signature, values):
        return builder.bitcast(builder.trunc(values[0], _I32), _F32)

    return types.float32(types.int64), build


@no_type_check
@intrinsic
def get(typing, pointer, at):
    """One value, in float32."""

    def build(context, builder, signature, values):
        value = builder.load(builder.gep(values[0], [values[1]]))
        if pointer == FLOATS:
            return value
        return builder.bitcast(builder.shl(builder.zext(value, _I32), ir.Constant(_I32, 16)), _F32)

    return types.float32(pointer, types.int64), build


@no_type_check
@intrinsic
def put(typing, pointer, at, value):
    """One float32 value, rounded to what the pointer holds, to even where two are as near."""

    def build(context, builder, signature, values):
        place, value = builder.gep(values[0], [values[1]]), values[2]
        if pointer == HALVES:
            bits = builder.bitcast(value, _I32)
            odd = builder.and_(builder.lshr(bits, ir.Constant(_I32, 16)), ir.Constant(_I32, 1))
            rounded = builder.add(builder.add(bits, ir.Constant(_I32, 0x7FFF)), odd)
            nan = builder.fcmp_unordered("uno", value, value)
            rounded = builder.select(nan, ir.Constant(_I32, 0x7FC00000), rounded)
            value = builder.trunc(builder.lshr(rounded, ir.Constant(_I32, 16)), _I16)
        builder.store(value, place)
        return context.get_dummy_value()

    return types.void(pointer, types.int64, types.float32), build


@no_type_check
@intrinsic
def lanes_of(typing, value):
    """Sixteen times the value."""
    return _lanes(types.float32), lambda context, builder, signature, values: _splat(builder, values[0])


@no_type_check
@intrinsic
def load_lanes(typing, pointer, at):
    return _lanes(FLOATS, types.int64), lambda context, builder, signature, values: _load(builder, *values)


@no_type_check
@intrinsic
def store_lanes(typing, pointer, at, lanes):
    def build(context, builder, signature, values):
        _store(builder, values[2], values[0], values[1])
        return context.get_dummy_value()

    return types.void(FLOATS, types.int64, _lanes), build


@no_type_check
@intrinsic
def greater(typing, lanes, pointer, at):
    """The greater ones of the lanes and of sixteen values."""

    def build(context, builder, signature, values):
        found = _load(builder, values[1], values[2])
        return builder.select(builder.fcmp_unordered(">", found, values[0]), found, values[0])

    return _lanes(_lanes, FLOATS, types.int64), build


@no_type_check
@intrinsic
def any_above(typing, pointer, at, least):
    """Whether one of sixteen values is above `least`, or NaN."""

    def build(context, builder, signature, values):
        found = _load_wide(builder, values[0], values[1], pointer)
        above = builder.fcmp_unordered(">", found, _splat(builder, values[2]))
        lanes = builder.bitcast(above, ir.IntType(LANES))
        return builder.icmp_unsigned("!=", lanes, ir.Constant(ir.IntType(LANES), 0))

    return types.boolean(pointer, types.int64, types.float32), build


@no_type_check
def _halved(step):
    """What `step` makes of all lanes: of each and the one half way around, then of half of these, and so on."""

    @intrinsic
    def reduce(typing, lanes):
        def build(context, builder, signature, values):
            found, distance = values[0], LANES
            while distance > 1:
                distance //= 2
                turned = [(lane + distance) % LANES for lane in range(LANES)]
                found = step(builder, found, _shuffled(builder, found, found, turned))
            return builder.extract_element(found, ir.Constant(_I32, 0))

        return types.float32(_lanes), build

    return reduce


greatest = _halved(lambda builder, one, other: builder.select(builder.fcmp_unordered(">", other, one), other, one))
total = _halved(lambda builder, one, other: builder.fadd(one, other))

_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.4426950408889634, 0.693359375, -2.12194440e-4
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
"""Of exp on [-ln 2 / 2, ln 2 / 2] (Cephes, Moshier 1989), without its first two terms: within two units in the last
place."""
_LEAST_EXPONENT = -87.0


@no_type_check
@intrinsic
def exponentials(typing, sums, pointer, at, best):
    """Replace sixteen values x by exp(x - best), and by 0 below float32's range; returns `sums` and these."""

    def build(context, builder, signature, values):
        sums, pointer, at, best = values
        x = builder.fsub(_load(builder, pointer, at), _splat(builder, best))
        tiny = builder.fcmp_ordered("<", x, _all(_LEAST_EXPONENT))
        x = builder.select(tiny, _all(_LEAST_EXPONENT), x)
        power = _call(builder, "floor", _call(builder, "fma", x, _all(_LOG2_E), _all(0.5)))
        rest = _call(builder, "fma", power, _all(-_LN2_HIGH), x)
        rest = _call(builder, "fma", power, _all(-_LN2_LOW), rest)
        found = _all(_EXP[0])
        for factor in _EXP[1:]:
            found = _call(builder, "fma", found, rest, _all(factor))
        found = builder.fadd(_call(builder, "fma", found, builder.fmul(rest, rest), rest), _all(1.0))
        scale = builder.shl(builder.add(builder.fptosi(power, _INTEGERS), _whole(127)), _whole(23))
        found = builder.select(tiny, _all(0.0), builder.fmul(found, builder.bitcast(scale, _VECTOR)))
        _store(builder, found, pointer, at)
        return builder.fadd(sums, found)

    return _lanes(_lanes, FLOATS, types.int64, types.float32), build


@no_type_check
@intrinsic
def empty_block(typing):
    """Zeros: four rows of two vectors."""
    return _block(), lambda context, builder, signature, values: ir.Constant(_BLOCK, None)


@no_type_check
@intrinsic
def load_block(typing, pointer, at, stride):
    def build(context, builder, signature, values):
        pointer, at, stride = values
        block = ir.Constant(_BLOCK, None)
        for row in range(ROWS_AT_ONCE):
            for half in (0, 1):
                place = builder.add(_offset(builder, at, stride, row), ir.Constant(_I64, half * LANES))
                block = builder.insert_value(block, _load(builder, pointer, place), 2 * row + half)
        return block

    return _block(FLOATS, types.int64, types.int64), build


@no_type_check
@intrinsic
def store_block(typing, pointer, at, stride, block):
    def build(context, builder, signature, values):
        pointer, at, stride, block = values
        for row in range(ROWS_AT_ONCE):
            for half in (0, 1):
                place = builder.add(_offset(builder, at, stride, row), ir.Constant(_I64, half * LANES))
                _store(builder, builder.extract_value(block, 2 * row + half), pointer, place)
        return context.get_dummy_value()

    return types.void(FLOATS, types.int64, types.int64, _block), build


@no_type_check
def _product(skips_zeros):
    @intrinsic
    def add(typing, block, factors, at, stride, vectors, place):
        def build(context, builder, signature, values):
            block, factors, at, stride, vectors, place = values
            pair = [_load(builder, vectors, builder.add(place, ir.Constant(_I64, half * LANES))) for half in (0, 1)]
            for row in range(ROWS_AT_ONCE):
                factor = builder.load(builder.gep(factors, [_offset(builder, at, stride, row)]))
                counts = builder.fcmp_unordered("!=", factor, ir.Constant(_F32, 0.0))
                for half in (0, 1):
                    before = builder.extract_value(block, 2 * row + half)
                    after = _call(builder, "fma", _splat(builder, factor), pair[half], before)
                    after = builder.select(counts, after, before) if skips_zeros else after
                    block = builder.insert_value(block, after, 2 * row + half)
            return block

        return _block(_block, FLOATS, types.int64, types.int64, FLOATS, types.int64), build

    return add


add_product = _product(skips_zeros=False)
"""A block and four factors (`at`, `stride` apart) times the same two vectors."""
add_seen_product = _product(skips_zeros=True)
"""The same, but a factor of zero leaves its row as it is, whatever the vectors hold, NaN included."""


@no_type_check
@intrinsic
def transpose(typing, out, at, stride, source, places, first):
    """out[at + d * stride + i] = source[places[first + i] + d], for i and d below 16."""

    def build(context, builder, signature, values):
        out, at, stride, pointer, places, first = values
        rows = []
        for index in range(LANES):
            place = builder.load(builder.gep(places, [builder.add(first, ir.Constant(_I64, index))]))
            rows.append(_load_wide(builder, pointer, place, source))
        for step in (8, 4, 2, 1):  # blocks of so many rows and columns change sides
            for index in (one for one in range(LANES) if not one & step):
                upper, lower = rows[index], rows[index + step]
                left = [lane if not lane & step else LANES + lane - step for lane in range(LANES)]
                right = [lane + step if not lane & step else LANES + lane for lane in range(LANES)]
                rows[index] = _shuffled(builder, upper, lower, left)
                rows[index + step] = _shuffled(builder, upper, lower, right)
        for index, row in enumerate(rows):
            _store(builder, row, out, _offset(builder, at, stride, index))
        return context.get_dummy_value()

    return types.void(FLOATS, types.int64, types.int64, source, INTEGERS, types.int64), build


@no_type_check
@intrinsic
def widen(typing, out, at, source, place):
    """Sixteen values, in float32."""

    def build(context, builder, signature, values):
        out, at, pointer, place = values
        _store(builder, _load_wide(builder, pointer, place, source), out, at)
        return context.get_dummy_value()

    return types.void(FLOATS, types.int64, source, types.int64), build


# -- kernels ---------------------------------------------------------------------------------------------------------

_REASSOCIATED = {"reassoc", "contract", "nsz", "arcp"}
"""For loops over one row, whose order of summation then follows from its width alone."""


@no_type_check
def _probe():
    pass


def _can_cache() -> bool:
    """Whether numba finds a folder to keep what it compiles in: beside this file, or the user's."""
    try:
        njit(cache=True)(_probe)
    except RuntimeError:
        return False
    return True


_CACHE = _can_cache()
_QUICK = {"error_model": "numpy", "cache": _CACHE}


@no_type_check
@njit(fastmath=_REASSOCIATED, **_QUICK)
def _square_sum(pointer, start, width):
    found = np.float32(0.0)
    for column in range(start, start + width):
        value = get(pointer, column)
        found += value * value
    return found


@no_type_check
@njit(fastmath=_REASSOCIATED, **_QUICK)
def _scaled(source, start, out, to, width, scale, weight):
    for column in range(width):
        put(out, to + column, get(source, start + column) * scale * get(weight, column))


@no_type_check
@njit(**_QUICK)
def _normalise(source, start, out, to, width, weight, eps):
    mean = _square_sum(source, start, width) / np.float32(width)
    _scaled(source, start, out, to, width, np.float32(1.0) / np.sqrt(mean + eps), weight)


@no_type_check
@njit(fastmath=_REASSOCIATED, **_QUICK)
def _exp(x):
    """exp of a float32, with `exponentials`' polynomial; bounded so that 1 + exp(x) is finite."""
    x = min(max(x, np.float32(_LEAST_EXPONENT)), np.float32(-_LEAST_EXPONENT))
    power = np.floor(x * np.float32(_LOG2_E) + np.float32(0.5))
    rest = x - power * np.float32(_LN2_HIGH) - power * np.float32(_LN2_LOW)
    found = np.float32(_EXP[0])
    found = found * rest + np.float32(_EXP[1])
    found = found * rest + np.float32(_EXP[2])
    found = found * rest + np.float32(_EXP[3])
    found = found * rest + np.float32(_EXP[4])
    found = found * rest + np.float32(_EXP[5])
    found = found * rest * rest + rest + np.float32(1.0)
    return found * float_of((np.int64(power) + 127) << 23)


@no_type_check
@njit(**_QUICK)
def norm(arguments, like):
    """RMS norm of each row. Arguments: width, source, out, weight (float32), eps."""
    a = carray(arguments, 7)
    width = a[2]
    source, out = at_address(a[3], like), at_address(a[4], like)
    weight, eps = floats_at(a[5]), float_of(a[6])
    while True:
        row = claim(arguments)
        if row >= a[1]:
            return
        _normalise(source, row * width, out, row * width, width, weight, eps)


@no_type_check
@njit(**_QUICK)
def add_norm(arguments, like):
    """out = source + addend, rounded, and its RMS norm. Arguments: width, source, addend, out, normed, weight
    (float32), eps."""
    a = carray(arguments, 9)
    width = a[2]
    source, addend = at_address(a[3], like), at_address(a[4], like)
    out, normed = at_address(a[5], like), at_address(a[6], like)
    weight, eps = floats_at(a[7]), float_of(a[8])
    while True:
        row = claim(arguments)
        if row >= a[1]:
            return
        for column in range(row * width, row * width + width):
            put(out, column, get(source, column) + get(addend, column))
        _normalise(out, row * width, normed, row * width, width, weight, eps)


@no_type_check
@njit(fastmath=_REASSOCIATED, **_QUICK)
def _gate(source, start, out, to, width, cubic, slope):
    for column in range(width):
        gate = get(source, start + column)
        scaled = slope * (gate + cubic * gate * gate * gate)
        put(out, to + column, gate / (np.float32(1.0) + _exp(-scaled)))
        put(out, to + column, get(out, to + column) * get(source, start + width + column))


@no_type_check
@njit(**_QUICK)
def gated(arguments, like):
    """gate sigmoid(slope (gate + cubic gate^3)), rounded, times up, of rows that hold the gate and then up.

    Slope 1 and cubic 0 are SiLU, 2 sqrt(2 / pi) and 0.044715 GELU's approximation by tanh. Arguments: width of each,
    source, out, cubic, slope.
    """
    a = carray(arguments, 7)
    width = a[2]
    source, out = at_address(a[3], like), at_address(a[4], like)
    cubic, slope = float_of(a[5]), float_of(a[6])
    while True:
        row = claim(arguments)
        if row >= a[1]:
            return
        _gate(source, 2 * row * width, out, row * width, width, cubic, slope)


@no_type_check
@njit(fastmath=_REASSOCIATED, **_QUICK)
def _turn(source, start, out, to, cos, sin, at, size):
    half = size // 2
    for column in range(half):
        one, other = get(source, start + column), get(source, start + half + column)
        put(out, to + column, one * get(cos, at + column) - other * get(sin, at + column))
        put(out, to + half + column, other * get(cos, at + half + column) + one * get(sin, at + half + column))


@no_type_check
@njit(**_QUICK)
def _turned(source, start, out, to, cos, sin, at, size, normed, weight, eps):
    if normed:
        _normalise(source, start, out, to, size, weight, eps)
        _turn(out, to, out, to, cos, sin, at, size)
    else:
        _turn(source, start, out, to, cos, sin, at, size)


@no_type_check
@njit(**_QUICK)
def rotate(arguments, like):
    """Rotary embedding of each token's queries and keys, after RMS norms of them where the model has such; queries to
    `queries`, keys and values to the token's slot.

    Arguments: heads, key heads, size of a head, source (rows of queries, keys and values), cos, sin ([tokens, size]),
    slots, queries, keys, values, normed (0 or 1), the norms' weights (float32), eps.
    """
    a = carray(arguments, 16)
    heads, key_heads, size, normed = a[2], a[3], a[4], a[12] != 0
    source, cos, sin = at_address(a[5], like), at_address(a[6], like), at_address(a[7], like)
    slots = carray(integers_at(a[8]), a[1])
    queries, keys, values = at_address(a[9], like), at_address(a[10], like), at_address(a[11], like)
    query_weight, key_weight, eps = floats_at(a[13]), floats_at(a[14]), float_of(a[15])
    while True:
        token = claim(arguments)
        if token >= a[1]:
            return
        start, at, slot = token * (heads + 2 * key_heads) * size, token * size, slots[token] * key_heads * size
        for head in range(heads):
            to = (token * heads + head) * size
            _turned(source, start + head * size, queries, to, cos, sin, at, size, normed, query_weight, eps)
        start += heads * size
        for head in range(key_heads):
            to = slot + head * size
            _turned(source, start + head * size, keys, to, cos, sin, at, size, normed, key_weight, eps)
        start += key_heads * size
        for column in range(key_heads * size):
            put(values, slot + column, get(source, start + column))


@no_type_check
@njit(**_QUICK)
def _places(context, blocks, block_size, slots, tokens, stride, offset, places):
    """Where the keys of a text lie: those of its context by its blocks, those of its new tokens by their slots. Behind
    them the last one again, up to whole blocks of scores. Returns their number."""
    count = 0
    for block in range((context + block_size - 1) // block_size):
        first = blocks[block] * block_size
        for index in range(min(block_size, context - block * block_size)):
            places[count] = (first + index) * stride + offset
            count += 1
    for token in range(tokens):
        places[count] = slots[token] * stride + offset
        count += 1
    for index in range(count, count + KEYS_AT_ONCE - 1):
        places[index] = places[count - 1]
    return count


@no_type_check
@njit(**_QUICK)
def _score(keys, places, begin, count, size, queries, wide, rows, scores, width, columns):
    """scores[row, key] of all rows and of keys from `begin` on; `columns` holds so many keys, transposed."""
    flat, moved = floats_at(scores.ctypes.data), integers_at(places.ctypes.data)
    turned, factors = floats_at(columns.ctypes.data), floats_at(queries.ctypes.data)
    for key in range(begin, count, KEYS_AT_ONCE):
        for start in range(0, size - size % LANES, LANES):
            for half in range(0, KEYS_AT_ONCE, LANES):
                transpose(turned, start * KEYS_AT_ONCE + half, KEYS_AT_ONCE, keys, moved, key + half)
            for index in range(key, key + KEYS_AT_ONCE):
                places[index] += LANES
        rest = size % LANES
        for index in range(KEYS_AT_ONCE):
            for column in range(rest):
                columns[size - rest + column, index] = get(keys, places[key + index] + column)
            places[key + index] -= size - rest
        for row in range(0, rows, ROWS_AT_ONCE):
            block = empty_block()
            for column in range(size):
                block = add_product(block, factors, row * wide + column, wide, turned, column * KEYS_AT_ONCE)
            store_block(flat, row * width + key, width, block)


@no_type_check
@njit(**_QUICK)
def _hide(scores, begin, count, context, token, chain, parents, positions, window):
    """Put -inf where a token does not see: what is not its ancestor among the new ones, and what its window left."""
    if chain:
        for key in range(context + token + 1, count):
            scores[key] = -np.inf
    else:
        node = token
        for other in range(count - context - 1, -1, -1):
            if node == other:
                node = parents[node]
            else:
                scores[context + other] = -np.inf
    if window > 0:
        nearest = positions[token] - window + 1
        for key in range(begin, min(nearest, context)):
            scores[key] = -np.inf
        for other in range(count - context):
            if positions[other] < nearest:
                scores[context + other] = -np.inf


@no_type_check
@njit(**_QUICK)
def _weigh(scores, at, begin, context, count, positions, cap, parts):
    """Scores become exp(score - greatest), in place; returns the sum of them, in sixteen parts by position. So a new
    token's weight goes where it would if it were context, whichever others there are beside it."""
    flat, end = floats_at(scores.ctypes.data), at + (count + LANES - 1) // LANES * LANES
    if cap > 0:
        for key in range(at + begin, at + count):
            if get(flat, key) > -np.inf:
                put(flat, key, cap * (np.float32(1.0) - np.float32(2.0) / (_exp(2 * get(flat, key) / cap) + 1)))
    for key in range(at + count, end):
        put(flat, key, np.float32(-np.inf))
    lanes = lanes_of(np.float32(-np.inf))
    for key in range(at + begin, end, LANES):
        lanes = greater(lanes, flat, key)
    best = greatest(lanes)
    whole = context // LANES * LANES
    lanes = lanes_of(np.float32(0.0))
    for key in range(at + begin, at + whole, LANES):
        lanes = exponentials(lanes, flat, key, best)
    out = floats_at(parts.ctypes.data)
    store_lanes(out, 0, lanes)
    for key in range(at + whole, end, LANES):
        lanes = exponentials(lanes, flat, key, best)
    for key in range(whole, context):
        parts[key % LANES] += get(flat, at + key)
    for key in range(context, count):
        parts[positions[key - context] % LANES] += get(flat, at + key)
    return total(load_lanes(out, 0))


@no_type_check
@njit(**_QUICK)
def _gather(values, places, begin, count, common, size, scores, width, rows, found, wide, buffer):
    """found[row] += the values by their weights, key after key; from key `common` on some are hidden from some rows."""
    flat, out, near = floats_at(scores.ctypes.data), floats_at(found.ctypes.data), floats_at(buffer.ctypes.data)
    for start in range(begin, count, KEYS_AT_ONCE):
        stop = min(start + KEYS_AT_ONCE, count)
        for key in range(start, stop):
            for column in range(0, size - size % LANES, LANES):
                widen(near, (key - start) * wide + column, values, places[key] + column)
            for column in range(size - size % LANES, size):
                buffer[key - start, column] = get(values, places[key] + column)
        for row in range(0, rows, ROWS_AT_ONCE):
            for column in range(0, wide, 2 * LANES):
                block = load_block(out, row * wide + column, wide)
                for key in range(start, min(stop, common)):
                    block = add_product(block, flat, row * width + key, width, near, (key - start) * wide + column)
                for key in range(max(start, common), stop):
                    block = add_seen_product(block, flat, row * width + key, width, near, (key - start) * wide + column)
                store_block(out, row * wide + column, wide, block)


@no_type_check
@njit(**_QUICK)
def attend(arguments, like):
    """Attention of texts' new tokens to their context and to each other, as far as they see: softmax(q k) v.

    A task is one text's queries of one key head, `most` of them. Scores are sums over a head's dimensions in
    their order, weights are summed in sixteen parts by position, and values added in order of position: none of it
    depends on what else is in the pass.

    Arguments: heads, key heads, size of a head, query, keys, values, out, tasks ([tasks, 3]: text, key head, first
    query), texts ([texts, 5]: first token, tokens, context, where its blocks begin, whether it is a chain), blocks,
    block size, slots, parents (of each token, within its text), positions, width of the scores (keys, in whole
    blocks), window (0: none), scaling, cap (0: none), most (whole blocks of rows).
    """
    a = carray(arguments, 21)
    heads, key_heads, size = a[2], a[3], a[4]
    query, keys = at_address(a[5], like), at_address(a[6], like)
    values, out = at_address(a[7], like), at_address(a[8], like)
    tasks = carray(integers_at(a[9]), (a[1], 3))
    texts, block_size, width, window = integers_at(a[10]), a[12], a[16], a[17]
    scaling, cap, most = float_of(a[18]), float_of(a[19]), a[20]
    fold, stride, wide = heads // key_heads, key_heads * size, (size + 2 * LANES - 1) // (2 * LANES) * (2 * LANES)
    queries, found = np.empty((most, wide), np.float32), np.empty((most, wide), np.float32)
    columns, buffer = np.empty((wide, KEYS_AT_ONCE), np.float32), np.zeros((KEYS_AT_ONCE, wide), np.float32)
    scores, sums, parts = np.empty((most, width), np.float32), np.empty(most, np.float32), np.empty(LANES, np.float32)
    places = np.empty(width + KEYS_AT_ONCE, np.int64)
    while True:
        task = claim(arguments)
        if task >= a[1]:
            return
        head, start = tasks[task, 1], tasks[task, 2]
        text = carray(texts, (tasks[task, 0] + 1, 5))[tasks[task, 0]]
        first, context, chain = text[0], text[2], text[4] != 0
        last = text[1] * fold - 1
        rows = min(most, last + 1 - start)
        padded = (rows + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE * ROWS_AT_ONCE
        for row in range(padded):
            one = min(start + row, last)
            at = ((first + one // fold) * heads + head * fold + one % fold) * size
            for column in range(size):
                queries[row, column] = get(query, at + column) * scaling
            for column in range(wide):
                found[row, column] = 0.0
        latest = (start + rows - 1) // fold
        its_blocks, its_slots = integers_at(a[11] + 8 * text[3]), integers_at(a[13] + 8 * first)
        count = _places(
            context,
            carray(its_blocks, context + 1),
            block_size,
            carray(its_slots, latest + 1),
            latest + 1,
            stride,
            head * size,
            places,
        )
        begin, common = 0, context + 1 + (start // fold if chain else 0)
        its_positions = carray(integers_at(a[15] + 8 * first), latest + 1)
        its_parents = carray(integers_at(a[14] + 8 * first), latest + 1)
        if window > 0:
            nearest = its_positions[start // fold]
            for token in range(start // fold, latest + 1):
                nearest = min(nearest, its_positions[token])
            begin = max(0, min(nearest - window + 1, context)) // KEYS_AT_ONCE * KEYS_AT_ONCE
            common = begin
        _score(keys, places, begin, count, size, queries, wide, padded, scores, width, columns)
        for row in range(rows):
            token = (start + row) // fold
            _hide(scores[row], begin, count, context, token, chain, its_parents, its_positions, window)
            sums[row] = _weigh(scores, row * width, begin, context, count, its_positions, cap, parts)
        _gather(values, places, begin, count, common, size, scores, width, padded, found, wide, buffer)
        for row in range(rows):
            one = start + row
            at = ((first + one // fold) * heads + head * fold + one % fold) * size
            for column in range(size):
                put(out, at + column, found[row, column] / sums[row])


@no_type_check
@njit(**_QUICK)
def _insert(value, token_id, values, ids, count):
    """Into the first `count` of falling values, NaN first and behind equals; the last one may fall out."""
    place = min(count, len(values) - 1)
    while place > 0 and (value > values[place - 1] or (np.isnan(value) and not np.isnan(values[place - 1]))):
        values[place], ids[place] = values[place - 1], ids[place - 1]
        place -= 1
    values[place], ids[place] = value, token_id


@no_type_check
@njit(**_QUICK)
def _leading(row, start, width, values, ids):
    most, whole = len(values), width - width % LANES
    for column in range(min(most, width)):
        _insert(get(row, start + column), column, values, ids, column)
    column = most
    while column < width:
        if column % LANES == 0 and column < whole and not any_above(row, start + column, values[most - 1]):
            column += LANES
            continue
        value = get(row, start + column)
        if value > values[most - 1] or (np.isnan(value) and not np.isnan(values[most - 1])):
            _insert(value, column, values, ids, most)
        column += 1


@no_type_check
@njit(**_QUICK)
def leading(arguments, like):
    """The greatest values of each row, falling, of equals the first ones; NaN is greater than all. And their
    log-probabilities among themselves.

    Arguments: width, source, how many (at most the width), ids, values and log-probabilities ([rows, so many], int64
    and float32).
    """
    a = carray(arguments, 8)
    width, source, most = a[2], at_address(a[3], like), a[4]
    while True:
        row = claim(arguments)
        if row >= a[1]:
            return
        ids = carray(integers_at(a[5] + 8 * row * most), most)
        values = carray(floats_at(a[6] + 4 * row * most), most)
        likely = carray(floats_at(a[7] + 4 * row * most), most)
        _leading(source, row * width, width, values, ids)
        mass = 0.0
        for place in range(most):
            mass += np.exp(np.float64(values[place]) - values[0])
        mass = np.log(mass)
        for place in range(most):
            likely[place] = np.float64(values[place]) - values[0] - mass


# -- calling them ----------------------------------------------------------------------------------------------------

# what C calls: functions of a module, since numba's cache does not find others again


@no_type_check
def _norm_floats(arguments):
    norm(arguments, floats_at(0))


@no_type_check
def _norm_halves(arguments):
    norm(arguments, halves_at(0))


@no_type_check
def _add_norm_floats(arguments):
    add_norm(arguments, floats_at(0))


@no_type_check
def _add_norm_halves(arguments):
    add_norm(arguments, halves_at(0))


@no_type_check
def _gated_floats(arguments):
    gated(arguments, floats_at(0))


@no_type_check
def _gated_halves(arguments):
    gated(arguments, halves_at(0))


@no_type_check
def _rotate_floats(arguments):
    rotate(arguments, floats_at(0))


@no_type_check
def _rotate_halves(arguments):
    rotate(arguments, halves_at(0))


@no_type_check
def _attend_floats(arguments):
    attend(arguments, floats_at(0))


@no_type_check
def _attend_halves(arguments):
    attend(arguments, halves_at(0))


@no_type_check
def _leading_floats(arguments):
    leading(arguments, floats_at(0))


@no_type_check
def _leading_halves(arguments):
    leading(arguments, halves_at(0))


ENTRIES = {
    ("norm", torch.float32): _norm_floats,
    ("norm", torch.bfloat16): _norm_halves,
    ("add_norm", torch.float32): _add_norm_floats,
    ("add_norm", torch.bfloat16): _add_norm_halves,
    ("gated", torch.float32): _gated_floats,
    ("gated", torch.bfloat16): _gated_halves,
    ("rotate", torch.float32): _rotate_floats,
    ("rotate", torch.bfloat16): _rotate_halves,
    ("attend", torch.float32): _attend_floats,
    ("attend", torch.bfloat16): _attend_halves,
    ("leading", torch.float32): _leading_floats,
    ("leading", torch.bfloat16): _leading_halves,
}


class Kernel:
    """A kernel for one dtype, on as many threads as torch would use.

    The threads are torch's own, of the OpenMP runtime that torch brings: a second pool would fight them for the cores.
    Where that is not libgomp a call takes one thread.
    """

    def __init__(self, entry: Any) -> None:
        self._entry = cfunc(types.void(INTEGERS), cache=_CACHE)(entry)
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._entry.address)
        self._arguments: Any = None

    @property
    def was_on_disk(self) -> bool:
        return bool(self._entry.cache_hits)

    def __call__(self, tasks: int, work: int, *arguments: int) -> None:
        """work: numbers looked at, all tasks together: few of them are not worth waking a thread."""
        if self._arguments is None:
            self._arguments = ctypes.c_int64 * (2 + len(arguments))
        data = self._arguments(0, tasks, *arguments)
        threads = min(tasks, torch.get_num_threads()) if work > WORTH_A_THREAD else 1
        parallel = _openmp() if threads > 1 else None
        if parallel is None:
            self._call(ctypes.addressof(data))
        else:
            parallel(self._entry.address, ctypes.addressof(data), threads, 0)


WORTH_A_THREAD = 16_384


@functools.cache
def _openmp() -> Any:
    """GOMP_parallel(function, data, threads, flags) of the runtime that torch has loaded; None if it is another."""
    for folder in (Path(torch.__file__).parent / "lib", Path(torch.__file__).parent.parent / "torch.libs"):
        for path in sorted(folder.glob("libgomp*.so*")):
            parallel = ctypes.CDLL(str(path)).GOMP_parallel
            parallel.argtypes, parallel.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
            return parallel
    return None
