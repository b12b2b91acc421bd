"""cache: a weight is cast once for as long as it stays the same, where the policy says ``weights: cached``.

    quantize(view(w))  →  quantize_cached(view(w))      w a parameter or buffer of the model

The operator gives the copy that an earlier call made if not one byte of w has changed since (see
`lowering.cpu.copies`). Backward asks for its copy anew, so that nothing of it is saved. A cast stays, and the
record says why, if what it casts is computed, if its format is not MXFP8, or if the target has no kernel that
compares and keeps. Numerics do not change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from mxcompile import ops
from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import PICKS, argument, packet
from mxcompile.graph.tags import WEIGHT_KEY, GemmTag, set_tag, tag_of, tensor
from mxcompile.graph.transpose import untransposed
from mxcompile.models.names import GraphInput, joined
from mxcompile.ops.view import Cast, Product, result_of
from mxcompile.passes.flow import gemms_reading, graph_input, viewed
from mxcompile.policy import Code, Gemm, Reason, Weights

_SOURCES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cache:
    """inputs: of the captured graph. prefix: path of its module. obstacle: why the target cannot, or ""."""

    name: ClassVar[str] = "cache"
    inputs: Sequence[GraphInput]
    prefix: str = ""
    obstacle: str = ""

    def apply(self, graph: fx.Graph) -> None:
        """Replace casts of weights in `graph`, or say in their tags why not."""
        build = Builder(graph, self.name)
        for node, tag, cast in _weights(graph):
            path, reason = self._judged(cast)
            if reason:
                set_tag(node, tag.with_reason(Reason(Code.CAST_EACH_CALL, reason)))
            elif cast.target is ops.quantize:
                _replace(cast, path, build)
        graph.eliminate_dead_code()

    def _judged(self, cast: fx.Node) -> tuple[str, str]:
        """The path of the weight that `cast` is of, and why it cannot be cached, or ""."""
        if cast.target is ops.quantize_cached:
            return "", ""
        if cast.target is not ops.quantize:
            return "", "its format is not MXFP8"
        value, source = tensor(argument(cast)), viewed(argument(cast))
        known = graph_input(source, self.inputs) if source.op == "placeholder" else None
        if known is None or not known.static:
            return "", "it is computed"
        if value is None or value.dtype not in _SOURCES:
            return "", f"its dtype is {str(value.dtype).removeprefix('torch.') if value is not None else '?'}"
        if not value.is_contiguous():
            return "", "it does not lie in memory as it is cast"
        return joined(self.prefix, known.path or source.name), self.obstacle


def _weights(graph: fx.Graph) -> Iterator[tuple[fx.Node, GemmTag, fx.Node]]:
    """The products of `graph` whose weight is to be cached, and what casts that weight."""
    for node in list(graph.nodes):  # what is given may be replaced before the next is looked for
        tag = tag_of(node)
        if tag is None or tag.weights is not Weights.CACHED or "w" not in tag.tensors:
            continue
        if packet(node) not in ops.PRODUCTS:
            continue
        qdata = untransposed(Product.read(node).sides[tag.tensors.index("w")][0])[0]
        if packet(qdata) in PICKS:
            qdata = argument(qdata)
        cast, _ = result_of(qdata)
        if cast is not None:  # else it is stored quantized, and nobody casts it
            yield node, tag, cast


def _replace(cast: fx.Node, path: str, build: Builder) -> None:
    view = Cast.read(cast)
    how = view.block_dim, view.elem_dtype, view.rounding, view.square
    with build.graph.inserting_before(cast):
        made = build.call(ops.quantize_cached, view.x, *how, like=cast)
    made.meta.update({key: cast.meta[key] for key in ("mx_itemsize",) if key in cast.meta})
    made.meta[WEIGHT_KEY] = path
    build.replace(cast, made)
    if {tag.gemm for tag in gemms_reading(made)} >= {Gemm.FPROP, Gemm.DGRAD}:
        made.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
