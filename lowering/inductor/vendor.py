"""Inductor's lowering of `aten._scaled_mm`, without its template for scales of blocks.

That template (`triton_main_loop_scaled_mm`, tried by autotuning where `triton.enable_persistent_tma_matmul`
is set) reads scales row-major and one for each step along K: of scales that lie as cuBLAS wants them, or with
steps of another length than a block, it makes wrong products. All other products are lowered as ever.
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
    """As Inductor does."""
    blocks = len(scale_a.get_size()) == 2 and scale_a.get_size()[1] != 1
    only_the_library = {"triton.enable_persistent_tma_matmul": False} if blocks else {}
    with config.patch(only_the_library):
        return _TUNED(a, b, scale_a, scale_b, *others, **named)
