"""Operands on which products are timed: as real ones are.

Inductor fills integers with zeros. Scale bytes of 0 then make products of zeros, which take less power than
real ones and let a chip run faster; every group ends where it begins, and what is timed is nothing. Here
groups are uneven, as routers make them, and end where the operand does; codes fill the range of their format,
and scales lie within 2⁻¹² and 1.
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


def scaled(operands: Sequence[Any]) -> dict[int, Make]:
    """What makes the examples of codes and of scale bytes, by their positions; Inductor makes the others."""
    return {at: _side for at, operand in enumerate(operands) if operand.get_dtype().itemsize == 1}


def grouped(operands: Sequence[Any], length: Any) -> dict[int, Make]:
    """What makes each operand's example, by its position.

    operands: a, its scale, b, its scale, ends of the groups. length: of the dimension that is grouped.
    """
    total = V.graph.sizevars.optimization_hint(length)
    return {**scaled(operands), len(operands) - 1: lambda node: _ends(node, total)}


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
