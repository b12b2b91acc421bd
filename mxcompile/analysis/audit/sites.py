"""Marking what is to be observed: every cast and every MXFP8 GEMM of a graph that the passes have rewritten.

    scaled_mm(q, s, q', s', bias)  →  observed(q, s, q', s', bias, dtype, alpha, x, x', site)

x and x' are the operands before their casts, in the orientation of q and q'. They become arguments so that
the partitioner keeps them for backward, where wgrad is held to them. Casts stay as they are and get a mark.
The computation does not change; the marked graph is for `analysis/audit/interpreter.py`, not for Inductor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from mxcompile import ops
from mxcompile.formats import Format
from mxcompile.graph.build import Builder
from mxcompile.graph.casts import made_by
from mxcompile.graph.opsets import argument, packet
from mxcompile.graph.reshapes import retaken
from mxcompile.graph.tags import GemmTag, tag_of, value_of
from mxcompile.ops.view import Cast, Product

MARK = "mx_audit"
"""Where a cast's node.meta holds the position of its `CastSite`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductSite:
    """One quantized GEMM of a graph.

    tag: what the passes found out about it. op: the operator it was. words: of the formats of its operands.
    """

    tag: GemmTag
    op: Any
    words: tuple[str, ...]

    @property
    def grouped(self) -> bool:
        """Whether it is one GEMM per group."""
        return self.op is ops.grouped_matmul

    def decoded(self, qdata: Tensor, scale: Tensor, side: int, dtype: torch.dtype) -> Tensor:
        """Returns the tensor that the operand `side` stands for."""
        value: Tensor = ops.decode(qdata, scale, -1 - side, self.words[side], dtype)
        return value

    @property
    def key(self) -> tuple[str, str]:
        """Layer and GEMM, by which it is switched on and off."""
        return self.tag.name, str(self.tag.gemm)


@dataclass(frozen=True, kw_only=True, slots=True)
class CastSite:
    """One cast of a graph.

    block_dim: not negative. fmt: what is cast to. readers: the GEMMs that read its result, with the operand
    it is to them. needed_by: keys of these and of those that read what is made from its result.
    """

    block_dim: int
    rowwise: bool
    fmt: Format
    readers: list[tuple[GemmTag, str]] = field(default_factory=list)
    needed_by: set[tuple[str, str]] = field(default_factory=set)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sites:
    """All that is observed in a model, over all its graphs."""

    products: list[ProductSite] = field(default_factory=list)
    casts: list[CastSite] = field(default_factory=list)


def observed(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    extra: Tensor | None,
    out_dtype: Any,
    alpha: Tensor | None,
    left: Tensor | None,
    right: Tensor | None,
    site: int,
) -> Tensor:
    """Stand for a GEMM in a marked graph; run by the interpreter only.

    a, scale_a, b, scale_b, extra (bias or offsets), out_dtype, alpha: arguments of one of `ops.PRODUCTS`.
    left, right: the operands before their casts, None if they have no cast.
    """
    raise AssertionError("a marked graph was run without its interpreter")


def mark(graph: fx.Graph, sites: Sites) -> None:
    """Mark casts and GEMMs of `graph`, a joint or inference graph after all passes, in `sites` too."""
    marker = _Marker(graph, sites)
    for node in list(graph.nodes):
        tag = tag_of(node)
        if tag is not None and packet(node) in ops.PRODUCTS:
            marker.mark_product(node, tag)


class _Marker:
    def __init__(self, graph: fx.Graph, sites: Sites) -> None:
        self._graph = graph
        self._sites = sites
        self._build = Builder(graph, "audit")

    def mark_product(self, node: fx.Node, tag: GemmTag) -> None:
        """Replace the target of `node` by `observed`."""
        product = Product.read(node)
        site = ProductSite(tag=tag, op=node.target, words=product.words)
        self._sites.products.append(site)
        with self._graph.inserting_before(node):
            left, right = (self._operand(product.sides[side][0], site, side) for side in (0, 1))
        (qa, sa), (qb, sb) = product.sides
        given = qa, sa, qb, sb, product.extra, product.out_dtype, product.alpha
        node.target = observed
        node.args = (*given, left, right, len(self._sites.products) - 1)

    def _operand(self, qdata: fx.Node, site: ProductSite, side: int) -> fx.Node | None:
        """The operand `side` before its cast, which gets a mark; None if the graph does not cast it."""
        cast, steps = made_by(qdata)
        if Cast.of(cast) is None:
            return None
        mark = self._cast_site(cast)
        mark.readers.append((site.tag, site.tag.tensors[side]))
        mark.needed_by.add(site.key)
        source = argument(cast)
        if source.target is ops.decode:  # the other layout, made from the rowwise copy
            first, _ = made_by(argument(source))
            if Cast.of(first) is None:
                return None
            self._cast_site(first).needed_by.add(site.key)
            source = argument(first)
        if source.target is ops.hadamard:  # of both operands, so the product is the same without
            source = argument(source)
        return retaken(steps, source, self._build)

    def _cast_site(self, cast: fx.Node) -> CastSite:
        if MARK not in cast.meta:
            view = Cast.read(cast)
            dim = view.side % value_of(view.x).ndim
            site = CastSite(block_dim=dim, rowwise=view.side == -1, fmt=view.form)
            self._sites.casts.append(site)
            cast.meta[MARK] = len(self._sites.casts) - 1
            return site
        index: int = cast.meta[MARK]
        return self._sites.casts[index]
