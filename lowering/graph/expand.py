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
from dataclasses import replace

import torch
from torch import fx

from mxcompile import ops
from mxcompile.formats import WHOLE, ScaleType
from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import aten, packet
from mxcompile.graph.tags import add_fallback, set_tag, tags_of, value_of
from mxcompile.lowering.graph import grouped_operands
from mxcompile.lowering.graph.lowering_pass import LoweringPass
from mxcompile.lowering.graph.operands import DequantizedOperands
from mxcompile.lowering.targets import Target
from mxcompile.ops.view import Product


class Expand(LoweringPass):
    """Emulates quantized GEMMs that have no kernel on the target, on all targets."""

    def apply(self, graph: fx.Graph) -> None:
        """Replaces the quantized GEMMs of `graph` without a kernel by aten GEMMs, which it names in tags."""
        build = Builder(graph, self.name)
        operands = DequantizedOperands(build)
        for product in Product.calls(graph):
            if not any(tag.kernel for tag in tags_of(product.node)):
                _expand(product, build, operands, self.target)


def working_dtype(out: torch.dtype, target: Target) -> torch.dtype:
    """Returns the dtype that `target` dequantizes operands to, for a product with a result in `out`."""
    narrow = out is torch.bfloat16 and out not in target.slow_dtypes
    return torch.bfloat16 if narrow else torch.float32


def _expand(product: Product, build: Builder, operands: DequantizedOperands, target: Target) -> None:
    node, out = product.node, value_of(product.node)
    dtype = working_dtype(out.dtype, target)
    # FP32 scales that are constant along the contraction multiply the product
    after = not product.is_grouped and all(
        form.scale is ScaleType.FP32 and form.tile.along == WHOLE for form in product.forms
    )
    with build.graph.inserting_before(node):
        a, b = (
            operands.value(*side, dim, fmt, dtype, node, scaled=not after)
            for side, dim, fmt in zip(product.sides, (-1, -2), product.words, strict=True)
        )
        factors = (product.scale_a, product.scale_b) if after else factors_of(product, build)
        if product.is_grouped:
            result = _grouped(a, b, product, dtype, build)
        else:
            result = _plain(a, b, None if factors else product.bias, dtype, build, node)
        how = "scaled after" if factors else "dequantized"
        kernel = f"{packet(result)} ({str(dtype).removeprefix('torch.')}, {how})"
        set_tag(result, *(replace(tag, kernel=tag.with_fallbacks(kernel)) for tag in tags_of(node)))
        if factors:
            result = scaled(result, factors, product.bias, build, node)
        result = build.converted(result, out.dtype, node)
    build.replace(node, result)


def _grouped(a: fx.Node, b: fx.Node, product: Product, dtype: torch.dtype, build: Builder) -> fx.Node:
    node, offs = product.node, product.offs
    unmet = grouped_operands.unmet(a, b) if dtype is torch.bfloat16 else ""
    if unmet:
        add_fallback(node, unmet)
    if unmet or dtype is not torch.bfloat16:
        return build.call(ops.grouped_mm, a, b, offs, like=node)
    sides = grouped_operands.in_order(a, b, build)
    return build.call(aten._grouped_mm.default, *sides, offs, like=node)


def _plain(
    a: fx.Node, b: fx.Node, bias: fx.Node | None, dtype: torch.dtype, build: Builder, node: fx.Node
) -> fx.Node:
    batched = value_of(a).ndim > 2
    if bias is None:
        return build.call(aten.bmm.default if batched else aten.mm.default, a, b, like=node)
    target = aten.baddbmm.default if batched else aten.addmm.default
    return build.call(target, build.converted(bias, dtype, node), a, b, like=node)


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
