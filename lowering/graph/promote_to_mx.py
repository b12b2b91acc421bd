"""promote_to_mx: run products of other formats on the chip's MX GEMM, as MXFP8.

    matmul(qa, sa, qb, sb)  →  matmul(elements(qa), bytes(sa), elements(qb), bytes(sb), MXFP8)

A power-of-two scale, FP32 or E8M0, becomes the scale byte of each block of 32 that it spans: 128 elements of
DeepSeek's recipe are four blocks, and a tile of several rows repeats its byte in each row. FP6 and FP4
elements are values of E4M3, and are stored as E4M3. Both conversions are exact, so the product is the same.
Products of formats that no kernel takes, and products that `native` does not run, stay with a reason.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from mxcompile import ops
from mxcompile.formats import Format, ScaleLayout
from mxcompile.graph.build import Builder
from mxcompile.graph.tags import set_tag, tags_of, value_of
from mxcompile.lowering.choices.epilogue import is_native
from mxcompile.lowering.choices.families import TABLE, Family, lacking
from mxcompile.lowering.graph.lowering_pass import NativePass, Reasons
from mxcompile.lowering.graph.native import unmet
from mxcompile.lowering.graph.operands import DequantizedOperands
from mxcompile.ops.view import Product


class PromoteToMX(NativePass):
    """Runs products of other formats as MXFP8, on chips with an MX GEMM."""

    family = Family.AS_MX

    def candidates(self, graph: fx.Graph) -> Iterator[fx.Node]:
        """Returns the products of other formats with power-of-two scales or E8M0 scales."""
        products = (product for product in Product.calls(graph) if not is_native(product.node))
        return (product.node for product in products if TABLE[self.family].takes(product.forms))

    def apply(self, graph: fx.Graph) -> Reasons:
        """Replaces the candidates of `graph`. Returns the reasons why other products stay."""
        build = Builder(graph, self.name)
        operands = DequantizedOperands(build)
        reasons: dict[fx.Node, str] = {}
        for node in list(self.candidates(graph)):
            product = Product.read(node)
            lack = lacking(self.family, product.forms, self.target)
            if reason := lack or unmet(product, self.device):
                reasons[node] = reason
                continue
            with graph.inserting_before(node):
                a, b = (self._operand(build, operands, product, side) for side in (0, 1))
                formats = (str(Format.mx(form.mx_elem)) for form in product.forms if form.mx_elem)
                args = *a, *b, product.extra, product.out_dtype, *formats
                new_node = build.call(node.target, *args, like=node)
            set_tag(new_node, *tags_of(node))
            build.replace(node, new_node)
        return reasons

    def _operand(
        self, build: Builder, operands: DequantizedOperands, product: Product, side: int
    ) -> tuple[fx.Node, fx.Node]:
        """Returns elements and scale bytes of one operand of `product`."""
        node, (qdata, scale), dim = product.node, product.sides[side], -1 - side
        form, out, value = product.forms[side], value_of(node), value_of(qdata)
        elem = form.mx_elem
        assert elem is not None
        if form.elem.is_coded:
            qdata = operands.value(qdata, scale, dim, str(form), elem.dtype, node, scaled=False)
        matrices = value.ndim == out.ndim == 2 and not product.is_grouped
        layout = self.target.scale_layout if matrices else ScaleLayout.ROW_MAJOR
        args = (scale, qdata, dim, str(form), str(layout))
        return qdata, build.call(ops.scale_bytes, *args, like=node)
