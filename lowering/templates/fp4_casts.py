"""Inductor templates of `encode_packed` and `hadamard_largest`: FP4 copies with the contraction innermost.

    x[…, m, n]  →  bytes […, m, n/2] along rows, or […, n, m/2] along columns        two codes each
                   scale bytes in tiles of 128 rows by 4 blocks, or row-major
    x[…, m, n]  →  the largest magnitude of its transform, of every tile
    x           ←  prologue         as in `casts`

The cast itself is ``kernels.fp4_tiles``. Along columns a tile is transposed in registers first. The grid
covers the padding of tiled scales. The amax of the tensor is there before, so that a cast reads x a second
time. The transform is computed in both kernels, and never stored. The matrices of a batch are one after the
other along the grid's first axis.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import empty_strided, lowerings, register_lowering
from torch._inductor.select_algorithm import SymbolicGridFn, TritonTemplate, realize_inputs
from torch._inductor.utils import sympy_product, triton_type
from torch.utils._sympy.functions import CeilDiv

from mxcompile import ops
from mxcompile.formats import Format, ScaleLayout
from mxcompile.formats.hadamard import WIDTH
from mxcompile.formats.scale_tiles import TILE_BLOCKS, TILE_ROWS
from mxcompile.lowering.inductor.tiling import tiled_size
from mxcompile.lowering.kernels.configs import FP4_CAST, FP4Tile, chosen
from mxcompile.lowering.targets import of_device
from mxcompile.lowering.templates import call

_TILE = r"""
{% if BATCHED %}
    M = {{size("X", 1)}}
    N = {{size("X", 2)}}
    tiles_m = tl.num_programs(0) // {{size("X", 0)}}
    pid_m = tl.program_id(0) % tiles_m
    idx_q = (tl.program_id(0) // tiles_m + tl.zeros((1, 1), tl.int32)).to(INDEX_DTYPE)
{% else %}
    M = {{size("X", 0)}}
    N = {{size("X", 1)}}
    pid_m = tl.program_id(0)
{% endif %}
    pid_n = tl.program_id(1)
    rm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    idx_m = rm[:, None].to(INDEX_DTYPE)
    idx_n = rn[None, :].to(INDEX_DTYPE)
    mask = (idx_m < M) & (idx_n < N)
    {{load_input("X", "x", ("idx_q", "idx_m", "idx_n") if BATCHED else ("idx_m", "idx_n"), mask="mask",
                 indent_width=4, index_shape=("BLOCK_M", "BLOCK_N"))}}
    x = x.to(DTYPE)
{% if COLUMNS %}
    x = tl.trans(x)
{% endif %}
    low, high = fp4_tiles.halves(x)
{% if SIGNS is not none %}
    low, high = fp4_tiles.transformed(low, high, SIGNS, DTYPE)
{% endif %}
"""

_CAST = (
    r"""
from mxcompile.lowering.kernels import fp4_tiles, scale_bytes

{% set names = ["X", "SCALE"] %}
{% if TWO_LEVEL %}
{% set names = names + ["AMAX"] %}
{% endif %}
{% if STOCHASTIC %}
{% set names = names + ["SEED"] %}
{% endif %}
{{def_kernel(*names)}}
"""
    + _TILE
    + r"""
{% if TWO_LEVEL %}
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
{% if SIGNS is not none %}
    K = (K + 15) // 16 * 16
{% endif %}
    idx_r = rows[:, None].to(INDEX_DTYPE)
    idx_k = half[None, :].to(INDEX_DTYPE)
    low, high, byte = fp4_tiles.scaled(low, high, gain, SCALED, ACROSS, TWO_LEVEL, ROUNDING)
    scale = SCALE
{% if BATCHED %}
    scale += idx_q.to(tl.int64) * R * ((K + SCALED - 1) // SCALED)
{% endif %}
    scale_bytes.store_rowwise(scale, byte, rows, blocks, R, K, TILED, SCALED)
{% if STOCHASTIC %}
    seed = tl.load(SEED)
    stream = tl.full((), STREAM, tl.int64)
    row, pair = idx_r.to(tl.uint32), idx_k.to(tl.uint32)
    place = {{"2 * pair * R + row" if COLUMNS else "row * K + 2 * pair"}}
{% if BATCHED %}
    place += idx_q.to(tl.uint32) * R * K
{% endif %}
    low = fp4_tiles.rounded_by(low, fp4_tiles.word(place, stream, seed))
    high = fp4_tiles.rounded_by(high, fp4_tiles.word(place + {{"R" if COLUMNS else "1"}}, stream, seed))
{% endif %}
    bytes = fp4_tiles.packed(low, high, NATIVE)
    inside = (idx_r < R) & (idx_k < (K + 1) // 2)
    {{store_output(("idx_q", "idx_r", "idx_k") if BATCHED else ("idx_r", "idx_k"), "bytes", "inside",
                   val_shape=("ROWS", "HALF"))}}
"""
)

_AMAX = (
    r"""
from mxcompile.lowering.kernels import fp4_tiles

{{def_kernel("X")}}
"""
    + _TILE
    + r"""
    largest = fp4_tiles.largest(low, high)
    place = (tl.program_id(0) * tl.num_programs(1) + pid_n + tl.arange(0, 1)).to(INDEX_DTYPE)
    inside = place < tl.num_programs(0) * tl.num_programs(1)
    {{store_output(("place",), "largest", "inside", val_shape=("1",))}}
"""
)


@SymbolicGridFn
def _grid(*sizes: Any, cdiv: Any) -> tuple[Any, Any, int]:
    *batch, m, n, meta = sizes
    down, across = meta["PADDING"]
    padded = cdiv(m, down) * down, cdiv(n, across) * across
    matrices = batch[0] if batch else 1
    return matrices * cdiv(padded[0], meta["BLOCK_M"]), cdiv(padded[1], meta["BLOCK_N"]), 1


TEMPLATE = TritonTemplate(name="mx_fp4_cast", grid=_grid, source=_CAST)
AMAX = TritonTemplate(name="mx_fp4_amax", grid=_grid, source=_AMAX)


_VIEW = lowerings[torch.ops.aten.view.default]


@register_lowering(ops.encode_packed, type_promotion_kind=None)
def lower_encode_packed(
    x: ir.TensorBox,
    block_dim: int,
    fmt: str,
    seed: ir.TensorBox | None = None,
    stream: int = 0,
    amax: ir.TensorBox | None = None,
    scale_layout: str = ScaleLayout.TILED_128X4,
) -> tuple[ir.TensorBox, ir.TensorBox]:
    """Bytes of two codes, and scale bytes in `scale_layout`."""
    *batch, m, n = x.get_size()
    columns = block_dim % len(x.get_size()) == len(batch)
    x, form, tiled = _matrices(x), Format.of(fmt), scale_layout == ScaleLayout.TILED_128X4
    device, target = x.get_device_or_error(), of_device(x.get_device_or_error())
    rows, length = (n, m) if columns else (m, n)
    length = length if form.hadamard is None else CeilDiv(length, WIDTH) * WIDTH
    along = form.tile.along
    blocks = CeilDiv(length, along)
    size = [tiled_size(rows, blocks)] if tiled else [*batch, rows, blocks]
    scale = empty_strided(size, None, dtype=torch.uint8, device=device)
    scale.realize()
    given = [realize_inputs(each) for each in (amax, seed) if each is not None]
    inputs = [x, scale.data, *given]
    padding = (TILE_ROWS, TILE_BLOCKS * along) if tiled else (1, 1)
    tile = chosen(FP4_CAST, "an FP4 cast", target)
    packed = call.only(
        TEMPLATE,
        inputs,
        ir.FixedLayout(device, torch.uint8, [*x.get_size()[:-2], rows, CeilDiv(length, 2)]),
        written=[inputs[1]],
        call_sizes=x.get_size(),
        **_tile(tile, columns=columns, batched=bool(batch)),
        ROWS=tile.across,
        HALF=tile.along // 2,
        PADDING=padding[::-1] if columns else padding,
        TILED=tiled,
        SIGNS=form.hadamard,
        TWO_LEVEL=form.two_level,
        STOCHASTIC=form.stochastic,
        STREAM=stream,
        SCALED=along,
        ACROSS=form.tile.across,
        ROUNDING=repr(str(form.rounding or "")),
        NATIVE=isinstance(target.arch, int),
        DTYPE=triton_type(x.get_dtype()),
    )
    return _VIEW(packed, [*batch, *packed.get_size()[-2:]]), scale


@register_lowering(ops.hadamard_largest, type_promotion_kind=None)
def lower_hadamard_largest(x: ir.TensorBox, dim: int, signs: int) -> ir.TensorBox:
    """The largest magnitude of every tile, and of these."""
    *batch, _, _ = x.get_size()
    columns = dim % len(x.get_size()) == len(batch)
    x = _matrices(x)
    device, (m, n) = x.get_device_or_error(), x.get_size()[-2:]
    tile = chosen(FP4_CAST, "an FP4 cast", of_device(device))
    shape = _tile(tile, columns=columns, batched=bool(batch))
    tiles = sympy_product(batch) * CeilDiv(m, shape["BLOCK_M"]) * CeilDiv(n, shape["BLOCK_N"])
    largest = call.only(
        AMAX,
        [x],
        ir.FixedLayout(device, torch.float32, [tiles]),
        call_sizes=x.get_size(),
        **shape,
        PADDING=(1, 1),
        SIGNS=signs,
        DTYPE=triton_type(x.get_dtype()),
    )
    result: ir.TensorBox = lowerings[ops.largest](largest)
    return result


def _matrices(x: ir.TensorBox) -> Any:
    """`x` as a matrix, or as a batch with one dimension, realized."""
    *batch, m, n = x.get_size()
    return realize_inputs(_VIEW(x, [sympy_product(batch), m, n]) if len(batch) > 1 else x)


def _tile(tile: FP4Tile, *, columns: bool, batched: bool) -> dict[str, Any]:
    """Arguments that both templates have."""
    block_m, block_n = (tile.along, tile.across) if columns else (tile.across, tile.along)
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "COLUMNS": columns,
        "BATCHED": batched,
        "num_stages": 1,
        "num_warps": tile.num_warps,
    }
