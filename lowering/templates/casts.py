"""Inductor template of MX casts: one read of a matrix, and its copy along rows, along columns or both.

    x[m, n]  →  codes and scale bytes                     the cast itself is ``lowering.kernels.tiles``
    x        ←  prologue                                  the producer, computed in place of a load of x, and
                                                          rounded to the dtype in which x would be stored

A template has one output; the other results are buffers that it writes. A tile has whole blocks of 32, masked
past the ends of the matrix, so that no two programs share a block. Scales are row-major or tiled; if tiled,
the grid covers the padding too.

The matrices of a batch are stacked along rows. If blocks run along columns, and ENTRY, the number of rows of
a matrix, is not a multiple of 32, the grid covers the batch with each matrix padded to whole blocks.

`inductor.copies` calls `lower` for a cast, and lowers casts that no template takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import lowerings
from torch._inductor.select_algorithm import SymbolicGridFn, realize_inputs
from torch._inductor.utils import sympy_product, triton_type
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import CeilDiv, FloorDiv

from mxcompile.formats import BLOCK, Copy
from mxcompile.formats.scale_tiles import TILE_ROWS
from mxcompile.lowering.chips.tiles import Unsupported
from mxcompile.lowering.choices import configs, packing
from mxcompile.lowering.inductor.copies import CastCall
from mxcompile.lowering.inductor.tiling import tiled_size
from mxcompile.lowering.targets import Target, of_device
from mxcompile.lowering.templates import call
from mxcompile.lowering.templates.matrix import MASKS, TILE_INDICES, empty, load
from mxcompile.lowering.templates.producers import ProducingTemplate, leaves_room

_IMPORTS = r"""
from mxcompile.lowering.kernels import packed, scale_bytes, tiles
{% set cast = "packed" if PACKED else "tiles" %}
{% set how = "ELEM, ROUNDING" if PACKED else "ELEM, ROUNDING, NATIVE, SATURATES" %}
"""

_TILE_INDICES = (
    TILE_INDICES
    + r"""{% if ENTRY %}
    padded = (ENTRY + 31) // 32 * 32
    end_m = M // ENTRY * padded
    rm = tl.where(rm % padded < ENTRY, rm // padded * ENTRY + rm % padded, M)
{% else %}
    end_m = M
{% endif %}
"""
    + MASKS
)

_BOTH = r"""
    column_codes, column_byte = {{cast}}.quantize_columnwise(x, {{how}})
    tl.store(COLUMN + idx_m.to(INDEX) * N + idx_n, tiles.as_elem(column_codes, ELEM), mask=mask)
    scale_bytes.store_columnwise(COLUMN_SCALE, column_byte, blocks_m, rn, end_m, N, TILED)
    codes, row_byte = {{cast}}.quantize_rowwise(x, {{how}})
    scale_bytes.store_rowwise(ROW_SCALE, row_byte, rm, blocks_n, M, N, TILED)
"""

_STORE = r"""
    qdata = tiles.as_elem(codes, ELEM)
    {{store_output(("idx_m", "idx_n"), "qdata", "mask", val_shape=("BLOCK_M", "BLOCK_N"))}}
"""

_SOURCE = (
    _IMPORTS
    + r"""
{{def_kernel("X", *(["ROW_SCALE", "COLUMN", "COLUMN_SCALE"] if ROWWISE and COLUMNWISE else ["SCALE"]))}}
"""
    + _TILE_INDICES
    + load("X")
    + r"{% if ROWWISE and COLUMNWISE %}"
    + _BOTH
    + r"""{% elif ROWWISE %}
    codes, byte = {{cast}}.quantize_rowwise(x, {{how}})
    scale_bytes.store_rowwise(SCALE, byte, rm, blocks_n, M, N, TILED)
{% else %}
    codes, byte = {{cast}}.quantize_columnwise(x, {{how}})
    scale_bytes.store_columnwise(SCALE, byte, blocks_m, rn, end_m, N, TILED)
{% endif %}
"""
    + _STORE
)

# Both tensors are loaded before any store, so that the inputs of both producers are read once.
_SOURCE_OF_TWO = (
    _IMPORTS
    + r"""
{{def_kernel("X", "Y", "ROW_SCALE", "COLUMN", "COLUMN_SCALE",
             "Y_ROW", "Y_ROW_SCALE", "Y_COLUMN", "Y_COLUMN_SCALE")}}
"""
    + _TILE_INDICES
    + load("X")
    + load("Y")
    + _BOTH
    + _STORE
    + _BOTH.replace("COLUMN", "Y_COLUMN").replace("ROW_SCALE", "Y_ROW_SCALE").replace("(x,", "(y,")
    + r"""
    tl.store(Y_ROW + idx_m.to(INDEX) * N + idx_n, tiles.as_elem(codes, ELEM), mask=mask)
"""
)


@SymbolicGridFn
def _grid(m: Any, n: Any, meta: dict[str, Any], *, cdiv: Any) -> tuple[Any, Any, int]:
    padding = meta["PADDING"]
    if meta["ENTRY"]:
        m = cdiv(m, meta["ENTRY"]) * (cdiv(meta["ENTRY"], BLOCK) * BLOCK)
    return cdiv(cdiv(m, padding) * padding, meta["BLOCK_M"]), cdiv(n, meta["BLOCK_N"]), 1


TEMPLATE = ProducingTemplate(name="mx_cast", grid=_grid, source=_SOURCE)
TEMPLATE_OF_TWO = ProducingTemplate(name="mx_cast_two", grid=_grid, source=_SOURCE_OF_TWO)

Results = tuple[ir.TensorBox, ...]

_VIEW = lowerings[torch.ops.aten.view.default]


def lower_cast(cast: CastCall) -> Results | None:
    """Returns qdata and scale bytes of each copy, of x, then of y; None for casts it does not take."""
    x, copies, y = cast.x, cast.copies, cast.y
    layout = {(-1,): "rowwise", (-2,): "columnwise", (-1, -2): "both"}.get(tuple(copy.dim for copy in copies))
    target = _target(x, layout)
    codes = all(copy.is_mx and copy.dtype is None and not copy.is_square for copy in copies)
    uniform = len({(copy.format, copy.layout) for copy in copies}) == 1
    matrix = y is None or len(x.get_size()) == 2
    if layout is None or target is None or not (codes and uniform and matrix):
        return None
    *batch, m, n = x.get_size()
    entry = int(m) if layout != "rowwise" and _short_blocks(x) else 0
    flat = _VIEW(x, [sympy_product(batch) * m, n]) if batch else x
    results = _cast([flat] if y is None else [flat, y], layout, copies, target, entry)
    if not batch:
        return results
    sizes = [size for copy in copies for size in ([m, n], _scale_size(m, n, copy))]
    return tuple(_VIEW(result, [*batch, *size]) for result, size in zip(results, sizes, strict=True))


def _target(x: ir.TensorBox, layout: str | None) -> Target | None:
    """Returns the chip that runs the cast of `x`, or None if the template does not support the cast."""
    if len(x.get_size()) < 2 or x.get_device_or_error().type != "cuda":
        return None
    target = of_device(x.get_device_or_error())
    if isinstance(target.tiles.quantize, Unsupported):
        return None
    is_equal = V.graph.sizevars.statically_known_equals
    empty = any(is_equal(size, 0) for size in x.get_size())
    unknown = layout != "rowwise" and _short_blocks(x) and not x.get_size()[-2].is_number
    return None if empty or configs.single(x.get_size()) or unknown else target


def _short_blocks(x: ir.TensorBox) -> bool:
    """Whether blocks along the columns of a batch, stacked as one matrix, would cross its entries."""
    return len(x.get_size()) > 2 and not V.graph.sizevars.statically_known_multiple_of(
        x.get_size()[-2], BLOCK
    )


def _cast(
    sources: Sequence[ir.TensorBox], layout: str, copies: Sequence[Copy], target: Target, entry: int
) -> Results:
    """Returns casts of one or two matrices, or of a batch with `entry` rows in each entry."""
    sources = [realize_inputs(source) for source in sources]
    x, copy = sources[0], copies[0]
    device, (m, n), elem_dtype = x.get_device_or_error(), x.get_size(), copy.elem.dtype
    specs = [
        spec
        for copy in copies
        for spec in (([m, n], elem_dtype), (_scale_size(m, n, copy, entry), torch.uint8))
    ]
    others = [empty(x, shape, dtype) for shape, dtype in (specs * len(sources))[1:]]
    inputs = [*sources, *(other.data for other in others)]
    fast = x.get_dtype() == torch.bfloat16 and packing.converts(target)
    roomy = fast and all(map(leaves_room, sources))
    tile = configs.cast(target, layout if len(sources) == 1 else "two", packed=roomy)
    gathered = not V.graph.sizevars.statically_known_multiple_of(n, configs.WORD)
    qdata = call.only(
        TEMPLATE if len(sources) == 1 else TEMPLATE_OF_TWO,
        inputs,
        ir.FixedLayout(device, elem_dtype, [m, n]),
        written=inputs[len(sources) :],
        num_stages=1,
        # rows of entries, and rows that are read byte by byte, take registers of their own
        num_warps=tile.num_warps * (2 if entry or gathered else 1),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        ROWWISE=layout != "columnwise",
        COLUMNWISE=layout != "rowwise",
        TILED=copy.is_tiled,
        ENTRY=entry,
        PADDING=TILE_ROWS if copy.is_tiled else 1,
        DTYPE=triton_type(x.get_dtype()),
        ELEM=repr(copy.elem.name),
        ROUNDING=repr(str(copy.rounding)),
        NATIVE=target.encodes_fp8,
        SATURATES=target.saturates_fp8,
        PACKED=fast,
        INDEX="tl.int64",
    )
    return (qdata, *others)


def _scale_size(m: Any, n: Any, copy: Copy, entry: int = 0) -> list[Any]:
    """Returns the shape of the scales of a matrix, or of a batch with `entry` rows in each entry."""
    rowwise = copy.dim == -1
    if copy.is_tiled:
        rows, length = (m, n) if rowwise else (n, m)
        return [tiled_size(rows, CeilDiv(length, BLOCK))]
    if rowwise:
        return [m, CeilDiv(n, BLOCK)]
    return [FloorDiv(m, entry) * CeilDiv(entry, BLOCK) if entry else CeilDiv(m, BLOCK), n]
