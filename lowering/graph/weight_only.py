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

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from mxcompile import ops
from mxcompile.formats import Format
from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import aten, packet
from mxcompile.graph.shapes import operands as operands_of
from mxcompile.graph.tags import hint, set_tag, tags_of, tensor, value_of
from mxcompile.graph.transpose import transpose, untransposed
from mxcompile.lowering.choices.families import TABLE, Family, runs
from mxcompile.lowering.choices.weight_only_forms import forms, most_rows
from mxcompile.lowering.cpu import COMPILED_FOR, INT16, LEAST_ROWS, LONG, MOST_ROWS, kernel, parts_of
from mxcompile.lowering.graph.expand import factors_of, scaled, working_dtype
from mxcompile.lowering.graph.lowering_pass import LoweringPass
from mxcompile.lowering.graph.operands import DequantizedOperands, is_input, stored
from mxcompile.ops.cast import decoded_shape
from mxcompile.ops.view import Dequantize, Product, Unpack


@dataclass(frozen=True, kw_only=True, slots=True)
class _Use:
    """The product `node` of `x`, which the kernel reads in `dtype`, and a stored weight.

    swapped: whether the right operand is the weight's transpose. form: the weight's format. global_scale: as
    in ``mx.decode``.
    """

    node: fx.Node
    x: fx.Node
    dtype: torch.dtype
    qdata: fx.Node
    scale: fx.Node
    swapped: bool
    form: Format
    global_scale: fx.Node | None = None

    @property
    def rows(self) -> int:
        return hint(value_of(self.node).shape[0])

    @property
    def shape(self) -> tuple[Any, ...]:
        """The shape of the weight's values, with blocks along the last dimension."""
        return tuple(decoded_shape(value_of(self.qdata).shape, -1, self.form))


