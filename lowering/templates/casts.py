"""Inductor template of MXFP8 casts: one read of a matrix, and all its copies.

    x[m, n]  →  along rows and along columns: codes and scale bytes, or values, or nothing
                values of squares, which are the same in both directions
    x        ←  prologue                                  the producer, computed in place of a load of x, and
                                                          rounded to the dtype in which x would be stored

    values   =  element · 2^(byte − 127), rounded once to the dtype of the BF16 or FP32 product

Values are for chips without an MX GEMM. They never become FP8: arithmetic rounds them (`tiles.rounded`), with
two in a register if the chip supports it (`packed`). The kernel can also cast a second matrix whose producer
reads the same tensors.

A template has one output; the other results are buffers that it writes. A tile has whole blocks of 32, masked
past the ends of the matrix, so that no two programs share a block. Scales are row-major or tiled; if tiled,
the grid covers the padding of rows and columns too.

The matrices of a batch are stacked along rows. If blocks run along columns, and ENTRY, the number of rows of
a matrix, is not a multiple of 32, the grid covers the batch with each matrix padded to whole blocks.

``graph.merge_casts`` merges casts. `inductor.copies` calls `lower_cast`, and lowers casts that no template
takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import view
from torch._inductor.select_algorithm import SymbolicGridFn, realize_inputs
from torch._inductor.utils import sympy_product, triton_type
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import CeilDiv, FloorDiv

from mxcompile.formats import BLOCK, Copy
from mxcompile.formats.scale_tiles import TILE_ROWS
from mxcompile.lowering.chips.tiles import Unsupported
from mxcompile.lowering.choices import configs, packing
from mxcompile.lowering.inductor import elements
from mxcompile.lowering.inductor.copies import CastCall
from mxcompile.lowering.inductor.tiling import tiled_size
from mxcompile.lowering.targets import Target, of_device
from mxcompile.lowering.templates import call
from mxcompile.lowering.templates.producers import TILE_INDICES, ProducingTemplate, leaves_room

_SOURCES = ("X", "Y")

# Scales are stored after their codes, so that codes of both directions are seldom in registers at once.
_COPY = r"""
{% set how = "NATIVE" if PACKED else "NATIVE, SATURATES" %}
{% set cast = "packed" if PACKED else "tiles" %}
{% if <SIDE> == "'codes'" %}
    codes, byte = {{cast}}.quantize_<side>(<x>, ELEM, ROUNDING, {{how}})
    result = tiles.as_elem(codes, ELEM) if STORES_FP8 else codes
{% elif <SIDE> == "'values'" %}
    result = {{cast}}.round_<side>(<x>, ELEM, ROUNDING).to(VALUE)
{% elif <SIDE> == "'squares'" %}
    result = tiles.round_square(<x>, ELEM, ROUNDING).to(VALUE)
{% endif %}
{% if FIRST == "'<X>_<SIDE>'" %}
    {{store_output(("idx_m", "idx_n"), "result", "mask", val_shape=("BLOCK_M", "BLOCK_N"))}}
{% elif <SIDE> != "'none'" %}
    tl.store(<X>_<SIDE> + idx_m.to(INDEX) * N + idx_n, result, mask=mask)
{% endif %}
{% if <SIDE> == "'codes'" %}
    scale_bytes.store_<side>(<X>_<SIDE>_SCALE, byte, <where>, TILED)
{% endif %}
"""

_SIDES = {"ROWS": ("rowwise", "rm, blocks_n, M, N"), "COLUMNS": ("columnwise", "blocks_m, rn, end_m, N")}


def _load(source: str) -> str:
    """Returns code that loads or computes the tile of the input `source` into its lower-case variable."""
    return r"""
    {{load_input("<X>", "<x>", ("idx_m", "idx_n"), mask="mask", indent_width=4,
                 index_shape=("BLOCK_M", "BLOCK_N"))}}
    <x> = <x>.to(DTYPE)
