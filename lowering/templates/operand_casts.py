"""Inductor template of the casts of emulated products: one read of a matrix, and all its copies.

    x[m, n]  →  along rows and along columns: values, or codes and scale bytes, or nothing
                values of squares, which are the same in both directions
    x        ←  prologue                                                          as in `casts`

The kernel can also cast a second matrix whose producer reads the same tensors.

    values   =  element · 2^(byte − 127), rounded once to the dtype of the BF16 or FP32 product

Values never become FP8: arithmetic rounds them (`tiles.rounded`), with two in a register if the chip supports
it (`packed`). Chips without an MX GEMM use this template. ``graph.merge_casts`` merges casts;
`inductor.copies` lowers casts that the template does not take.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import lowerings
from torch._inductor.select_algorithm import realize_inputs
from torch._inductor.utils import sympy_product, triton_type
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import CeilDiv

from mxcompile.formats import BLOCK, Copy
from mxcompile.lowering.choices import configs, packing
from mxcompile.lowering.inductor import elements
from mxcompile.lowering.inductor.copies import CastCall
from mxcompile.lowering.targets import Target, of_device
from mxcompile.lowering.templates import call
from mxcompile.lowering.templates.matrix import MASKS, TILE_INDICES, empty, grid, load
from mxcompile.lowering.templates.producers import ProducingTemplate, leaves_room

_SOURCES = ("X", "Y")

_SIDE = r"""
{% if <SIDE> == "'codes'" %}
    codes, byte = {{"packed" if PACKED else "tiles"}}.quantize_<side>(<x>, ELEM, ROUNDING, {{how}})
    scale_bytes.store_<side>(<X>_<SIDE>_SCALE, byte, <where>, M, N, False)
    result = tiles.as_elem(codes, ELEM) if STORES_FP8 else codes
{% elif <SIDE> == "'values'" %}
    result = {{"packed" if PACKED else "tiles"}}.round_<side>(<x>, ELEM, ROUNDING).to(VALUE)
{% elif <SIDE> == "'squares'" %}
    result = tiles.round_square(<x>, ELEM, ROUNDING).to(VALUE)
{% endif %}
{% if FIRST == "'<X>_<SIDE>'" %}
    {{store_output(("idx_m", "idx_n"), "result", "mask", val_shape=("BLOCK_M", "BLOCK_N"))}}
{% elif <SIDE> != "'none'" %}
    tl.store(<X>_<SIDE> + place, result, mask=mask)
{% endif %}
"""

_WHERE = {"ROWS": ("rowwise", "rm, blocks_n"), "COLUMNS": ("columnwise", "blocks_m, rn")}


def _sides(source: str) -> Iterator[str]:
    for side, (name, where) in _WHERE.items():
        text = _SIDE.replace("<SIDE>", side).replace("<side>", name).replace("<where>", where)
        yield text.replace("<X>", source).replace("<x>", source.lower())


# Both tensors are loaded before any store, so that the inputs of both producers are read once.
_SOURCE = "".join(
    (
        "from mxcompile.lowering.kernels import packed, scale_bytes, tiles\n\n",
        '{% set how = "NATIVE" if PACKED else "NATIVE, SATURATES" %}',
        "{{def_kernel(*NAMES)}}",
        TILE_INDICES,
        MASKS,
        "    place = idx_m.to(INDEX) * N + idx_n\n",
        load("X"),
        "{% if TWO %}",
        load("Y"),
        "{% endif %}",
        *_sides("X"),
        "{% if TWO %}",
        *_sides("Y"),
        "{% endif %}",
    )
)


TEMPLATE = ProducingTemplate(name="mx_cast_operands", grid=grid, source=_SOURCE)

_VIEW = lowerings[torch.ops.aten.view.default]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Result:
    """A tensor that the kernel writes. codes: whether it holds FP8."""

    name: str
    shape: list[Any]
    dtype: torch.dtype
    codes: bool = False


def lower_cast(cast: CastCall) -> list[ir.TensorBox] | None:
    """Returns qdata and scales, or values, of each copy, of x, then of y; None for casts it does not take."""
    x, copies, y = cast.x, cast.copies, cast.y
    target, sizes = of_device(x.get_device_or_error()), x.get_size()
    if not target.emulates or not _are_uniform(copies) or not all(_is_for(sizes, copy) for copy in copies):
        return None
    *batch, m, _ = sizes
    forms = {"ROWS": "none", "COLUMNS": "none"}
    for copy in copies:
        forms[_side(copy)] = "squares" if copy.is_square else "codes" if copy.dtype is None else "values"
    sources = [_flat(source) for source in (x, y) if source is not None]
    wanted = _results(sources[0].get_size(), len(sources), copies, target)
    elem, dtype = copies[0].elem, next((copy.dtype for copy in copies if copy.dtype), torch.bfloat16)
    narrow = x.get_dtype() is dtype is torch.bfloat16
    is_packed = narrow and not copies[0].is_square and packing.calculates(target)
    settings = {
        "PACKED": is_packed,
        **{side: repr(form) for side, form in forms.items()},
        "ELEM": repr(elem.name),
        "ROUNDING": repr(str(copies[0].rounding)),
        "VALUE": triton_type(dtype),
        "NATIVE": packing.converts(target) if is_packed else target.encodes_fp8,
        "SATURATES": target.saturates_fp8,
        "STORES_FP8": target.stores_fp8,
    }
    results: list[ir.TensorBox] = []
    for result, tensor in zip(wanted, _call(sources, wanted, target, settings), strict=True):
        if result.codes:
            tensor = elements.as_fp8(tensor, elem, target)
        shape = [m if result.shape[0] is wanted[0].shape[0] else CeilDiv(m, BLOCK), result.shape[1]]
        results.append(_VIEW(tensor, [*batch, *shape]) if batch else tensor)
    return results


def _are_uniform(copies: Sequence[Copy]) -> bool:
    """Whether `copies` have one format, one dtype of values, and different sides."""
    dtypes, sides = {copy.dtype for copy in copies} - {None}, set(map(_side, copies))
    return len({copy.format for copy in copies}) == 1 and len(dtypes) <= 1 and len(sides) == len(copies)


def _is_for(sizes: Sequence[Any], copy: Copy) -> bool:
    """Whether the template makes `copy` of a tensor of `sizes`."""
    if not copy.is_mx or (copy.dtype is None and (copy.is_square or copy.is_tiled)):
        return False
    return len(sizes) > 1 and configs.is_one_matrix(sizes, -2 if copy.is_square else copy.dim)


def _side(copy: Copy) -> str:
    """Returns the direction of the blocks of `copy`, as the template names it; "ROWS" for squares."""
    return "COLUMNS" if copy.dim == -2 and not copy.is_square else "ROWS"


def _flat(x: ir.TensorBox) -> ir.TensorBox:
    """Returns the matrices of a batch stacked along rows."""
    *batch, m, n = x.get_size()
    flat: ir.TensorBox = _VIEW(x, [sympy_product(batch) * m, n]) if batch else x
    return flat


def _results(size: Sequence[Any], sources: int, copies: Sequence[Copy], target: Target) -> list[_Result]:
    """Returns the results; the first has the size of the matrix."""
    m, n = size
    scales = {"ROWS": [m, CeilDiv(n, BLOCK)], "COLUMNS": [CeilDiv(m, BLOCK), n]}
    results = []
    for source in _SOURCES[:sources]:
        for copy in copies:
            side = _side(copy)
            name, codes = f"{source}_{side}", copy.dtype is None
            stored = copy.elem.dtype if target.stores_fp8 else torch.uint8
            results.append(_Result(name=name, shape=[m, n], dtype=copy.dtype or stored, codes=codes))
            if codes:
                results.append(_Result(name=f"{name}_SCALE", shape=scales[side], dtype=torch.uint8))
    return results


def _call(
    sources: list[ir.TensorBox], wanted: list[_Result], target: Target, settings: dict[str, Any]
) -> list[ir.TensorBox]:
    """Returns the results of the template, in order; the first is its output."""
    sources = [realize_inputs(source) for source in sources]
    first, *rest = wanted
    device = sources[0].get_device_or_error()
    others = [empty(sources[0], result.shape, result.dtype) for result in rest]
    inputs = [*sources, *(other.data for other in others)]
    gathered = not V.graph.sizevars.statically_known_multiple_of(first.shape[1], configs.WORD)
    roomy = settings["PACKED"] and all(map(leaves_room, sources))
    tile = configs.operand_cast(target, len(sources), packed=roomy, gathered=gathered)
    first_result = call.only(
        TEMPLATE,
        inputs,
        ir.FixedLayout(device, first.dtype, first.shape),
        written=inputs[len(sources) :],
        num_stages=1,
        num_warps=tile.num_warps,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        NAMES=[*_SOURCES[: len(sources)], *(result.name for result in rest)],
        FIRST=repr(first.name),
        TWO=len(sources) > 1,
        DTYPE=triton_type(sources[0].get_dtype()),
        INDEX="tl.int64",
        **settings,
    )
    return [first_result, *others]
