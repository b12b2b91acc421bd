"""Inductor template of a watch's statistics of a cast to MXFP8, from one read of the tensor.

    x[m, n]  →  scale bytes, and a row of FP64 for each tile      ``lowering.kernels.statistics``
    rows     →  statistics                                        Inductor's reduction over the tiles
    x, bytes →  the kept part of the cast                         values at evenly spread places

Tiles do not cross matrices of a batch. The template takes E8M0 scales, BF16, FP16 and FP32 values, and fixed
sizes. Inductor compiles the operator's definition for other casts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor.lowering import reduce_amax, sum_, view
from torch._inductor.select_algorithm import SymbolicGridFn, TritonTemplate, realize_inputs
from torch._inductor.utils import sympy_product
from torch._inductor.virtualized import ops as inductor
from torch.utils._sympy.functions import CeilDiv, FloorDiv, ModularIndexing

from mxcompile.formats import BLOCK, Format, Rounding, Tile
from mxcompile.lowering.chips.tiles import TileConfig
from mxcompile.lowering.inductor import elements
from mxcompile.lowering.inductor.blocks import Index, as_float, elementwise
from mxcompile.lowering.inductor.scales import inverse_scale_value, scale_value
from mxcompile.lowering.targets import of_device
from mxcompile.lowering.templates import call
from mxcompile.ops.watch import FIELDS, LENGTH

_SOURCE = r"""
from mxcompile.lowering.kernels import statistics

