"""promote: run products in FP32 if the CPU multiplies their dtype slowly.

    mm(a, b)  →  to(mm(to(a, FP32), to(b, FP32)), BF16)        also attention, convolutions, …

BF16 and FP16 values are exact in FP32, so the result is accumulated in FP32 and rounded once, as on a CPU
with instructions for that dtype, up to the order of accumulation. A dequantized operand is dequantized to
FP32 instead. Other nodes keep their dtype. A graph without mx operators stays as it is, unless `promotes`.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from mxcompile import ops
from mxcompile.graph.attention import BACKENDS
from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import CONVOLUTIONS, MATMULS, aten, packet
from mxcompile.graph.tags import GemmTag, set_tag, tags_of, tensor
from mxcompile.graph.transpose import transpose, untransposed
from mxcompile.lowering.graph.lowering_pass import LoweringPass
from mxcompile.ops.view import Dequantize

_ATTENTION = BACKENDS["cpu"]
_DENSE = MATMULS - {aten.linear, aten._sparse_mm, aten._sparse_addmm}
_PRODUCTS = _DENSE | CONVOLUTIONS | {_ATTENTION.forward, _ATTENTION.backward}


class Promote(LoweringPass):
    """Runs products in FP32, on CPUs without instructions for their dtype."""

    @property
    def applies(self) -> bool:
        """Whether products in some dtype are slow."""
        return bool(self.target.slow_dtypes)

    def apply(self, graph: fx.Graph) -> None:
        """Widens the operands of the slow products of `graph`, and names their kernels in tags."""
        if not (self.promotes or any(str(packet(node)).startswith("mx.") for node in graph.nodes)):
            return
        promoter = _Promoter(graph, self.target.slow_dtypes)
        for node in list(graph.nodes):
            if packet(node) in _PRODUCTS and promoter.is_slow(node):
                promoter.promote(node)


class _Promoter:
    """Widens the products of one graph to FP32, each operand once."""

    def __init__(self, graph: fx.Graph, slow: frozenset[torch.dtype]) -> None:
        self._graph = graph
        self._slow = slow
        self._build = Builder(graph, Promote.name)
        self._wide: dict[fx.Node, fx.Node] = {}

    def is_slow(self, node: fx.Node) -> bool:
        """Whether `node` has an operand on the CPU in a slow dtype, and can run in FP32."""
        if packet(node) is aten._grouped_mm and _offsets(node) is None:
            return False
        values = [tensor(operand) for operand in node.all_input_nodes]
        return any(value is not None and self._takes(value) for value in values)

    def _takes(self, value: torch.Tensor) -> bool:
        return value.dtype in self._slow and value.device.type == "cpu"

    def promote(self, node: fx.Node) -> None:
        """Computes `node` in FP32, and rounds its results to their former dtypes."""
        before = node.meta["val"]
        with self._graph.inserting_before(node):
            args, kwargs = fx.map_arg((node.args, node.kwargs), self._widened)
            if packet(node) is aten._grouped_mm:
                product = self._build.call(ops.grouped_mm, *args[:2], _offsets(node), like=node)
            else:
                others = {key: value for key, value in kwargs.items() if key != "out_dtype"}
                product = self._build.call(node.target, *args, like=node, **others)
        set_tag(product, *(replace(tag, kernel=_named(node, tag)) for tag in tags_of(node)))
        if isinstance(before, torch.Tensor):
            self._replace(node, product, before)
            return
        for user in list(node.users):
            assert user.target is operator.getitem, f"{user} reads several results at once"
            index: Any = user.args[1]
            with self._graph.inserting_before(user):
                result = self._build.pick(product, index, f"{user.name}_wide")
            self._replace(user, result, before[index])
        self._graph.erase_node(node)  # attention may have dropout, so dead code elimination would keep it

    def _replace(self, node: fx.Node, product: fx.Node, before: torch.Tensor | None) -> None:
        """Replaces `node` by `product`, rounded to the dtype of `before`."""
        if before is not None:
            with self._graph.inserting_before(node):
                product = self._build.converted(product, before.dtype, node)
        self._build.replace(node, product)

    def _widened(self, operand: fx.Node) -> fx.Node:
        """Returns `operand`, in FP32 if its dtype is slow. Inserts at the current insertion point."""
        value = tensor(operand)
        if value is None or not self._takes(value):
            return operand
        if operand not in self._wide:
            source, swapped = untransposed(operand)
            dequantize = Dequantize.from_node(source)
            # two-level values are rounded to the narrow dtype; decoding to FP32 would not round them
            if dequantize is None or dequantize.global_scale is not None:
                wide = self._build.converted(operand, torch.float32, operand)
            else:
                wide = self._build.call(ops.decode, *dequantize.arguments(dtype=torch.float32), like=source)
                wide = transpose(wide, self._build) if swapped else wide
            self._wide[operand] = wide
        return self._wide[operand]


def _offsets(node: fx.Node) -> fx.Node | None:
    """Returns the offsets of the grouped product `node`, None if it has other arguments too."""
    offsets, *others = (*node.args[2:], *node.kwargs.values())
    if any(isinstance(other, fx.Node) for other in others):
        return None
    return offsets if isinstance(offsets, fx.Node) else None


def _named(node: fx.Node, tag: GemmTag) -> str:
    """Returns the name of the FP32 kernel of `node`, from the name that an earlier pass wrote if any."""
    if not tag.kernel:
        return tag.with_fallbacks(f"{packet(node)} (float32)")
    return tag.kernel.replace("(bfloat16", "(float32").replace("(float16", "(float32")
