"""Operands on which Inductor times products, with values as in training.

Inductor fills integers with zeros. With scale bytes of 0 all products are 0, for which matrix units draw less
power and run at higher clocks. If the ends of groups are 0 too, no tile has work. Here codes fill the range
of their format, scales lie within 2⁻¹² and 2⁻¹ (E4M3: 176 and 448), groups are uneven, as routers make them,
and end where the operand ends.

`winners.choose` uses them for choices that are timed alone. Choices with a fused epilogue are timed in a
generated module that makes its own arguments, which `ProductKernel` changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import preserve_rng_state
from torch._inductor import ir
from torch._inductor.select_algorithm import AlgorithmSelectorCache, TritonTemplateKernel
from torch._inductor.virtualized import V

from mxcompile.lowering.templates.coding import Coding

Make = Callable[[ir.Buffer], Tensor]

_LOWEST, _HIGHEST = 115, 126
"""Range of scale bytes, for E8M0 and E4M3."""


class ProductKernel(TritonTemplateKernel):
    """A kernel of a product, which Inductor times on scales other than 0."""

    def codegen_kernel_benchmark(self, *args: Any, **kwargs: Any) -> Any:
        """Returns Inductor's code that times the kernel, with random bytes as scales and packed codes."""
        call, end = "dtype=torch.uint8)", f".random_({_LOWEST}, {_HIGHEST + 1})"
        written = super().codegen_kernel_benchmark(*args, **kwargs)
        return written.map(lambda line: line + end if str(line).endswith(call) else line)


def dense(coding: Coding) -> dict[int, Make]:
    """Returns makers of the examples of a, its scale, b and its scale, by position."""
    sides: dict[int, Make] = dict.fromkeys(range(4), _side)
    return sides | (dict.fromkeys((0, 2), _packed) if coding.per_byte > 1 else {})


def stored() -> dict[int, Make]:
    """Returns functions that make examples of b and its scale, by position. Operand 0 is not cast yet."""
    return dict.fromkeys((1, 2), _side)


def grouped(operands: Sequence[Any], length: Any, coding: Coding) -> dict[int, Make]:
    """Returns the maker of each operand's example, by its position.

    operands: a, its scale, b, its scale, ends of the groups. length: size of the grouped dimension.
    """
    total = V.graph.sizevars.optimization_hint(length)
    return {**dense(coding), len(operands) - 1: lambda node: _ends(node, total)}


def _side(node: ir.Buffer) -> Tensor:
    value: Tensor = AlgorithmSelectorCache.benchmark_example_value(node)
    with preserve_rng_state():
        if value.dtype == torch.uint8:
            return value.random_(_LOWEST, _HIGHEST + 1)
        limit = torch.finfo(value.dtype).max
        codes = torch.randn(value.shape, device=value.device).mul_(limit / 4).clamp_(-limit, limit)
        return value.copy_(codes)


def _packed(node: ir.Buffer) -> Tensor:
    value: Tensor = AlgorithmSelectorCache.benchmark_example_value(node)
    with preserve_rng_state():
        return value.random_(0, 256)


def _ends(node: ir.Buffer, total: int) -> Tensor:
    value: Tensor = AlgorithmSelectorCache.benchmark_example_value(node)
    with preserve_rng_state():
        sizes = torch.rand(value.shape, device=value.device) + 0.25
    ends = (sizes.cumsum(0) / sizes.sum() * total).round()
    ends[-1] = total
    return value.copy_(ends)