class WeightOnly(LoweringPass):
    """Makes products of few rows read stored weights, on CPUs and GPUs."""

    family = Family.WEIGHT_ONLY
    templates = ("templates.weight_only",)
    in_cpp = True

    @property
    def _on_cpu(self) -> bool:
        return self.target.device == "cpu"

    def candidates(self, graph: fx.Graph) -> Iterator[fx.Node]:
        """Yields the products of `graph` that the kernel supports."""
        return (use.node for use in self._uses(graph))

    def apply(self, graph: fx.Graph) -> None:
        """Replaces the candidates of `graph`, and names the kernel in their tags."""
        build = Builder(graph, self.name)
        operands = DequantizedOperands(build)
        for use in self._uses(graph):
            self._replace(use, build, operands)

    def _uses(self, graph: fx.Graph) -> Iterator[_Use]:
        for node in list(graph.nodes):
            use = self._of_quantized(node) if node.target is ops.matmul else _of_plain(node)
            if use is not None and self._fits(use):
                yield use

    def _of_quantized(self, node: fx.Node) -> _Use | None:
        product, out = Product.read(node), tensor(node)
        if out is None or any(tag.kernel for tag in tags_of(node)):  # another pass chose a kernel
            return None
        qdata, scale, swapped = stored(product.b, product.scale_b)
        form, unpack = product.forms[1], Unpack.from_node(qdata)
        if unpack is not None:
            qdata, form = unpack.qdata, unpack.form
        if not runs(self.family, (product.forms[0], form), self.target):
            return None
        if product.tensors and self._on_cpu and hint(out.shape[0]) > MOST_ROWS:
            return None  # for more rows the vendor's GEMM would round the result before the FP32 scales
        return _Use(
            node=node,
            x=product.a,
            dtype=working_dtype(out.dtype, self.target),
            qdata=qdata,
            scale=scale,
            swapped=swapped,
            form=form,
        )

    def _fits(self, use: _Use) -> bool:
        out, a, weight, scales = map(tensor, (use.node, use.x, use.qdata, use.scale))
        if out is None or a is None or weight is None or scales is None or out.device.type != self.device:
            return False
        if not a.ndim == weight.ndim == scales.ndim == 2:
            return False
        if any(hint(size) == 0 for size in (*out.shape, a.shape[1])):
            return False
        if self._on_cpu and not (use.swapped and weight.is_contiguous() and scales.is_contiguous()):
            return False  # the kernel reads it in memory order
        if not (is_input(use.qdata) and is_input(use.scale)):
            return False
        dtype = working_dtype(out.dtype, self.target)
        if self._on_cpu:
            return use.rows <= MOST_ROWS or bool(self._many_rows(use) or parts_of(use.shape, dtype))
        return use.rows <= most_rows(self.target, dtype)

    def _many_rows(self, use: _Use) -> str:
        """Returns the CPU's kernel for the many rows of the product, or ""."""
        kernel_name, k = self.target.many_rows, use.shape[-1]
        if not kernel_name or use.dtype is not torch.bfloat16 or not use.swapped:
            return ""
        if use.rows < LEAST_ROWS[kernel_name] or COMPILED_FOR[kernel_name] not in kernel.instructions():
            return ""
        is_long = isinstance(k, int) and k >= LONG
        takes = is_long and TABLE[Family.INTEGER].takes([use.form])
        return kernel_name if kernel_name != INT16 or takes else ""

    def _replace(self, use: _Use, build: Builder, operands: DequantizedOperands) -> None:
        node, x, out_dtype = use.node, use.x, value_of(use.node).dtype
        product = Product.from_node(node)
        with build.graph.inserting_before(node):
            if product is None:
                bias = node.args[0] if packet(node) is aten.addmm else None
                if self._on_cpu and use.rows > MOST_ROWS and not self._many_rows(use):
                    # the vendor's GEMM multiplies it
                    x = build.converted(x, working_dtype(out_dtype, self.target), node)
                result = self._product(use, x, bias, out_dtype, build)
            else:
                x = operands.value(x, product.scale_a, -1, product.format_a, use.dtype, node)
                if not product.tensors:
                    result = self._product(use, x, product.bias, out_dtype, build)
                else:
                    result = self._product(use, x, None, torch.float32, build)
                    result = scaled(result, factors_of(product, build), product.bias, build, node)
                    result = build.converted(result, out_dtype, node)
        build.replace(node, result)

    def _product(self, use: _Use, x: fx.Node, bias: Any, out_dtype: torch.dtype, build: Builder) -> fx.Node:
        """Returns the product of `x` and the weight in `out_dtype`, with the tags of the replaced node."""
        weight, scale, node = use.qdata, use.scale, use.node
        if not use.swapped:
            weight, scale = (transpose(part, build) for part in (weight, scale))
        args = [str(use.form)] if use.global_scale is None else [str(use.form), use.global_scale]
        result = build.call(ops.weight_only_mm, x, weight, scale, bias, out_dtype, *args, like=node)
        kernel_name = f"mx_weight_only_mm {self._form(use)}"
        set_tag(result, *(replace(tag, kernel=tag.with_fallbacks(kernel_name)) for tag in tags_of(node)))
        return result

    def _form(self, use: _Use) -> str:
        """Returns the name of the form in which the kernel runs."""
        if self._on_cpu:
            num_parts = len(parts_of(use.shape, working_dtype(value_of(use.node).dtype, self.target)))
            few = "C++" if use.rows <= MOST_ROWS else f"dequantized in {num_parts} parts, mm"
            return self._many_rows(use) or few
        n, k = map(hint, use.shape if use.swapped else reversed(value_of(use.qdata).shape))
        choices = forms(use.rows, n, k, use.dtype, self.target, packed=use.form.packed)
        return choices[0].one_of(len(choices))


def _of_plain(node: fx.Node) -> _Use | None:
    """Returns the use if `node` is an unquantized product of a matrix and a stored weight, else None."""
    if packet(node) not in (aten.mm, aten.addmm) or node.kwargs or not tags_of(node):
        return None
    x, (weight, swapped) = operands_of(node)[0], untransposed(operands_of(node)[1])
    out, dequantize = tensor(node), Dequantize.from_node(weight)
    if out is None or dequantize is None or dequantize.dtype is not out.dtype:
        return None
    along = -1 if swapped else -2
    if dequantize.block_dim not in (along, along + 2):
        return None
    (qdata, turned), (scale, _) = untransposed(dequantize.qdata), untransposed(dequantize.scale)
    return _Use(
        node=node,
        x=x,
        dtype=value_of(x).dtype,
        qdata=qdata,
        scale=scale,
        swapped=swapped != turned,
        form=dequantize.form,
        global_scale=dequantize.global_scale,
    )
