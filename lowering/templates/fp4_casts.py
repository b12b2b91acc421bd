"""Inductor templates of `encode_packed` and `hadamard_largest`: FP4 copies with the contraction innermost.

    x[m, n]  →  bytes [m, n/2] along rows, or [n, m/2] along columns        two codes each
                scale bytes in tiles of 128 rows by 4 blocks
    x[m, n]  →  the largest magnitude of its transform, of every tile
    x        ←  prologue         as in `casts`

The cast itself is ``kernels.fp4_tiles``. Along columns a tile is transposed in registers first. The grid
covers the padding of the scales. The amax of the tensor is there before, so that a cast reads x a second
time. The transform is computed in both kernels, and never stored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import empty_strided, lowerings, register_lowering
from torch._inductor.select_algorithm import SymbolicGridFn, TritonTemplate, realize_inputs
from torch._inductor.utils import ceildiv, triton_type
from torch.utils._sympy.functions import FloorDiv

from mxcompile import ops
from mxcompile.formats import Format
from mxcompile.formats.scale_tiles import TILE_BLOCKS, TILE_ROWS
from mxcompile.lowering.inductor.tiling import tiled_size
from mxcompile.lowering.kernels.configs import FP4_CAST, chosen
from mxcompile.lowering.targets import of_device
from mxcompile.lowering.templates import call

_TILE = r"""
    M = {{size("X", 0)}}
    N = {{size("X", 1)}}
    pid_m = tl.program_id(0)
    pid_n = tl.program_id(1)
    rm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    idx_m = rm[:, None].to(INDEX_DTYPE)
    idx_n = rn[None, :].to(INDEX_DTYPE)
    mask = (idx_m < M) & (idx_n < N)
    {{load_input("X", "x", ("idx_m", "idx_n"), mask="mask", indent_width=4,
                 index_shape=("BLOCK_M", "BLOCK_N"))}}
    x = x.to(DTYPE)
{% if COLUMNS %}
    x = tl.trans(x)
{% endif %}
    low, high = fp4_tiles.halves(x)
{% if SIGNS is not none %}
    low, high = fp4_tiles.transformed(low, high, SIGNS, DTYPE)
{% endif %}
"""

_CAST = r"""
from mxcompile.lowering.kernels import fp4_tiles

