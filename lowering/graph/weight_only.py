"""weight_only: products of few rows with a weight that is stored quantized.

    matmul(qa, sa, w, sw)             → weight_only_mm(decode(qa, sa), w, sw)
    matmul(qa, sa, codes of p, sp)    → weight_only_mm(decode(qa, sa), p, sp)     (· tensors, in FP32)
    mm(x, decode(w, sw)ᵀ)             → weight_only_mm(x, w, sw)

Reading the weight is the time of such a product, so it is read as it is stored, in half the bytes of BF16 or
a quarter, and decoded in registers. A quantized activation is what its copy stands for, so that the result is
that of the quantized GEMM up to the order of accumulation (see `operands`, `expand`); one that the policy
leaves in BF16 is read as it is. On chips with an MX GEMM these are products that `native` did not name. More
rows are left to `expand`: dequantizing the weight once and the vendor's GEMM are faster then; on CPUs if the
weight is small, since large ones are better dequantized in parts (see `cpu`). So are weights that only the
graph casts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from mxcompile import ops
from mxcompile.formats import ELEM_TYPES, Format
from mxcompile.graph import dead
from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import VIEWS, aten, packet
from mxcompile.graph.shapes import operands as operands_of
from mxcompile.graph.tags import hint, set_tag, tags_of, tensor, value_of
from mxcompile.graph.transpose import transpose, untransposed
from mxcompile.lowering import optional
from mxcompile.lowering.cpu import MOST_ROWS, kernel, parts_of
from mxcompile.lowering.graph.expand import factors_of, scaled, working_dtype
from mxcompile.lowering.graph.lowering_pass import NO_REASONS, LoweringPass, Reasons
from mxcompile.lowering.graph.operands import DequantizedOperands, stored
from mxcompile.lowering.templates.weight_only_forms import forms, most_rows
from mxcompile.ops.cast import decoded_shape
from mxcompile.ops.view import Dequantize, Product, Unpack


@dataclass(frozen=True, kw_only=True, slots=True)
class _Weight:
    """A weight as it is stored.

    qdata, scale: elements and scales. swapped: whether the product's right operand is their transpose. form:
    their format. global_scale: as for ``mx.decode``.
    """

    qdata: fx.Node
    scale: fx.Node
    swapped: bool
    form: Format
    global_scale: fx.Node | None = None

    @property
    def shape(self) -> tuple[Any, ...]:
        """The shape of the values, where blocks run along the last dimension."""
        return tuple(decoded_shape(value_of(self.qdata), -1, self.form))


_ELEMENTS = frozenset(elem.dtype for elem in ELEM_TYPES.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightOnly(LoweringPass):
    """For CPUs and GPUs; on those with an MX GEMM for the products that it does not take."""

    name: ClassVar[str] = "weight_only"
    templates: ClassVar[tuple[str, ...]] = ("templates.weight_only",)

    @property
    def applies(self) -> bool:
        """Where there are kernels that decode weights."""
        return self._on_cpu or self.target.arch is not None

    @property
    def obstacle(self) -> str:
        """Why no such kernel can be used."""
        return kernel.obstacle() if self._on_cpu else optional.obstacle(*self.templates)

    def candidates(self, graph: fx.Graph) -> Iterator[fx.Node]:
        """The products of `graph` that the kernel is for."""
        for node in list(graph.nodes):
            taken = self._takes if node.target is ops.matmul else self._takes_plain
            if taken(node):
                yield node

    def apply(self, graph: fx.Graph) -> Reasons:
        """Replace those products, and name their kernel in their tags."""
        build = Builder(graph, self.name)
        operands = DequantizedOperands(build)
        for node in self.candidates(graph):
            if node.target is ops.matmul:
                self._replace(node, build, operands)
            else:
                self._replace_plain(node, build)
        dead.eliminate(graph)
        return NO_REASONS

    def _takes(self, node: fx.Node) -> bool:
        product = Product.read(node)
        if any(tag.kernel for tag in tags_of(node)):
            return False  # the chip's own product
        weight, out = _operand(product), tensor(node)
        if weight.form.packed == product.is_mx or out is None:
            return False
        if product.tensors and self._on_cpu and hint(out.shape[0]) > MOST_ROWS:
            return False  # the vendor's GEMM gives the dtype of its operands
        return self._fits(node, product.a, weight)

    def _takes_plain(self, node: fx.Node) -> bool:
        """Whether `node` is a product, in the model's dtype, of a matrix and a stored weight."""
        if packet(node) not in (aten.mm, aten.addmm) or node.kwargs or not tags_of(node):
            return False
        x, (weight, swapped) = operands_of(node)[0], untransposed(operands_of(node)[1])
        out, dequantize = tensor(node), Dequantize.of(weight)
        if out is None or dequantize is None or dequantize.dtype is not out.dtype:
            return False
        along = -1 if swapped else -2
        if dequantize.block_dim not in (along, along + 2):
            return False
        return self._fits(node, x, _dequantized(dequantize, swapped))

    def _fits(self, node: fx.Node, x: fx.Node, stored_weight: _Weight) -> bool:
        """Whether the kernel is for the product `node` of `x` and `stored_weight`."""
        qdata, scale, swapped = stored_weight.qdata, stored_weight.scale, stored_weight.swapped
        out, a = tensor(node), tensor(x)
        weight, scales = tensor(qdata), tensor(scale)
        if out is None or a is None or weight is None or scales is None or out.device.type != self.device:
            return False
        readable = weight.dtype in _ELEMENTS or stored_weight.form.packed
        if not (a.ndim == weight.ndim == scales.ndim == 2 and readable):
            return False
        if any(hint(size) == 0 for size in (*out.shape, a.shape[1])):
            return False
        if self._on_cpu and not (swapped and weight.is_contiguous() and scales.is_contiguous()):
            return False  # it is read as it lies in memory
        if not (_is_input(qdata) and _is_input(scale)):
            return False
        if self._on_cpu:
            return hint(out.shape[0]) <= MOST_ROWS or bool(
                parts_of(stored_weight.shape, working_dtype(out.dtype, self.target))
            )
        return hint(out.shape[0]) <= most_rows(self.target, working_dtype(out.dtype, self.target))

    def _replace(self, node: fx.Node, build: Builder, operands: DequantizedOperands) -> None:
        out = tensor(node)
        assert out is not None
        product = Product.read(node)
        dtype = working_dtype(out.dtype, self.target)
        with build.graph.inserting_before(node):
            x = operands.value(product.a, product.scale_a, -1, dtype, node, product.format_a)
            if not product.tensors:
                result = self._product(node, build, x, _operand(product), product.bias, out.dtype)
            else:
                result = self._product(node, build, x, _operand(product), None, torch.float32)
                result = scaled(result, factors_of(product, build), product.bias, build, node)
                result = build.converted(result, out.dtype, node)
        build.replace(node, result)

    def _replace_plain(self, node: fx.Node, build: Builder) -> None:
        x, (source, swapped) = operands_of(node)[0], untransposed(operands_of(node)[1])
        weight = _dequantized(Dequantize.read(source), swapped)
        bias = node.args[0] if packet(node) is aten.addmm else None
        with build.graph.inserting_before(node):
            x = self._widened(x, node, build)
            result = self._product(node, build, x, weight, bias, value_of(node).dtype)
        build.replace(node, result)

    def _widened(self, x: fx.Node, node: fx.Node, build: Builder) -> fx.Node:
        """`x` in the dtype of the vendor's GEMM, if `node` has too many rows for the kernel of a CPU."""
        out = value_of(node)
        if not self._on_cpu or hint(out.shape[0]) <= MOST_ROWS:
            return x
        return build.converted(x, working_dtype(out.dtype, self.target), node)

    @property
    def _on_cpu(self) -> bool:
        return self.target.device == "cpu"

    def _product(
        self,
        node: fx.Node,
        build: Builder,
        x: fx.Node,
        stored_weight: _Weight,
        bias: Any,
        out_dtype: torch.dtype,
    ) -> fx.Node:
        """The product of `x` and `stored_weight`, which is to be `node`, in `out_dtype`."""
        out, given = tensor(node), tensor(x)
        assert out is not None
        assert given is not None
        weight, scale, whole = stored_weight.qdata, stored_weight.scale, stored_weight.global_scale
        if not stored_weight.swapped:
            weight, scale = (transpose(each, build) for each in (weight, scale))
        form = stored_weight.form
        known = [str(form)] if whole is None else [str(form), whole]
        result = build.call(ops.weight_only_mm, x, weight, scale, bias, out_dtype, *known, like=node)
        shape = stored_weight.shape if stored_weight.swapped else value_of(weight).shape
        form_words = self._form(hint(out.shape[0]), shape, given.dtype, packed=form.packed)
        words = f"mx_weight_only_mm {form_words}"
        set_tag(result, *(replace(tag, kernel=words) for tag in tags_of(node)))
        return result

    def _form(self, rows: int, shape: Sequence[Any], dtype: torch.dtype, *, packed: bool) -> str:
        """How the kernel multiplies `rows` rows of `dtype` by a weight of `shape`, in words."""
        if self._on_cpu:
            parts = parts_of(shape, dtype)
            return "C++" if rows <= MOST_ROWS else f"dequantized in {len(parts)} parts, mm"
        n, k = map(hint, shape)
        choices = forms(rows, n, k, dtype, self.target, packed=packed)
        return choices[0].one_of(len(choices))


def _dequantized(dequantize: Dequantize, swapped: bool) -> _Weight:
    """The weight that `dequantize` reads, before transposes. swapped: whether its result is transposed."""
    (qdata, turned), (scale, _) = untransposed(dequantize.qdata), untransposed(dequantize.scale)
    return _Weight(
        qdata=qdata,
        scale=scale,
        swapped=swapped != turned,
        form=dequantize.form,
        global_scale=dequantize.global_scale,
    )


def _operand(product: Product) -> _Weight:
    """The right operand of `product`, before transposes and, of packed codes, before they are unpacked."""
    qdata, scale, swapped = stored(product.b, product.scale_b)
    unpack = Unpack.of(qdata)
    if unpack is None:
        return _Weight(qdata=qdata, scale=scale, swapped=swapped, form=product.forms[1])
    return _Weight(qdata=unpack.qdata, scale=scale, swapped=swapped, form=unpack.form)


def _is_input(node: Any) -> bool:
    """Whether `node` is an input of the graph, or a view of one."""
    while isinstance(node, fx.Node) and packet(node) in VIEWS:
        node = node.args[0]
    return isinstance(node, fx.Node) and node.op in ("placeholder", "get_attr")
