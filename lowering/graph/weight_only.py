"""weight_only: products of few rows with a weight that is stored quantized.

    matmul(qa, sa, w, sw)             → weight_only_mm(decode(qa, sa), w, sw)
    matmul(qa, sa, codes of p, sp)    → weight_only_mm(decode(qa, sa), p, sp)     (· tensors, in FP32)
    mm(x, decode(w, sw)ᵀ)             → weight_only_mm(x, w, sw)

The time of such a product is the time to read the weight, so the kernel reads the stored codes, a half or a
quarter of the bytes of BF16, and decodes them in registers. A quantized activation is dequantized, so that
the result equals the quantized GEMM's up to the order of accumulation (see `operands`, `expand`); an
activation that the policy keeps in BF16 is read directly. On chips with an MX GEMM this pass takes products
that `native` did not name. For more rows `expand` dequantizes the weight for the vendor's GEMM, which is
faster; on CPUs only if the weight is small, because parts of a large weight are dequantized in turn (see
`cpu`). Some CPUs have a kernel for many rows of BF16 too: with AMX for every format, on AVX2 for MXINT8.
`expand` also takes weights that the graph casts itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from mxcompile import ops
from mxcompile.formats import Format
from mxcompile.graph import dead
from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import VIEWS, aten, packet
from mxcompile.graph.shapes import operands as operands_of
from mxcompile.graph.tags import hint, set_tag, tags_of, tensor, value_of
from mxcompile.graph.transpose import transpose, untransposed
from mxcompile.lowering import optional
from mxcompile.lowering.choices.families import TABLE, Family, runs
from mxcompile.lowering.choices.weight_only_forms import forms, most_rows
from mxcompile.lowering.cpu import COMPILED_FOR, INT16, LEAST_ROWS, LONG, MOST_ROWS, kernel, parts_of
from mxcompile.lowering.graph.expand import factors_of, scaled, working_dtype
from mxcompile.lowering.graph.lowering_pass import NO_REASONS, LoweringPass, Reasons
from mxcompile.lowering.graph.operands import DequantizedOperands, stored
from mxcompile.ops.cast import decoded_shape
from mxcompile.ops.view import Dequantize, Product, Unpack


@dataclass(frozen=True, kw_only=True, slots=True)
class _Weight:
    """A stored weight.

    swapped: whether the product's right operand is its transpose. form: its format. global_scale: as in
    ``mx.decode``.
    """

    qdata: fx.Node
    scale: fx.Node
    swapped: bool
    form: Format
    global_scale: fx.Node | None = None

    @property
    def shape(self) -> tuple[Any, ...]:
        """The shape of the values, with blocks along the last dimension."""
        return tuple(decoded_shape(value_of(self.qdata).shape, -1, self.form))


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightOnly(LoweringPass):
    """Makes products of few rows read stored weights, on CPUs and GPUs."""

    name: ClassVar[str] = "weight_only"
    family: ClassVar[Family] = Family.WEIGHT_ONLY
    templates: ClassVar[tuple[str, ...]] = ("templates.weight_only",)

    @property
    def obstacle(self) -> str:
        """The reason why the kernels cannot be used, or ""."""
        return kernel.obstacle() if self._on_cpu else optional.obstacle(*self.templates)

    def candidates(self, graph: fx.Graph) -> Iterator[fx.Node]:
        """Yields the products of `graph` that the kernel supports."""
        for node in list(graph.nodes):
            takes = self._takes if node.target is ops.matmul else self._takes_plain
            if takes(node):
                yield node

    def apply(self, graph: fx.Graph) -> Reasons:
        """Replaces the candidates of `graph`, and names the kernel in their tags."""
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
            return False  # another pass chose a kernel
        weight, out = _operand(product), tensor(node)
        if out is None or not runs(self.family, (product.forms[0], weight.form), self.target):
            return False
        if product.tensors and self._on_cpu and hint(out.shape[0]) > MOST_ROWS:
            return False  # for more rows the vendor's GEMM would round the result before the FP32 scales
        return self._fits(node, product.a, working_dtype(out.dtype, self.target), weight)

    def _takes_plain(self, node: fx.Node) -> bool:
        """Whether `node` is an unquantized product of a matrix and a stored weight."""
        if packet(node) not in (aten.mm, aten.addmm) or node.kwargs or not tags_of(node):
            return False
        x, (weight, swapped) = operands_of(node)[0], untransposed(operands_of(node)[1])
        out, dequantize = tensor(node), Dequantize.from_node(weight)
        if out is None or dequantize is None or dequantize.dtype is not out.dtype:
            return False
        along = -1 if swapped else -2
        if dequantize.block_dim not in (along, along + 2):
            return False
        return self._fits(node, x, value_of(x).dtype, _dequantized(dequantize, swapped))

    def _fits(self, node: fx.Node, x: fx.Node, dtype: torch.dtype, stored_weight: _Weight) -> bool:
        """Whether the kernel supports the product `node` of `x`, read in `dtype`, and `stored_weight`."""
        qdata, scale, swapped = stored_weight.qdata, stored_weight.scale, stored_weight.swapped
        out, a = tensor(node), tensor(x)
        weight, scales = tensor(qdata), tensor(scale)
        if out is None or a is None or weight is None or scales is None or out.device.type != self.device:
            return False
        if not a.ndim == weight.ndim == scales.ndim == 2:
            return False
        if any(hint(size) == 0 for size in (*out.shape, a.shape[1])):
            return False
        if self._on_cpu and not (swapped and weight.is_contiguous() and scales.is_contiguous()):
            return False  # the kernel reads it in memory order
        if not (_is_input(qdata) and _is_input(scale)):
            return False
        if self._on_cpu:
            if hint(out.shape[0]) <= MOST_ROWS or self._many_rows(node, dtype, stored_weight):
                return True
            return bool(parts_of(stored_weight.shape, working_dtype(out.dtype, self.target)))
        return hint(out.shape[0]) <= most_rows(self.target, working_dtype(out.dtype, self.target))

    def _many_rows(self, node: fx.Node, dtype: torch.dtype, stored_weight: _Weight) -> str:
        """Returns the CPU's kernel for the many rows of `dtype` of `node` times `stored_weight`, or ""."""
        kernel_name, k = self.target.many_rows, stored_weight.shape[-1]
        if not kernel_name or dtype is not torch.bfloat16 or not stored_weight.swapped:
            return ""
        if hint(value_of(node).shape[0]) < LEAST_ROWS[kernel_name]:
            return ""
        if COMPILED_FOR[kernel_name] not in kernel.instructions():
            return ""
        is_long = isinstance(k, int) and k >= LONG
        takes = is_long and TABLE[Family.INTEGER].takes([stored_weight.form])
        return kernel_name if kernel_name != INT16 or takes else ""

    def _replace(self, node: fx.Node, build: Builder, operands: DequantizedOperands) -> None:
        out, product = value_of(node), Product.read(node)
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
            x = self._widened(x, weight, node, build)
            result = self._product(node, build, x, weight, bias, value_of(node).dtype)
        build.replace(node, result)

    def _widened(self, x: fx.Node, stored_weight: _Weight, node: fx.Node, build: Builder) -> fx.Node:
        """Returns `x`, in the dtype of the vendor's GEMM if that multiplies it on a CPU."""
        out = value_of(node)
        if not self._on_cpu or hint(out.shape[0]) <= MOST_ROWS:
            return x
        if self._many_rows(node, value_of(x).dtype, stored_weight):
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
        """Returns the product of `x` and `stored_weight` in `out_dtype`, with the tags of `node`."""
        weight, scale, whole = stored_weight.qdata, stored_weight.scale, stored_weight.global_scale
        if not stored_weight.swapped:
            weight, scale = (transpose(part, build) for part in (weight, scale))
        form = stored_weight.form
        args = [str(form)] if whole is None else [str(form), whole]
        result = build.call(ops.weight_only_mm, x, weight, scale, bias, out_dtype, *args, like=node)
        form_name = self._form(node, stored_weight, value_of(weight).shape, value_of(x).dtype)
        kernel_name = f"mx_weight_only_mm {form_name}"
        set_tag(result, *(replace(tag, kernel=tag.with_fallbacks(kernel_name)) for tag in tags_of(node)))
        return result

    def _form(self, node: fx.Node, stored_weight: _Weight, size: Sequence[Any], dtype: torch.dtype) -> str:
        """Returns the name of the kernel's form for rows of `dtype`, and a weight read as `size`."""
        shape, rows = stored_weight.shape if stored_weight.swapped else size, hint(value_of(node).shape[0])
        if self._on_cpu:
            dequantized = f"dequantized in {len(parts_of(shape, dtype))} parts, mm"
            few = "C++" if rows <= MOST_ROWS else dequantized
            return self._many_rows(node, dtype, stored_weight) or few
        n, k = map(hint, shape)
        choices = forms(rows, n, k, dtype, self.target, packed=stored_weight.form.packed)
        return choices[0].one_of(len(choices))


def _dequantized(dequantize: Dequantize, swapped: bool) -> _Weight:
    """Returns the weight that `dequantize` decodes. swapped: whether the product reads its transpose."""
    (qdata, turned), (scale, _) = untransposed(dequantize.qdata), untransposed(dequantize.scale)
    return _Weight(
        qdata=qdata,
        scale=scale,
        swapped=swapped != turned,
        form=dequantize.form,
        global_scale=dequantize.global_scale,
    )


def _operand(product: Product) -> _Weight:
    """Returns the right operand of `product` as stored, before its transposes and unpacking."""
    qdata, scale, swapped = stored(product.b, product.scale_b)
    unpack = Unpack.from_node(qdata)
    if unpack is None:
        return _Weight(qdata=qdata, scale=scale, swapped=swapped, form=product.forms[1])
    return _Weight(qdata=unpack.qdata, scale=scale, swapped=swapped, form=unpack.form)


def _is_input(node: Any) -> bool:
    """Whether `node` is an input of the graph, or a view of an input."""
    while isinstance(node, fx.Node) and packet(node) in VIEWS:
        node = node.args[0]
    return isinstance(node, fx.Node) and node.op in ("placeholder", "get_attr")
