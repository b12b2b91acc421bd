"""Statistics of a cast to MXFP8 for one tile: the Triton device function that its template calls.

    x [TILE_M, TILE_N]  →  scale bytes [TILE_M / HEIGHT, TILE_N / WIDTH]
                           a row of FP64: the fields of ``mxcompile.ops.watch``, and a count of each byte

HEIGHT, WIDTH: sizes of a block that shares a scale, each 1 or 32. A row has the smallest value negated, so
that a maximum reduces it. Saturated, underflowing and poisoned values count as in the reference. Sums of
squares are FP32 in a tile, in units of its largest scale, and FP64 over tiles: exact to about 2^−20. Values
below 2^−63 units count as 0.

A function that is not inlined measures tiles with NaN, Inf or a cast beyond FP32: all other tiles then take
half of the instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxcompile import formats
from mxcompile.lowering.kernels import tiles

NUM_BYTES = tl.constexpr(256)
NUM_FIELDS = tl.constexpr(11)


@triton.constexpr_function
def _overflowing_byte(elem):
    """Returns the scale byte from which values can overflow FP32: elements of 2^emax and more do."""
    return 255 - formats.ELEM_TYPES[elem].emax


@triton.constexpr_function
def _overflowing_element(elem):
    return 2.0 ** formats.ELEM_TYPES[elem].emax


@triton.jit
def _load(
    x_ptr, first_m, first_n, M, N, stride_m, stride_n,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Returns a tile, FP32 [blocks down, HEIGHT, blocks across, WIDTH], 0 outside; and its mask."""
    rm = (first_m + tl.arange(0, TILE_M))[:, None]
    rn = (first_n + tl.arange(0, TILE_N))[None, :]
    inside = (rm < M) & (rn < N)
    x = tl.load(x_ptr + rm.to(tl.int64) * stride_m + rn.to(tl.int64) * stride_n, mask=inside, other=0.0)
    DOWN: tl.constexpr = TILE_M // HEIGHT
    ACROSS: tl.constexpr = TILE_N // WIDTH
    blocks = tl.reshape(x.to(tl.float32), (DOWN, HEIGHT, ACROSS, WIDTH))
    return blocks, tl.reshape(inside, (DOWN, HEIGHT, ACROSS, WIDTH))


@triton.jit
def _largest_bits(x):
    """Returns magnitude bits of the largest value of each block, [blocks down, blocks across]."""
    return tl.max(tl.max(tiles.magnitude_bits(x), axis=3), axis=1)


@triton.jit
def _fields(
    x, inside, byte, amax_bits, elements,
    ELEM: tl.constexpr, ROUNDING: tl.constexpr, CLEAN: tl.constexpr,
):  # fmt: skip
    """Returns the fields of a tile except `elements`, scalars. CLEAN: whether values and casts are finite.

    inside: mask, used unless CLEAN. amax_bits: magnitude bits of the largest value, used if CLEAN.
    """
    bits = tiles.magnitude_bits(x)
    scaled = x * tiles.inverse_scale(byte)[:, None, :, None]
    element = tiles.nearest(tiles.saturated(scaled, ELEM, ROUNDING), ELEM)
    lost = element == 0
    cut = tl.abs(scaled) > tiles.largest_value(ELEM)
    known_bits = amax_bits
    if not CLEAN:
        cap = tl.where(byte == _overflowing_byte(ELEM), _overflowing_element(ELEM), float("inf"))
        exact = tl.abs(element) < tl.where(byte == tiles.SCALE_NAN, 0.0, cap)[:, None, :, None]
        nan = tl.sum((bits > tiles.INF_BITS).to(tl.int32))
        inf = tl.sum((bits == tiles.INF_BITS).to(tl.int32))
        poisoned = elements - nan - inf - tl.sum((exact & inside).to(tl.int32))
        bits = tl.where(bits < tiles.INF_BITS, bits, 0)
        amax_bits = tl.max(bits)
        known_bits = tl.max(tl.where(exact, bits, 0))
        lost = lost & (bits != 0)
        cut = cut & exact
        x, element = tl.where(exact, x, 0.0), tl.where(exact, element, 0.0)
    unit = tiles.scale_byte(known_bits, ELEM, ROUNDING)
    in_units = tiles.inverse_scale(unit)
    back = tiles.scale_value(byte) * in_units
    if not CLEAN:
        back = tl.where(back < float("inf"), back, 0.0)  # of blocks whose elements are all 0 now
    finite = x * in_units
    noise = element * back[:, None, :, None] - finite
    below = (bits - 1).to(tl.uint32, bitcast=True)  # of 0 the largest, and the only one with bit 31
    zeros = tl.sum((below >> 31).to(tl.int32))
    underflow = tl.sum(lost.to(tl.int32))
    saturated = zeros * 0  # a tensor, as a count is in the other branch
    if ROUNDING == "floor" or ROUNDING == "even":  # the others choose scales that cut nothing
        saturated = tl.sum(cut.to(tl.int32))
    if CLEAN:
        underflow -= zeros
        nan, inf, poisoned = zeros * 0, zeros * 0, zeros * 0
    least = tl.min(below).to(tl.int32, bitcast=True) + 1
    amax = amax_bits.to(tl.float32, bitcast=True)
    smallest = tl.where(least == 0, tiles.INF_BITS, least).to(tl.float32, bitcast=True)
    square = tiles.scale_value(unit).to(tl.float64)
    square *= square
    signal, lost_signal = tl.sum(finite * finite).to(tl.float64), tl.sum(noise * noise).to(tl.float64)
    nonzero = 0 - zeros + bits.numel
    counts = nonzero, underflow, saturated, nan, inf, poisoned
    return amax, smallest, counts, signal * square, lost_signal * square


