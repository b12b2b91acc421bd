"""weight_only: products of few rows with a weight that is stored in MXFP8, on chips without an MX GEMM.

    scaled_mm(qa, sa, w, sw)    → weight_only_mm(dequantize(qa, sa), w, sw)
    mm(x, dequantize(w, sw)ᵀ)   → weight_only_mm(x, w, sw)

Reading the weight is the time of such a product, so it is read as it is stored, in half the bytes of BF16,
and decoded in registers. An activation in MXFP8 is what its copy stands for, so that the result is that of
the MX GEMM up to the order of accumulation (see `operands`, `expand`); one that the policy leaves in BF16 is
read as it is. More rows are left to `expand`: dequantizing the weight once and the vendor's GEMM are faster
then; on CPUs if the weight is small, since large ones are better dequantized in parts (see `cpu`). So are
weights that only the graph casts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from mxcompile import ops
from mxcompile.formats import ELEM_TYPES
from mxcompile.graph import dead
from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import VIEWS, aten, packet
from mxcompile.graph.shapes import operands as operands_of
from mxcompile.graph.tags import hint, set_tag, tags_of, tensor, value_of
from mxcompile.graph.transpose import transpose, untransposed
from mxcompile.lowering import optional
from mxcompile.lowering.cpu import MOST_ROWS, kernel, parts_of
from mxcompile.lowering.graph.expand import working_dtype
from mxcompile.lowering.graph.lowering_pass import NO_REASONS, LoweringPass, Reasons
from mxcompile.lowering.graph.operands import DequantizedOperands, stored
from mxcompile.lowering.templates.weight_only_forms import forms, most_rows
from mxcompile.ops.view import Dequantize, Product

_Parts = tuple[fx.Node, fx.Node, bool]
"""Elements and scales of a weight as stored, and whether the product's right operand is their transpose."""

