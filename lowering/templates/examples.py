"""Operands on which the products of groups are timed: as real ones are.

Inductor fills integers with zeros. Then every group ends where it begins, no tile does anything, and what is
timed is nothing; scale bytes of 0 make products of zeros. Here groups are uneven, as routers make them, and
end where the operand does; codes fill the range of their format, and scales lie within 2⁻¹² and 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import preserve_rng_state
from torch._inductor import ir
from torch._inductor.select_algorithm import AlgorithmSelectorCache
from torch._inductor.virtualized import V

Make = Callable[[ir.Buffer], Tensor]


def grouped(operands: Sequence[Any], length: Any) -> dict[int, Make]:
    """What makes each operand's example, by its position.

    operands: a, its scale, b, its scale, ends of the groups. length: of the dimension that is grouped.
    """
    total = V.graph.sizevars.optimization_hint(length)
    *sides, ends = range(len(operands))
    return {**dict.fromkeys(sides, _side), ends: lambda node: _ends(node, total)}


def _side(node: ir.Buffer) -> Tensor:
    value: Tensor = AlgorithmSelectorCache.benchmark_example_value(node)
    with preserve_rng_state():
        if value.dtype == torch.uint8:
            return value.random_(115, 128)
        limit = torch.finfo(value.dtype).max
        codes = torch.randn(value.shape, device=value.device).mul_(limit / 4).clamp_(-limit, limit)
        return value.copy_(codes)


def _ends(node: ir.Buffer, total: int) -> Tensor:
    value: Tensor = AlgorithmSelectorCache.benchmark_example_value(node)
    with preserve_rng_state():
        sizes = torch.rand(value.shape, device=value.device) + 0.25
    ends = (sizes.cumsum(0) / sizes.sum() * total).round()
    ends[-1] = total
    return value.copy_(ends)