""".replace("<X>", source).replace("<x>", source.lower())


def _copies(source: str) -> str:
    """Returns code that makes and stores the copies of the input `source`."""
    texts = []
    for side, (name, where) in _SIDES.items():
        text = _COPY.replace("<SIDE>", side).replace("<side>", name).replace("<where>", where)
        texts.append(text.replace("<X>", source).replace("<x>", source.lower()))
    return "".join(texts)


# Both tensors are loaded before any store, so that the inputs of both producers are read once.
_SOURCE = "".join(
    (
        "from mxcompile.lowering.kernels import packed, scale_bytes, tiles\n\n",
        "{{def_kernel(*NAMES)}}",
        TILE_INDICES,
        r"""{% if ENTRY %}
    padded = (ENTRY + 31) // 32 * 32
    end_m = M // ENTRY * padded
    rm = tl.where(rm % padded < ENTRY, rm // padded * ENTRY + rm % padded, M)
{% else %}
    end_m = M
{% endif %}
    idx_m = rm[:, None].to(INDEX_DTYPE)
    idx_n = rn[None, :].to(INDEX_DTYPE)
    mask_m = idx_m < M
    mask_n = idx_n < N
    mask = mask_m & mask_n
    blocks_m = pid_m * (BLOCK_M // 32) + tl.arange(0, BLOCK_M // 32)
    blocks_n = pid_n * (BLOCK_N // 32) + tl.arange(0, BLOCK_N // 32)
""",
        _load("X"),
        "{% if TWO %}",
        _load("Y"),
        "{% endif %}",
        _copies("X"),
        "{% if TWO %}",
        _copies("Y"),
        "{% endif %}",
    )
)


@SymbolicGridFn
def _grid(m: Any, n: Any, meta: dict[str, Any], *, cdiv: Any) -> tuple[Any, Any, int]:
    padding = meta["PADDING"]
    if meta["ENTRY"]:
        m = cdiv(m, meta["ENTRY"]) * (cdiv(meta["ENTRY"], BLOCK) * BLOCK)
    m, n = (cdiv(size, padding) * padding for size in (m, n))
    return cdiv(m, meta["BLOCK_M"]), cdiv(n, meta["BLOCK_N"]), 1


TEMPLATE = ProducingTemplate(name="mx_cast", grid=_grid, source=_SOURCE)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Result:
    """A tensor that the kernel writes.

    shape: its shape for a batch stacked as one matrix. matrix_shape: its shape for one matrix of the batch.
    codes: whether it holds FP8.
    """

    name: str
    shape: list[Any]
    matrix_shape: list[Any]
    dtype: torch.dtype
    codes: bool = False


def lower_cast(cast: CastCall) -> list[ir.TensorBox] | None:
    """Returns qdata and scales, or values, of each copy, of x, then of y; None for casts it does not take."""
    x, copies = cast.x, cast.copies
    target, sources = of_device(x.get_device_or_error()), [x] if cast.y is None else [x, cast.y]
    if not _takes(target, x, copies):
        return None
    *batch, m, n = x.get_size()
    entry = int(m) if _short_blocks(x, copies) else 0
    flat = [view(source, [sympy_product(batch) * m, n]) if batch else source for source in sources]
    wanted = [
        result
        for source in _SOURCES[: len(sources)]
        for copy in copies
        for result in _results(source, copy, flat[0].get_size(), (m, n), entry, target)
    ]
    results: list[ir.TensorBox] = []
    for result, tensor in zip(wanted, _call(flat, copies, wanted, entry, target), strict=True):
        if result.codes:
            tensor = elements.as_fp8(tensor, copies[0].elem, target)
        results.append(view(tensor, [*batch, *result.matrix_shape]) if batch else tensor)
    return results


def _takes(target: Target, x: ir.TensorBox, copies: Sequence[Copy]) -> bool:
    """Whether the template makes `copies` of `x` on `target`: one format, and at most one copy a side."""
    sizes, short = x.get_size(), _short_blocks(x, copies)
    dtypes, sides = {copy.dtype for copy in copies} - {None}, set(map(_side, copies))
    uniform = len({(copy.format, copy.is_tiled) for copy in copies}) == 1 and len(dtypes) <= 1
    if not uniform or len(sides) < len(copies) or not all(copy.is_mx for copy in copies):
        return False
    if len(sizes) < 2 or not {copy.dim for copy in copies} <= {-1, -2}:
        return False
    if not configs.is_one_matrix(sizes, -1):  # it has no elements, or a single one
        return False
    if target.emulates:
        coded = [copy for copy in copies if copy.dtype is None]
        return not short and not any(copy.is_square or copy.is_tiled for copy in coded)
    if isinstance(target.tiles.quantize, Unsupported) or dtypes or copies[0].is_square:
        return False
    return not short or bool(sizes[-2].is_number)


def _side(copy: Copy) -> str:
    """Returns the direction of the blocks of `copy`, as the template names it; "ROWS" for squares."""
    return "COLUMNS" if copy.dim == -2 and not copy.is_square else "ROWS"


def _short_blocks(x: ir.TensorBox, copies: Sequence[Copy]) -> bool:
    """Whether blocks along the columns of a batch, stacked as one matrix, would cross its entries."""
    size, columns = x.get_size(), any(copy.is_square or copy.dim == -2 for copy in copies)
    return columns and len(size) > 2 and not V.graph.sizevars.statically_known_multiple_of(size[-2], BLOCK)


def _results(
    source: str, copy: Copy, size: Sequence[Any], matrix: Sequence[Any], entry: int, target: Target
) -> Iterator[_Result]:
    """Yields the results of `copy`. size: size of the stacked matrix. matrix: size of one in the batch."""
    name, codes = f"{source}_{_side(copy)}", copy.dtype is None
    (m, n), (rows, columns) = size, matrix
    stored = copy.elem.dtype if target.stores_fp8 else torch.uint8
    yield _Result(
        name=name, shape=[m, n], matrix_shape=[rows, columns], dtype=copy.dtype or stored, codes=codes
    )
    if codes:
        shape, of_matrix = _scale_size(m, n, copy, entry), _scale_size(rows, columns, copy)
        yield _Result(name=f"{name}_SCALE", shape=shape, matrix_shape=of_matrix, dtype=torch.uint8)


def _scale_size(m: Any, n: Any, copy: Copy, entry: int = 0) -> list[Any]:
    """Returns the shape of the scales of a matrix, or of a batch with `entry` rows in each entry."""
    rowwise = copy.dim == -1
    if copy.is_tiled:
        rows, length = (m, n) if rowwise else (n, m)
        return [tiled_size(rows, CeilDiv(length, BLOCK))]
    if rowwise:
        return [m, CeilDiv(n, BLOCK)]
    return [FloorDiv(m, entry) * CeilDiv(entry, BLOCK) if entry else CeilDiv(m, BLOCK), n]


def _call(
    sources: list[ir.TensorBox], copies: Sequence[Copy], wanted: list[_Result], entry: int, target: Target
) -> list[ir.TensorBox]:
    """Returns the results of the template in the order of `wanted`. entry: value of ENTRY, or 0."""
    sources = [realize_inputs(source) for source in sources]
    x, copy, (first, *rest) = sources[0], copies[0], wanted
    forms = {"ROWS": "none", "COLUMNS": "none"} | {
        _side(copy): "squares" if copy.is_square else "codes" if copy.dtype is None else "values"
        for copy in copies
    }
    dtype = next((copy.dtype for copy in copies if copy.dtype), torch.bfloat16)
    packs = packing.calculates(target) if target.emulates else packing.converts(target)
    packed = packs and x.get_dtype() is dtype is torch.bfloat16 and not copy.is_square
    (m, n), divides = first.shape, V.graph.sizevars.statically_known_multiple_of
    tile = configs.cast(
        target,
        forms,
        len(sources),
        packed=packed and all(map(leaves_room, sources)),
        scattered=entry > 0 or not divides(n, configs.WORD),
        masked=not (divides(m, BLOCK) and divides(n, TILE_ROWS)),
    )
    return call.only(
        TEMPLATE,
        sources,
        [(result.shape, result.dtype) for result in wanted],
        num_stages=1,
        num_warps=tile.num_warps,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        NAMES=[*_SOURCES[: len(sources)], *(result.name for result in rest)],
        FIRST=repr(first.name),
        TWO=len(sources) > 1,
        **{side: repr(form) for side, form in forms.items()},
        TILED=copy.is_tiled,
        ENTRY=entry,
        PADDING=TILE_ROWS if copy.is_tiled else 1,
        DTYPE=triton_type(x.get_dtype()),
        ELEM=repr(copy.elem.name),
        ROUNDING=repr(str(copy.rounding)),
        VALUE=triton_type(dtype),
        NATIVE=packing.converts(target) if packed else target.encodes_fp8,
        SATURATES=target.saturates_fp8,
        STORES_FP8=target.stores_fp8,
        PACKED=packed,
        INDEX="tl.int64",
    )
