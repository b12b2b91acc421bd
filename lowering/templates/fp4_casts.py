"""Inductor templates of the casts to packed FP4, and of the amax that they need.

    x[…, m, n]  →  bytes […, m, n/2] along rows, […, n, m/2] along columns, or both        two codes each
                   scale bytes in tiles of 128 rows by 4 blocks, or row-major
    x[…, m, n]  →  the largest magnitudes of every tile and of its transform
    x           ←  prologue         as in `casts`

The first template casts, by ``kernels.fp4_tiles``; the second computes amaxes. A prologue computes x in the
kernel, as in `casts`. The contraction is innermost in every copy. Both copies come from one read of x, unless
rounding is stochastic. The grid covers the padding of tiled scales. The cast needs the amax of the tensor, so
x is read twice. The Hadamard transform runs along columns; both kernels compute it, and no kernel stores it.
The matrices of a batch lie along the grid's first axis.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import reduce_amax, slice_, view
from torch._inductor.select_algorithm import SymbolicGridFn, TritonTemplate, realize_inputs
from torch._inductor.utils import sympy_product, triton_type
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import CeilDiv

from mxcompile.formats import Copy, CopyPart
from mxcompile.formats.hadamard import WIDTH
from mxcompile.formats.scale_tiles import TILE_BLOCKS, TILE_ROWS
from mxcompile.lowering.chips.tiles import Unsupported
from mxcompile.lowering.choices.configs import chosen
from mxcompile.lowering.inductor.copies import CastCall
from mxcompile.lowering.inductor.tiling import tiled_size
from mxcompile.lowering.targets import Target, of_device
from mxcompile.lowering.templates import call
from mxcompile.lowering.templates.producers import ProducingTemplate

_TILE = r"""
{% if BATCHED %}
    M = {{size("X", 1)}}
    N = {{size("X", 2)}}
    tiles_m = tl.num_programs(0) // {{size("X", 0)}}
    pid_m = tl.program_id(0) % tiles_m
    matrix = (tl.program_id(0) // tiles_m).to(tl.int64)
    idx_q = (matrix + tl.zeros((1, 1, 1), tl.int64)).to(INDEX_DTYPE)
{% else %}
    M = {{size("X", 0)}}
    N = {{size("X", 1)}}
    pid_m = tl.program_id(0)
    matrix = 0
{% endif %}
    pid_n = tl.program_id(1)
    outer = pid_m * OUTER + tl.arange(0, OUTER)
    rm = (outer[None, :] * INNER + tl.arange(0, INNER)[:, None])[:, :, None]
    rn = pid_n * WIDTH + tl.arange(0, WIDTH)
    idx_m = rm.to(INDEX_DTYPE)
    idx_n = rn[None, None, :].to(INDEX_DTYPE)
    mask = (idx_m < M) & (idx_n < N)
    {{load_input("X", "x", ("idx_q", "idx_m", "idx_n") if BATCHED else ("idx_m", "idx_n"),
                 mask=none if EVEN else "mask", indent_width=4, index_shape=("INNER", "OUTER", "WIDTH"))}}
    x = x.to(DTYPE)
"""

_CAST = (
    r"""
from mxcompile.lowering.kernels import fp4_tiles, scale_bytes, tiles

{% set written = (["ROW_SCALE"] if ROWS else []) + (["COLUMN"] if ROWS and COLUMNS else [])
                 + (["COLUMN_SCALE"] if COLUMNS else []) %}
{% set amax = (["ROW_AMAX"] if ROWS else []) + (["COLUMN_AMAX"] if COLUMNS else []) %}
{% set names = written + (amax if TWO_LEVEL else []) + (["SEED"] if STOCHASTIC else []) %}
{% set how = "BLOCK, SQUARE, TWO_LEVEL, ROUNDING, PTX, BF16" %}
{{def_kernel("X", *names)}}
"""
    + _TILE
    + r"""
    one = tl.zeros((1, 1, 1), tl.int32)
{% if STOCHASTIC %}
    seed = tl.load(SEED)
    stream = tl.full((), STREAM, tl.int64)
{% endif %}
{% if ROWS %}
    row_gain = {{"fp4_tiles.gain(tl.load(ROW_AMAX + one))" if TWO_LEVEL else "1.0"}}
    even, odd = fp4_tiles.split(x, BF16)
    byte, factor = fp4_tiles.row_scales(even, odd, row_gain, {{how}})
    blocks = (N + BLOCK - 1) // BLOCK
    block = (pid_n * (WIDTH // BLOCK) + tl.arange(0, WIDTH // BLOCK))[None, None, :]
    scale_bytes.store(ROW_SCALE + matrix * M * blocks, byte, rm, block, M, blocks, TILED)
{% if STOCHASTIC %}
    group = (pid_n * (WIDTH // 4) + tl.arange(0, WIDTH // 4))[None, None, :]
    place = ((matrix * M + rm) * ((N + 3) // 4) + group).to(tl.uint32)
    random = fp4_tiles.random_pairs(place, stream, seed, False, PTX)
{% endif %}
    row_codes = fp4_tiles.row_codes(even, odd, factor, {{"random" if STOCHASTIC else "0"}}, STOCHASTIC, PTX)
    idx_k = (pid_n * (WIDTH // 2) + tl.arange(0, WIDTH // 2))[None, None, :].to(INDEX_DTYPE)
    in_row = (idx_m < M) & (idx_k < (N + 1) // 2)
    {{store_output(("idx_q", "idx_m", "idx_k") if BATCHED else ("idx_m", "idx_k"), "row_codes", "in_row",
                   val_shape=("INNER", "OUTER", "HALF"))}}
{% endif %}
{% if COLUMNS %}
    K = (M + 15) // 16 * 16 if SIGNS else M
    column_gain = {{"fp4_tiles.gain(tl.load(COLUMN_AMAX + one))" if TWO_LEVEL else "1.0"}}
    even, odd = {{"fp4_tiles.transformed(x, SIGNS, PTX, BF16)" if SIGNS else "fp4_tiles.split(x, BF16)"}}
    byte, factor, other = fp4_tiles.column_scales(even, odd, column_gain, {{how}})
    blocks = (K + BLOCK - 1) // BLOCK
    scale_bytes.store(
        COLUMN_SCALE + matrix * N * blocks, byte, rn[None, :], outer[:, None], N, blocks, TILED)
{% if STOCHASTIC %}
    column = (pid_n * WIDTH + 2 * tl.arange(0, WIDTH // 2))[None, None, :]
    group = outer[None, :, None] * (INNER // 4) + tl.arange(0, INNER // 4)[:, None, None]
    place = ((matrix * ((K + 3) // 4) + group) * N + column).to(tl.uint32)
    random = fp4_tiles.random_pairs(place, stream, seed, True, PTX)
{% endif %}
    even = fp4_tiles.column_codes(even, factor, {{"random" if STOCHASTIC else "0"}}, STOCHASTIC, PTX)
{% if STOCHASTIC %}
    place += 1
    random = fp4_tiles.random_pairs(place, stream, seed, True, PTX)
{% endif %}
    odd = fp4_tiles.column_codes(odd, other, {{"random" if STOCHASTIC else "0"}}, STOCHASTIC, PTX)
    column_codes = fp4_tiles.columns(even, odd)
    idx_r = rn[:, None, None].to(INDEX_DTYPE)
    half = outer[None, :, None] * (INNER // 2) + tl.arange(0, INNER // 2)[None, None, :]
    idx_h = half.to(INDEX_DTYPE)
    in_column = (idx_r < N) & (idx_h < (K + 1) // 2)
{% if ROWS %}
    address = (matrix * N + idx_r.to(tl.int64)) * ((K + 1) // 2) + idx_h
    tl.store(COLUMN + address, column_codes, mask=in_column)
{% else %}
    {{store_output(("idx_q", "idx_r", "idx_h") if BATCHED else ("idx_r", "idx_h"), "column_codes",
                   "in_column", val_shape=("WIDTH", "OUTER", "INNER_HALF"))}}
{% endif %}
{% endif %}
"""
)

_AMAX = (
    r"""
from mxcompile.lowering.kernels import fp4_tiles

{{def_kernel("X")}}
"""
    + _TILE
    + r"""
    even, odd = fp4_tiles.split(x, BF16)
    largest = fp4_tiles.largest(even, odd, BF16)
{% if SIGNS %}
    even, odd = fp4_tiles.transformed(x, SIGNS, PTX, BF16)
    largest = tl.reshape(tl.join(largest, fp4_tiles.largest(even, odd, BF16)), (1, 2))
{% endif %}
    program = tl.program_id(0) * tl.num_programs(1) + pid_n
    idx_t = (program + tl.zeros((1, 1), tl.int32)).to(INDEX_DTYPE)
    idx_w = tl.arange(0, HOW_MANY)[None, :].to(INDEX_DTYPE)
    inside = (idx_w < HOW_MANY) & (idx_t < tl.num_programs(0) * tl.num_programs(1))
    {{store_output(("idx_w", "idx_t"), "largest", "inside", val_shape=("1", "HOW_MANY"))}}
"""
)


@SymbolicGridFn
def _grid(*sizes: Any, cdiv: Any) -> tuple[Any, Any, int]:
    *batch, m, n, meta = sizes
    down, across = meta["PADDING"]
    padded = cdiv(m, down) * down, cdiv(n, across) * across
    matrices = batch[0] if batch else 1
    return matrices * cdiv(padded[0], meta["INNER"] * meta["OUTER"]), cdiv(padded[1], meta["WIDTH"]), 1


TEMPLATE = ProducingTemplate(name="mx_fp4_cast", grid=_grid, source=_CAST)
AMAX = TritonTemplate(name="mx_fp4_amax", grid=_grid, source=_AMAX)


Results = tuple[ir.TensorBox, ...]


def lower_cast(cast: CastCall) -> Results | None:
    """Returns bytes and scales along rows, along columns, or both in this order; None if not packed.

    For copies that are amaxes it returns the amaxes, the amax of the transform last.
    """
    x, copies = cast.x, cast.copies
    if not copies[0].format.packed:
        return None
    if copies[0].part is CopyPart.LARGEST:
        return _largest(x, copies[-1].format.hadamard or 0)[-len(copies) :]
    *batch, _, _ = x.get_size()
    is_stored = _is_stored(x)
    x, is_tiled = _matrices(x), copies[0].is_tiled
    target = of_device(x.get_device_or_error())
    shapes = [shape for copy in copies for shape in _shapes(x, copy)]
    read = [realize_inputs(tensor) for tensor in (*cast.amaxes, cast.seed) if tensor is not None]
    first, last, sides = copies[0].format, copies[-1].format, [copy.dim for copy in copies]
    # only one-level casts compute a producer: with two levels, it is stored, since the amax reads it too
    tile = _tile(target, first.tile.along, x, halve=len(copies) > 1 and not is_stored and not first.two_level)
    padding = [(TILE_ROWS, TILE_BLOCKS * first.tile.along), (TILE_BLOCKS * first.tile.along, TILE_ROWS)]
    ways = [padding[-1 - side] for side in sides] if is_tiled else [(1, 1)]
    results = call.only(
        TEMPLATE,
        [x],
        [(shape, torch.uint8) for shape in shapes],
        last=read,
        call_sizes=x.get_size(),
        **tile,
        ROWS=-1 in sides,
        COLUMNS=-2 in sides,
        HALF=tile["WIDTH"] // 2,
        INNER_HALF=tile["INNER"] // 2,
        PADDING=tuple(map(max, *ways)) if len(ways) > 1 else ways[0],
        TILED=is_tiled,
        SIGNS=last.hadamard or 0,
        SQUARE=first.tile.across > 1,
        TWO_LEVEL=first.two_level,
        STOCHASTIC=first.stochastic,
        STREAM=cast.stream,
        ROUNDING=repr(str(first.rounding or "")),
    )
    return tuple(view(result, [*batch, *result.get_size()[-2:]]) if batch else result for result in results)


def _shapes(x: ir.TensorBox, copy: Copy) -> tuple[list[Any], list[Any]]:
    """Returns shapes of the bytes and scales of a copy of `x`, with at most one batch dimension."""
    *batch, rows, length = x.get_size()
    form = copy.format
    if copy.dim == -2:
        rows, length = length, rows
    length = length if form.hadamard is None else CeilDiv(length, WIDTH) * WIDTH
    blocks = CeilDiv(length, form.tile.along)
    scale = [tiled_size(rows, blocks)] if copy.is_tiled else [*batch, rows, blocks]
    return [*batch, rows, CeilDiv(length, 2)], scale


def lower_largest(x: ir.TensorBox, dim: int | None = None) -> ir.TensorBox | None:
    """Returns the amax of a tensor in memory, from amaxes of tiles; None for other tensors, or with `dim`."""
    target = of_device(x.get_device_or_error())
    if dim is not None or isinstance(target.tiles.fp4_cast, Unsupported) or not _is_stored(x):
        return None
    (result,) = _largest(x, 0)
    return result


def _is_stored(x: ir.TensorBox) -> bool:
    """Whether `x` is a tensor in memory with contiguous rows, and no loop of Inductor computes it."""
    data: Any = x
    while not isinstance(data, ir.Buffer) and hasattr(data, "data"):
        data = data.data
    if not isinstance(data, ir.Buffer) or isinstance(data, ir.ComputedBuffer) or len(x.get_size()) < 2:
        return False
    is_equal = V.graph.sizevars.statically_known_equals
    return is_equal(x.get_stride()[-1], 1) and not any(is_equal(size, 0) for size in x.get_size())


def _largest(x: ir.TensorBox, signs: int) -> Results:
    """Returns the amax of `x`, [1]; with `signs` also the amax of its Hadamard transform."""
    *batch, m, n = x.get_size()
    x, number = _matrices(x), 2 if signs else 1
    tile = _tile(of_device(x.get_device_or_error()), WIDTH, x)
    tiles = sympy_product(batch) * CeilDiv(m, tile["INNER"] * tile["OUTER"]) * CeilDiv(n, tile["WIDTH"])
    arguments = {**tile, "PADDING": (1, 1), "SIGNS": signs, "HOW_MANY": number}
    (largest,) = call.only(
        AMAX, [x], [([number, tiles], torch.float32)], call_sizes=x.get_size(), **arguments
    )
    return tuple(reduce_amax(slice_(largest, 0, at, at + 1), [1]) for at in range(number))


def _matrices(x: ir.TensorBox) -> Any:
    """Returns `x` as a matrix, or as a batch with one batch dimension, realized."""
    *batch, m, n = x.get_size()
    return realize_inputs(view(x, [sympy_product(batch), m, n]) if len(batch) > 1 else x)


def _tile(target: Target, block: int, x: Any, *, halve: bool = False) -> dict[str, Any]:
    """Returns arguments of both templates: the tile, in blocks of `block` rows, and the instructions to use.

    halve: whether a thread has half as many elements, which leaves registers for a producer.
    """
    tile = chosen(target.tiles.fp4_cast, "an FP4 cast", target)
    is_multiple = V.graph.sizevars.statically_known_multiple_of
    (m, n), size = x.get_size()[-2:], x.get_dtype().itemsize
    even = is_multiple(m, tile.block_m) and is_multiple(n, tile.block_n)
    ptx = isinstance(target.arch, int)
    return {
        "BATCHED": len(x.get_size()) > 2,
        "EVEN": even,
        "BLOCK": block,
        "INNER": block,
        "OUTER": tile.block_m // block,
        "WIDTH": tile.block_n * 2 // size // (1 if even else 2),  # masks take registers too
        "PTX": ptx,
        "BF16": ptx and x.get_dtype() == torch.bfloat16,
        "DTYPE": triton_type(x.get_dtype()),
        "num_stages": 1,
        "num_warps": tile.num_warps * (2 if halve else 1),
    }