@triton.jit
def _store_fields(row_ptr, elements, amax, smallest, counts, signal, noise):
    tl.store(row_ptr, amax.to(tl.float64))
    tl.store(row_ptr + 1, -smallest.to(tl.float64))
    tl.store(row_ptr + 2, elements.to(tl.float64))
    for index in tl.static_range(len(counts)):
        tl.store(row_ptr + 3 + index, counts[index].to(tl.float64))
    tl.store(row_ptr + 9, signal)
    tl.store(row_ptr + 10, noise)


@triton.jit(noinline=True)
def _store_fields_of_any(
    row_ptr, x_ptr, first_m, first_n, M, N, stride_m, stride_n, elements,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    ELEM: tl.constexpr, ROUNDING: tl.constexpr,
):  # fmt: skip
    """Stores the fields of the tile at (`first_m`, `first_n`), with any values, part by part."""
    PART: tl.constexpr = 64
    amax, smallest = tl.full((), 0.0, tl.float32), tl.full((), float("inf"), tl.float32)
    signal, noise = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    none = tl.full((), 0, tl.int32)
    nonzero, underflow, saturated, nan, inf, poisoned = none, none, none, none, none, none
    for start in range(0, TILE_N, PART):
        first = first_n + start
        x, inside = _load(x_ptr, first_m, first, M, N, stride_m, stride_n, TILE_M, PART, HEIGHT, WIDTH)
        byte = tiles.scale_byte(_largest_bits(x), ELEM, ROUNDING)
        part = tl.minimum(M - first_m, TILE_M) * tl.maximum(tl.minimum(N - first, PART), 0)
        most, least, counts, finite, lost = _fields(x, inside, byte, none, part, ELEM, ROUNDING, False)
        amax, smallest = tl.maximum(amax, most), tl.minimum(smallest, least)
        nonzero += counts[0]
        underflow += counts[1]
        saturated += counts[2]
        nan += counts[3]
        inf += counts[4]
        poisoned += counts[5]
        signal += finite
        noise += lost
    whole = nonzero, underflow, saturated, nan, inf, poisoned
    _store_fields(row_ptr, elements, amax, smallest, whole, signal, noise)


@triton.jit
def measure(
    row_ptr, x_ptr, first_m, first_n, M, N, stride_m, stride_n,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    ELEM: tl.constexpr, ROUNDING: tl.constexpr,
):  # fmt: skip
    """Stores the row, FP64, of the tile of `x_ptr` [M, N] at (`first_m`, `first_n`).

    Returns the tile's scale bytes, uint8 [TILE_M / HEIGHT, TILE_N / WIDTH], and a mask: scales inside [M, N].
    """
    x, inside = _load(x_ptr, first_m, first_n, M, N, stride_m, stride_n, TILE_M, TILE_N, HEIGHT, WIDTH)
    largest = _largest_bits(x)
    byte = tiles.scale_byte(largest, ELEM, ROUNDING)
    down = first_m + tl.arange(0, TILE_M // HEIGHT)[:, None] * HEIGHT
    across = first_n + tl.arange(0, TILE_N // WIDTH)[None, :] * WIDTH
    real = (down < M) & (across < N)
    of_bytes = tl.histogram(tl.ravel(byte), NUM_BYTES, mask=tl.ravel(real))
    tl.store(row_ptr + NUM_FIELDS + tl.arange(0, NUM_BYTES), of_bytes.to(tl.float64))
    elements = tl.minimum(M - first_m, TILE_M) * tl.minimum(N - first_n, TILE_N)
    if tl.max(byte) < _overflowing_byte(ELEM):
        amax, smallest, counts, signal, noise = _fields(
            x, inside, byte, tl.max(largest), elements, ELEM, ROUNDING, True
        )
        _store_fields(row_ptr, elements, amax, smallest, counts, signal, noise)
    else:
        _store_fields_of_any(
            row_ptr, x_ptr, first_m, first_n, M, N, stride_m, stride_n, elements,
            TILE_M, TILE_N, HEIGHT, WIDTH, ELEM, ROUNDING,
        )  # fmt: skip
    return byte.to(tl.uint8), real
