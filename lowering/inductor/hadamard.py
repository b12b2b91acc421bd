"""Inductor lowering of the random Hadamard transform: each element from the 16 elements of its block.

    after stage b   y[j] = y[j with bit b 0] ± y[j with bit b 1]      − if bit b of j is 1

The operations have the order of `formats.hadamard`, so results are bit-identical.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor.lowering import register_lowering, view
from torch._inductor.virtualized import ops as inductor
from torch.utils._sympy.functions import FloorDiv

from mxcompile import ops
from mxcompile.formats.hadamard import STAGES, WIDTH
from mxcompile.lowering.inductor.blocks import Index, as_float, elementwise
from mxcompile.lowering.inductor.elements import f32, i32
from mxcompile.lowering.inductor.tiling import less


@register_lowering(ops.hadamard, type_promotion_kind=None)
def lower_hadamard(x: ir.TensorBox, dim: int, signs: int) -> ir.TensorBox:
    """Lowers the transform along `dim`, as a view of a tensor with blocks and positions as dimensions."""
    x.realize()
    shape, dtype, load = list(x.get_size()), x.get_dtype(), as_float(x)
    at = dim % len(shape)
    num_blocks = FloorDiv(shape[at] + (WIDTH - 1), WIDTH)

    def value(index: Index) -> Any:
        position = inductor.index_expr(index[at + 1], torch.int32)
        block = [*index[: at + 1], *index[at + 2 :]]

        def source(number: int) -> Any:
            element = [*block]
            element[at] = block[at] * WIDTH + number
            inside = less(element[at], shape[at])
            element_value = inductor.masked(inside, lambda: load(element), 0.0)
            # a product with −1, because Triton's negation of 0 is 0 and not −0
            return inductor.mul(element_value, f32(-1.0)) if signs >> number & 1 else element_value

        return inductor.to_dtype(inductor.mul(_butterfly(source, position), f32(0.25)), dtype)

    ranges = [*shape[:at], num_blocks, sympy.Integer(WIDTH), *shape[at + 1 :]]
    blocks = elementwise(x.get_device_or_error(), dtype, value, ranges)
    blocks.realize()
    result: ir.TensorBox = view(blocks, [*shape[:at], num_blocks * WIDTH, *shape[at + 1 :]])
    return result


def _butterfly(source: Callable[[int], Any], row: Any) -> Any:
    """Returns the sum of the 16 numbers of `source`, with signs from row `row` of H."""
    bits = [inductor.bitwise_and(inductor.bitwise_right_shift(row, i32(b)), i32(1)) for b in range(STAGES)]
    signs = [inductor.where(inductor.eq(bit, i32(0)), f32(1.0), f32(-1.0)) for bit in bits]

    def after(stages: int, number: int) -> Any:
        """Returns the value after `stages` stages; `number` has the index bits of the later stages."""
        if not stages:
            return source(number)
        low, high = after(stages - 1, number), after(stages - 1, number | 1 << (stages - 1))
        return inductor.add(low, inductor.mul(high, signs[stages - 1]))

    return after(STAGES, 0)
