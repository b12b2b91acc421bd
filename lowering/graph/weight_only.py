"""weight_only: products of few rows with a weight that is stored in MXFP8, on chips without an MX GEMM.

    scaled_mm(qa, sa, w, sw) → weight_only_mm(dequantize(qa, sa), w, sw)

Reading the weight is the time of such a product, so it is read as it is stored, in half the bytes of BF16,
and decoded in registers. The activation is what its MX copy stands for, so that the result is that of the MX
GEMM up to the order of accumulation (see `operands`, `expand`). More rows are left to `expand`: dequantizing
the weight once and the vendor's GEMM are faster then. So are weights that only the graph casts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import fx

from mxcompile import ops
from mxcompile.formats import ELEM_TYPES
from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import VIEWS, argument, packet
from mxcompile.graph.tags import hint, set_tag, tags_of, tensor
from mxcompile.graph.transpose import transpose
from mxcompile.lowering.graph.expand import working_dtype
from mxcompile.lowering.graph.operands import Operands, stored
from mxcompile.lowering.targets import Target
from mxcompile.lowering.templates.weight_only_forms import forms, most_rows

_ELEMENTS = frozenset(elem.dtype for elem in ELEM_TYPES.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightOnly:
    """target: the chip, one without an MX GEMM. device: type of the device that stands for it."""

    target: Target
    device: str
    name: ClassVar[str] = "weight_only"

    def products(self, graph: fx.Graph) -> Iterator[fx.Node]:
        """The products of `graph` that the kernel is for."""
        for node in list(graph.nodes):
            if packet(node) is ops.scaled_mm.overloadpacket and self._takes(node):
                yield node

    def apply(self, graph: fx.Graph) -> None:
        """Replace those products, and name their kernel in their tags."""
        build = Builder(graph, WeightOnly.name)
        operands = Operands(build)
        for node in self.products(graph):
            self._replace(node, build, operands)
        graph.eliminate_dead_code()

    def _takes(self, node: fx.Node) -> bool:
        out, a = tensor(node), tensor(node.args[0])
        qdata, scale, _ = stored(argument(node, 2), argument(node, 3))
        weight, scales = tensor(qdata), tensor(scale)
        if out is None or a is None or weight is None or scales is None or out.device.type != self.device:
            return False
        if not (a.ndim == weight.ndim == scales.ndim == 2 and weight.dtype in _ELEMENTS):
            return False
        if any(hint(size) == 0 for size in (*out.shape, a.shape[1])):
            return False
        few = hint(out.shape[0]) <= most_rows(self.target, working_dtype(out.dtype))
        return few and _is_input(qdata) and _is_input(scale)

    def _replace(self, node: fx.Node, build: Builder, operands: Operands) -> None:
        out = tensor(node)
        assert out is not None
        qa, sa, qb, sb = (argument(node, index) for index in range(4))
        dtype = working_dtype(out.dtype)
        with build.graph.inserting_before(node):
            x = operands.value(qa, sa, -1, dtype, node)
            weight, scale, swapped = stored(qb, sb)
            if not swapped:
                weight, scale = (transpose(each, build) for each in (weight, scale))
            arguments: tuple[Any, ...] = (x, weight, scale, node.args[4], out.dtype)
            result = build.call(ops.weight_only_mm, *arguments, like=node)
        value = tensor(weight)
        assert value is not None
        n, k = map(hint, value.shape)
        choices = forms(hint(out.shape[0]), n, k, dtype, self.target)
        kernel = f"mx_weight_only_mm {choices[0].one_of(len(choices))}"
        set_tag(result, *(replace(tag, kernel=kernel) for tag in tags_of(node)))
        build.replace(node, result)


def _is_input(node: Any) -> bool:
    """Whether `node` is an input of the graph, or a view of one."""
    while isinstance(node, fx.Node) and packet(node) in VIEWS:
        node = node.args[0]
    return isinstance(node, fx.Node) and node.op in ("placeholder", "get_attr")