_ELEMENTS = frozenset(elem.dtype for elem in ELEM_TYPES.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightOnly(LoweringPass):
    """For CPUs, and GPUs without an MX GEMM."""

    name: ClassVar[str] = "weight_only"
    templates: ClassVar[tuple[str, ...]] = ("templates.weight_only",)

    @property
    def applies(self) -> bool:
        """Where a kernel that decodes weights is faster than what the target has."""
        return not self.target.native and (self._on_cpu or self.target.arch is not None)

    @property
    def obstacle(self) -> str:
        """Why no such kernel can be used."""
        return kernel.obstacle() if self._on_cpu else optional.obstacle(*self.templates)

    def candidates(self, graph: fx.Graph) -> Iterator[fx.Node]:
        """The products of `graph` that the kernel is for."""
        for node in list(graph.nodes):
            taken = self._takes if packet(node) is ops.scaled_mm.overloadpacket else self._takes_plain
            if taken(node):
                yield node

    def apply(self, graph: fx.Graph) -> Reasons:
        """Replace those products, and name their kernel in their tags."""
        build = Builder(graph, self.name)
        operands = DequantizedOperands(build)
        for node in self.candidates(graph):
            if packet(node) is ops.scaled_mm.overloadpacket:
                self._replace(node, build, operands)
            else:
                self._replace_plain(node, build)
        dead.eliminate(graph)
        return NO_REASONS

    def _takes(self, node: fx.Node) -> bool:
        product = Product.read(node)
        return self._fits(node, product.a, stored(product.b, product.scale_b))

    def _takes_plain(self, node: fx.Node) -> bool:
        """Whether `node` is a product, in the model's dtype, of a matrix and a stored weight."""
        if packet(node) not in (aten.mm, aten.addmm) or node.kwargs or not tags_of(node):
            return False
        x, (weight, swapped) = operands_of(node)[0], untransposed(operands_of(node)[1])
        out, dequantize = tensor(node), Dequantize.of(weight)
        if out is None or dequantize is None or dequantize.dtype is not out.dtype:
            return False
        along = -1 if swapped else -2
        qdata, scale, turned = _stored_parts(dequantize)
        return dequantize.block_dim in (along, along + 2) and self._fits(
            node, x, (qdata, scale, swapped != turned)
        )

    def _fits(self, node: fx.Node, x: fx.Node, parts: _Parts) -> bool:
        """Whether the kernel is for the product `node` of `x` and a weight of these parts."""
        qdata, scale, swapped = parts
        out, a = tensor(node), tensor(x)
        weight, scales = tensor(qdata), tensor(scale)
        if out is None or a is None or weight is None or scales is None or out.device.type != self.device:
            return False
        if not (a.ndim == weight.ndim == scales.ndim == 2 and weight.dtype in _ELEMENTS):
            return False
        if any(hint(size) == 0 for size in (*out.shape, a.shape[1])):
            return False
        if self._on_cpu and not (swapped and weight.is_contiguous() and scales.is_contiguous()):
            return False  # it is read as it lies in memory
        if not (_is_input(qdata) and _is_input(scale)):
            return False
        if self._on_cpu:
            return hint(out.shape[0]) <= MOST_ROWS or bool(
                parts_of(weight.shape, working_dtype(out.dtype, self.target))
            )
        return hint(out.shape[0]) <= most_rows(self.target, working_dtype(out.dtype, self.target))

    def _replace(self, node: fx.Node, build: Builder, operands: DequantizedOperands) -> None:
        out = tensor(node)
        assert out is not None
        product = Product.read(node)
        (qa, sa), (qb, sb) = product.sides
        with build.graph.inserting_before(node):
            x = operands.value(qa, sa, -1, working_dtype(out.dtype, self.target), node)
            self._emit(node, build, x, stored(qb, sb), product.bias)

    def _replace_plain(self, node: fx.Node, build: Builder) -> None:
        x, (source, swapped) = operands_of(node)[0], untransposed(operands_of(node)[1])
        weight, scale, turned = _stored_parts(Dequantize.read(source))
        bias = node.args[0] if packet(node) is aten.addmm else None
        with build.graph.inserting_before(node):
            x = self._widened(x, node, build)
            self._emit(node, build, x, (weight, scale, swapped != turned), bias)

    def _widened(self, x: fx.Node, node: fx.Node, build: Builder) -> fx.Node:
        """`x` in the dtype of the vendor's GEMM, if `node` has too many rows for the kernel of a CPU."""
        out, value = value_of(node), value_of(x)
        dtype = working_dtype(out.dtype, self.target)
        if not self._on_cpu or hint(out.shape[0]) <= MOST_ROWS or value.dtype is dtype:
            return x
        return build.call(torch.ops.prims.convert_element_type.default, x, dtype, like=node)

    @property
    def _on_cpu(self) -> bool:
        return self.target.device == "cpu"

    def _emit(self, node: fx.Node, build: Builder, x: fx.Node, parts: _Parts, bias: Any) -> None:
        """Put the product of `x` and a weight of these parts in the place of `node`."""
        out, given = tensor(node), tensor(x)
        assert out is not None
        assert given is not None
        weight, scale, swapped = parts
        if not swapped:
            weight, scale = (transpose(each, build) for each in (weight, scale))
        result = build.call(ops.weight_only_mm, x, weight, scale, bias, out.dtype, like=node)
        words = f"mx_weight_only_mm {self._form(hint(out.shape[0]), weight, given.dtype)}"
        set_tag(result, *(replace(tag, kernel=words) for tag in tags_of(node)))
        build.replace(node, result)

    def _form(self, rows: int, weight: fx.Node, dtype: torch.dtype) -> str:
        """How the kernel multiplies `rows` rows of `dtype`, in words."""
        value = tensor(weight)
        assert value is not None
        if self._on_cpu:
            parts = parts_of(value.shape, dtype)
            return "C++" if rows <= MOST_ROWS else f"dequantized in {len(parts)} parts, mm"
        n, k = map(hint, value.shape)
        choices = forms(rows, n, k, dtype, self.target)
        return choices[0].one_of(len(choices))


def _stored_parts(dequantize: Dequantize) -> _Parts:
    """Elements and scales that `dequantize` reads, before transposes, if any: then True."""
    (qdata, swapped), (scale, _) = untransposed(dequantize.qdata), untransposed(dequantize.scale)
    return qdata, scale, swapped


def _is_input(node: Any) -> bool:
    """Whether `node` is an input of the graph, or a view of one."""
    while isinstance(node, fx.Node) and packet(node) in VIEWS:
        node = node.args[0]
    return isinstance(node, fx.Node) and node.op in ("placeholder", "get_attr")