{{def_kernel("X", "ROWS")}}
    M = {{size("X", 1)}}
    N = {{size("X", 2)}}
    pid_m = tl.program_id(0)
    pid_n = tl.program_id(1)
    pid_b = tl.program_id(2)
    tile = (pid_b * tl.num_programs(0) + pid_m) * tl.num_programs(1) + pid_n
    byte, real = statistics.measure(
        ROWS + tile.to(tl.int64) * LENGTH, X + pid_b.to(tl.int64) * {{stride("X", 0)}},
        pid_m * BLOCK_M, pid_n * BLOCK_N, M, N, {{stride("X", 1)}}, {{stride("X", 2)}},
        BLOCK_M, BLOCK_N, HEIGHT, WIDTH, ELEM, ROUNDING)
    idx_b = pid_b + tl.zeros((1, 1), tl.int32)
    idx_m = pid_m * (BLOCK_M // HEIGHT) + tl.arange(0, BLOCK_M // HEIGHT)[:, None]
    idx_n = pid_n * (BLOCK_N // WIDTH) + tl.arange(0, BLOCK_N // WIDTH)[None, :]
    {{store_output(("idx_b", "idx_m", "idx_n"), "byte", "real",
                   val_shape=("BLOCK_M // HEIGHT", "BLOCK_N // WIDTH"))}}
"""


@SymbolicGridFn
def _grid(number: Any, m: Any, n: Any, meta: dict[str, Any], *, cdiv: Any) -> tuple[Any, Any, Any]:
    height, width = meta["HEIGHT"], meta["WIDTH"]
    return cdiv(m * height, meta["BLOCK_M"]), cdiv(n * width, meta["BLOCK_N"]), number


TEMPLATE = TritonTemplate(name="mx_cast_statistics", grid=_grid, source=_SOURCE)


_TILE = TileConfig(block_m=32, block_n=256, num_warps=4)
_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})
_MOST_MATRICES = 65535  # limit of a grid's third dimension
_BIGGEST = FIELDS.index("amax"), FIELDS.index("smallest")  # rows have `smallest` negated: both are maxima


def lower_cast_statistics(
    x: ir.TensorBox, block_dim: int, form: Format, keep: int
) -> tuple[ir.TensorBox, ir.TensorBox | None] | None:
    """Returns statistics, FP64 [`LENGTH`], of a cast to MXFP8, and `keep` of its values (None if 0).

    Returns None if the template does not take this tensor.
    """
    shape = list(x.get_size())
    fixed = all(isinstance(size, int | sympy.Integer) and size > 0 for size in shape)
    if x.get_device_or_error().type != "cuda" or x.get_dtype() not in _DTYPES or not shape or not fixed:
        return None
    matrices = _matrices(shape, block_dim % len(shape), form.tile)
    if matrices[0] > _MOST_MATRICES:
        return None
    cast = _Cast(realize_inputs(view(x, matrices)), form, rowwise=block_dim % len(shape) == len(shape) - 1)
    numbers, byte = cast.measured()
    return numbers, cast.samples(byte, keep) if keep else None


def _matrices(shape: Sequence[Any], dim: int, tile: Tile) -> list[Any]:
    """Returns `shape` as [number, m, n], where `dim` is m or n."""
    last = len(shape) - 1
    if dim == last and tile == Tile.ROW:
        return [1, sympy_product(shape[:-1]), shape[-1]]
    first = min(dim, last - 1)
    return [sympy_product(shape[:first]), shape[first], sympy_product(shape[first + 1 :])]


class _Cast:
    """The cast of `x` [number, m, n]. rowwise: whether blocks lie along n; squares lie along both."""

    def __init__(self, x: ir.TensorBox, form: Format, *, rowwise: bool) -> None:
        assert form.rounding is not None
        self.x = x
        self.elem, self.rounding = form.elem, form.rounding
        is_square = form.tile == Tile.SQUARE
        self.height = BLOCK if is_square or not rowwise else 1
        self.width = BLOCK if is_square or rowwise else 1
        self.device = x.get_device_or_error()

    def measured(self) -> tuple[ir.TensorBox, ir.TensorBox]:
        """Returns the statistics, and the scale bytes [number, blocks down, blocks across]."""
        number, m, n = self.x.get_size()
        tiles = number * CeilDiv(m, _TILE.block_m) * CeilDiv(n, _TILE.block_n)
        blocks = [number, CeilDiv(m, self.height), CeilDiv(n, self.width)]
        byte, rows = call.only(
            TEMPLATE,
            [self.x],
            [(blocks, torch.uint8), ([tiles, LENGTH], torch.float64)],
            num_stages=1,
            num_warps=_TILE.num_warps,
            BLOCK_M=_TILE.block_m,
            BLOCK_N=_TILE.block_n,
            HEIGHT=self.height,
            WIDTH=self.width,
            LENGTH=LENGTH,
            ELEM=repr(self.elem.name),
            ROUNDING=repr(str(self.rounding)),
        )
        return _joined(rows), byte

    def samples(self, byte: ir.TensorBox, keep: int) -> ir.TensorBox:
        """Returns `keep` values of the cast, evenly spread."""
        x, byte_of = as_float(self.x), byte.make_loader()
        _, m, n = sizes = self.x.get_size()
        numel, target = sympy_product(sizes), of_device(self.device)

        def value(index: Index) -> Any:
            position = inductor.index_expr(index[0], torch.int64)
            position = inductor.mul(position, inductor.index_expr(numel, torch.int64))
            position = inductor.floordiv(position, inductor.constant(keep, torch.int64))
            at = inductor.indirect_indexing(position, numel, check=False)
            entry, row, column = FloorDiv(at, m * n), ModularIndexing(at, n, m), ModularIndexing(at, 1, n)
            scale = inductor.to_dtype(
                byte_of([entry, FloorDiv(row, self.height), FloorDiv(column, self.width)]), torch.int32
            )
            scaled = inductor.mul(x([entry, row, column]), inverse_scale_value(scale))
            if self.rounding in (Rounding.FLOOR, Rounding.EVEN):
                scaled = elements.clamped(scaled, self.elem.max)
            return inductor.mul(elements.rounded(scaled, self.elem, target), scale_value(scale))

        return elementwise(self.device, torch.float32, value, [sympy.Integer(keep)])


def _joined(rows: ir.TensorBox) -> ir.TensorBox:
    """Returns the statistics of all tiles, from a row for each tile."""
    largest, total = (reduced(rows, [0]).make_loader() for reduced in (reduce_amax, sum_))

    def joined(index: Index) -> Any:
        field = inductor.index_expr(index[0], torch.int32)
        amax, smallest = (inductor.eq(field, elements.i32(position)) for position in _BIGGEST)
        most = largest(index)
        value = inductor.where(amax, most, total(index))
        return inductor.where(smallest, inductor.neg(most), value)

    return elementwise(rows.get_device_or_error(), torch.float64, joined, [sympy.Integer(LENGTH)])