{% set names = ["X", "SCALE"] %}
{% if TWO_LEVEL %}
{% set names = names + ["AMAX"] %}
{% endif %}
{% if STOCHASTIC %}
{% set names = names + ["SEED"] %}
{% endif %}
{{def_kernel(*names)}}
TILE{% if TWO_LEVEL %}
    gain = fp4_tiles.gain(tl.load(AMAX + tl.zeros((1, 1), tl.int32)))
{% else %}
    gain = 1.0
{% endif %}
{% if COLUMNS %}
    R, K, rows, first = N, M, rn, pid_m * (BLOCK_M // 2)
    blocks = pid_m * (BLOCK_M // SCALED) + tl.arange(0, BLOCK_M // SCALED)
    half = first + tl.arange(0, BLOCK_M // 2)
{% else %}
    R, K, rows, first = M, N, rm, pid_n * (BLOCK_N // 2)
    blocks = pid_n * (BLOCK_N // SCALED) + tl.arange(0, BLOCK_N // SCALED)
    half = first + tl.arange(0, BLOCK_N // 2)
{% endif %}
    idx_r = rows[:, None].to(INDEX_DTYPE)
    idx_k = half[None, :].to(INDEX_DTYPE)
    low, high, byte = fp4_tiles.scaled(low, high, gain, SCALED, ACROSS, TWO_LEVEL, ROUNDING)
    fp4_tiles.store_scale(SCALE, byte, rows, blocks, R, (K + SCALED - 1) // SCALED)
{% if STOCHASTIC %}
    seed = tl.load(SEED)
    stream = tl.full((), STREAM, tl.int64)
    row, pair = idx_r.to(tl.uint32), idx_k.to(tl.uint32)
    place = {{"2 * pair * N + row" if COLUMNS else "row * N + 2 * pair"}}
    low = fp4_tiles.rounded_by(low, fp4_tiles.word(place, stream, seed))
    high = fp4_tiles.rounded_by(high, fp4_tiles.word(place + {{"N" if COLUMNS else "1"}}, stream, seed))
{% endif %}
    bytes = fp4_tiles.packed(low, high, NATIVE)
    inside = (idx_r < R) & (idx_k < K // 2)
    {{store_output(("idx_r", "idx_k"), "bytes", "inside", val_shape=("ROWS", "HALF"))}}
""".replace("TILE", _TILE)

_AMAX = r"""
from mxcompile.lowering.kernels import fp4_tiles

{{def_kernel("X")}}
TILE    largest = fp4_tiles.largest(low, high)
    place = (pid_m * tl.num_programs(1) + pid_n + tl.arange(0, 1)).to(INDEX_DTYPE)
    inside = place < tl.num_programs(0) * tl.num_programs(1)
    {{store_output(("place",), "largest", "inside", val_shape=("1",))}}
""".replace("TILE", _TILE)


@SymbolicGridFn
def _grid(m: Any, n: Any, meta: dict[str, Any], *, cdiv: Any) -> tuple[Any, Any, int]:
    down, across = meta["PADDING"]
    padded = cdiv(m, down) * down, cdiv(n, across) * across
    return cdiv(padded[0], meta["BLOCK_M"]), cdiv(padded[1], meta["BLOCK_N"]), 1


@SymbolicGridFn
def _amax_grid(m: Any, n: Any, meta: dict[str, Any], *, cdiv: Any) -> tuple[Any, Any, int]:
    return cdiv(m, meta["BLOCK_M"]), cdiv(n, meta["BLOCK_N"]), 1


TEMPLATE = TritonTemplate(name="mx_fp4_cast", grid=_grid, source=_CAST)
AMAX = TritonTemplate(name="mx_fp4_amax", grid=_amax_grid, source=_AMAX)


@register_lowering(ops.encode_packed, type_promotion_kind=None)
def lower_encode_packed(
    x: ir.TensorBox,
    block_dim: int,
    fmt: str,
    seed: ir.TensorBox | None = None,
    stream: int = 0,
    amax: ir.TensorBox | None = None,
) -> tuple[ir.TensorBox, ir.TensorBox]:
    """Bytes of two codes, and tiles of scale bytes."""
    x, form, columns = realize_inputs(x), Format.of(fmt), block_dim % 2 == 0
    device, (m, n) = x.get_device_or_error(), x.get_size()
    target = of_device(device)
    rows, length = (n, m) if columns else (m, n)
    along = form.tile.along
    size = tiled_size(rows, FloorDiv(length + (along - 1), along))
    scale = empty_strided([size], None, dtype=torch.uint8, device=device)
    scale.realize()
    given = [realize_inputs(each) for each in (amax, seed) if each is not None]
    inputs = [x, scale.data, *given]
    tile = chosen(FP4_CAST, "an FP4 cast", target)
    block_m, block_n = (tile.along, tile.across) if columns else (tile.across, tile.along)
    padding = TILE_ROWS, TILE_BLOCKS * along
    packed = call.only(
        TEMPLATE,
        inputs,
        ir.FixedLayout(device, torch.uint8, [rows, FloorDiv(length, 2)]),
        written=[inputs[1]],
        call_sizes=x.get_size(),
        num_stages=1,
        num_warps=tile.num_warps,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        ROWS=tile.across,
        HALF=tile.along // 2,
        PADDING=padding[::-1] if columns else padding,
        COLUMNS=columns,
        SIGNS=form.hadamard,
        TWO_LEVEL=form.two_level,
        STOCHASTIC=form.stochastic,
        STREAM=stream,
        SCALED=along,
        ACROSS=form.tile.across,
        ROUNDING=repr(str(form.rounding or "")),
        NATIVE=target.encodes_fp8,
        DTYPE=triton_type(x.get_dtype()),
    )
    return packed, scale


@register_lowering(ops.hadamard_largest, type_promotion_kind=None)
def lower_hadamard_largest(x: ir.TensorBox, dim: int, signs: int) -> ir.TensorBox:
    """The largest magnitude of every tile, and of these."""
    x, columns = realize_inputs(x), dim % 2 == 0
    device, (m, n) = x.get_device_or_error(), x.get_size()
    tile = chosen(FP4_CAST, "an FP4 cast", of_device(device))
    block_m, block_n = (tile.along, tile.across) if columns else (tile.across, tile.along)
    tiles = ceildiv(m, block_m) * ceildiv(n, block_n)
    largest = call.only(
        AMAX,
        [x],
        ir.FixedLayout(device, torch.float32, [tiles]),
        call_sizes=x.get_size(),
        num_stages=1,
        num_warps=tile.num_warps,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        COLUMNS=columns,
        SIGNS=signs,
        DTYPE=triton_type(x.get_dtype()),
    )
    result: ir.TensorBox = lowerings[ops.largest](largest)
    return result
