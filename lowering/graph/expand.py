"""expand: emulate the quantized GEMMs that the target has no kernel for, by the vendor's GEMM.

    matmul(qa, sa, qb, sb) → mm(dequantize(qa, sa), dequantize(qb, sb))       MXFP8
                             mm(elements(qa), elements(qb)) · sa · sb         scales that span the contraction
                             mm(decode(qa, sa), decode(qb, sb)) · tensors     other formats; two levels

The GEMM is BF16, or FP32 if the target multiplies BF16 slowly. Dequantized MXFP8 operands are exact in both,
extreme scales aside (see docs/numerics.md), so the result equals an MX GEMM's up to the order of
accumulation. Elements without scales are exact too; a BF16 product of them is rounded to BF16 before the FP32
scales multiply it. FP32 block scales multiply their operands, which are rounded to the dtype of the GEMM.
Elements times E4M3 scales are exact in BF16; tensor scales multiply the product, like FP32 scales. FP8 copies
that forward saves for backward stay FP8 (see `operands`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from mxcompile import ops
from mxcompile.formats import WHOLE, Format, ScaleType
from mxcompile.graph import dead
from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import aten, packet
from mxcompile.graph.tags import add_fallback, set_tag, tags_of, value_of
from mxcompile.lowering.graph import grouped_operands
from mxcompile.lowering.graph.lowering_pass import NO_REASONS, LoweringPass, Reasons
from mxcompile.lowering.graph.operands import DequantizedOperands
from mxcompile.lowering.targets import Target
from mxcompile.ops.view import Product


@dataclass(frozen=True, kw_only=True, slots=True)
class Expand(LoweringPass):
    """Emulates quantized GEMMs that have no kernel on the target, on all targets."""

    name: ClassVar[str] = "expand"

    def apply(self, graph: fx.Graph) -> Reasons:
        """Replaces the quantized GEMMs of `graph` without a kernel by aten GEMMs, which it names in tags."""
        expander = _Expander(graph, self.target)
        for node in list(graph.nodes):
            if packet(node) in ops.PRODUCTS and not any(tag.kernel for tag in tags_of(node)):
                expander.expand(node)
        dead.eliminate(graph)
        return NO_REASONS


def working_dtype(out: torch.dtype, target: Target) -> torch.dtype:
    """Returns the dtype that `target` dequantizes operands to, for a product with a result in `out`."""
    narrow = out is torch.bfloat16 and out not in target.slow_dtypes
    return torch.bfloat16 if narrow else torch.float32


class _Expander:
    """Emulates the GEMMs of one graph."""

    def __init__(self, graph: fx.Graph, target: Target) -> None:
        self._graph = graph
        self._target = target
        self._build = Builder(graph, Expand.name)
        self._operands = DequantizedOperands(self._build)

    def expand(self, node: fx.Node) -> None:
        """Replaces `node`, a product of quantized operands."""
        out, product = value_of(node), Product.read(node)
        dtype = working_dtype(out.dtype, self._target)
        (qa, sa), (qb, sb) = product.sides
        formats = product.words
        after = not product.is_grouped and all(map(_spans_contraction, formats))
        with self._graph.inserting_before(node):
            if after:
                a, sa = self._operands.elements(qa, sa, -1, formats[0], dtype, node)
                b, sb = self._operands.elements(qb, sb, -2, formats[1], dtype, node)
            else:
                a = self._operands.value(qa, sa, -1, dtype, node, formats[0])
                b = self._operands.value(qb, sb, -2, dtype, node, formats[1])
            factors = (sa, sb) if after else factors_of(product, self._build)
            if product.is_grouped:
                result = self._grouped(a, b, product.offs, dtype, node)
            else:
                result = self._product(a, b, None if factors else product.bias, dtype, node)
            how = "scaled after" if factors else "dequantized"
            kernel = f"{packet(result)} ({str(dtype).removeprefix('torch.')}, {how})"
            set_tag(result, *(replace(tag, kernel=tag.with_fallbacks(kernel)) for tag in tags_of(node)))
            if factors:
                result = scaled(result, factors, product.bias, self._build, node)
            result = self._build.converted(result, out.dtype, node)
        self._build.replace(node, result)

    def _grouped(
        self, a: fx.Node, b: fx.Node, offs: fx.Node | None, dtype: torch.dtype, node: fx.Node
    ) -> fx.Node:
        if dtype is not torch.bfloat16:
            return self._build.call(ops.grouped_mm, a, b, offs, like=node)
        if unmet := grouped_operands.unmet(a, b):
            add_fallback(node, unmet)
            return self._build.call(ops.grouped_mm, a, b, offs, like=node)
        sides = grouped_operands.in_order(a, b, self._build)
        return self._build.call(aten._grouped_mm.default, *sides, offs, like=node)

    def _product(
        self, a: fx.Node, b: fx.Node, bias: fx.Node | None, dtype: torch.dtype, node: fx.Node
    ) -> fx.Node:
        batched = value_of(a).ndim > 2
        if bias is None:
            return self._build.call(aten.bmm.default if batched else aten.mm.default, a, b, like=node)
        target = aten.baddbmm.default if batched else aten.addmm.default
        return self._build.call(target, self._build.converted(bias, dtype, node), a, b, like=node)


def factors_of(product: Product, build: Builder) -> Sequence[fx.Node]:
    """Returns the product of the tensor scales of `product`, as a list; [] without tensor scales."""
    tensors = product.tensors or ()
    return tensors if len(tensors) < 2 else [build.call(aten.mul.Tensor, *tensors, like=product.node)]


def scaled(
    product: fx.Node, factors: Sequence[fx.Node], bias: fx.Node | None, build: Builder, like: fx.Node
) -> fx.Node:
    """Returns `product` times `factors` (scales of rows, columns or tensors) plus `bias`, in FP32."""
    result = build.converted(product, torch.float32, like)
    for factor in factors:
        result = build.call(aten.mul.Tensor, result, factor, like=like)
    if bias is not None:
        result = build.call(aten.add.Tensor, result, build.converted(bias, torch.float32, like), like=like)
    return result


def _spans_contraction(fmt: str) -> bool:
    """Whether the format `fmt` has FP32 scales that are constant along the contraction dimension."""
    form = Format.parse(fmt)
    return form.scale is ScaleType.FP32 and form.tile.along == WHOLE
