"""Inductor's lowering of `aten._scaled_mm`, without Inductor's template for block scales.

That template (`triton_main_loop_scaled_mm`, an autotuning choice with `triton.enable_persistent_tma_matmul`)
reads row-major scales, one for each step along K. It computes wrong products for scales in cuBLAS's layout,
and for steps that are not one block long. The lowering of other products does not change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import config, ir
from torch._inductor.kernel import mm  # registers the lowering that is wrapped here
from torch._inductor.lowering import lowerings, register_lowering

_SCALED_MM = torch.ops.aten._scaled_mm.default
_TUNED = lowerings[_SCALED_MM]
assert mm is not None


@register_lowering(_SCALED_MM, type_promotion_kind=None)
def lower_scaled_mm(
    a: ir.TensorBox, b: ir.TensorBox, scale_a: ir.TensorBox, scale_b: ir.TensorBox, *others: Any, **named: Any
) -> Any:
    """Lowers the product as Inductor does. Products with block scales run the library's kernel only."""
    blocks = len(scale_a.get_size()) == 2 and scale_a.get_size()[1] != 1
    only_the_library = {"triton.enable_persistent_tma_matmul": False} if blocks else {}
    with config.patch(only_the_library):
        return _TUNED(a, b, scale_a, scale_b, *others, **named)
