"""Marks the casts and quantized GEMMs of a graph after all passes, for observation.

    scaled_mm(q, s, q', s', bias)  →  observed(q, s, q', s', bias, dtype, tensors, x, x', site)

x and x' are the operands before their casts, in the orientation of q and q'. They become arguments so that
the partitioner saves them for backward, where wgrad is compared with them. Casts stay and get a mark. The
computation does not change. `analysis/study/interpreter.py` runs the marked graph; Inductor cannot.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from mxcompile import ops
from mxcompile.formats import Format
from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import argument, packet
from mxcompile.graph.reshapes import producing_call, retaken
from mxcompile.graph.tags import GemmTag, tag_of, value_of
from mxcompile.ops.view import Cast, Product

MARK = "mx_audit"
"""Key in a cast's node.meta; its value is the index of the `CastSite`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductSite:
    """One quantized GEMM of a graph.

    tag: tag of the GEMM from the passes. op: original operator. words: formats of its operands.
    """

    tag: GemmTag
    op: Any
    words: tuple[str, ...]

    @property
    def grouped(self) -> bool:
        """Whether it is a grouped GEMM."""
        return self.op is ops.grouped_matmul

    def decoded(self, qdata: Tensor, scale: Tensor, side: int, dtype: torch.dtype) -> Tensor:
        """Returns the dequantized operand `side`."""
        value: Tensor = ops.decode(qdata, scale, -1 - side, self.words[side], dtype)
        return value

    @property
    def key(self) -> tuple[str, str]:
        """Name of the layer and kind of GEMM. Runs choose by this key whether to quantize the GEMM."""
        return self.tag.name, str(self.tag.gemm)


@dataclass(frozen=True, kw_only=True, slots=True)
class CastSite:
    """One cast of a graph.

    block_dim: dimension along which scale blocks run, nonnegative. fmt: format of the result. readers: the
    GEMMs that read the result, with the operand's name. needed_by: keys of these GEMMs, and of the GEMMs that
    read tensors derived from the result.
    """

    block_dim: int
    rowwise: bool
    fmt: Format
    readers: list[tuple[GemmTag, str]] = field(default_factory=list)
    needed_by: set[tuple[str, str]] = field(default_factory=set)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sites:
    """All observable GEMMs and casts of a model, over all its graphs."""

    products: list[ProductSite] = field(default_factory=list)
    casts: list[CastSite] = field(default_factory=list)


def observed(*args: Any) -> Tensor:
    """Represents a GEMM in a marked graph. Only the interpreter can run it.

    args: arguments of one of `ops.PRODUCTS`, both operands before their casts, and the index of the site. An
    operand without a cast is None.
    """
    raise AssertionError("a marked graph was run without its interpreter")


def mark(graph: fx.Graph, sites: Sites) -> None:
    """Marks casts and GEMMs of `graph`, a joint or inference graph after all passes; adds them to `sites`."""
    build = Builder(graph, "audit")
    for node in list(graph.nodes):
        tag = tag_of(node)
        if tag is None or packet(node) not in ops.PRODUCTS:
            continue
        product = Product.read(node)
        site = ProductSite(tag=tag, op=node.target, words=product.words)
        sites.products.append(site)
        with graph.inserting_before(node):
            lhs, rhs = (_source(product.sides[side][0], site, side, sites, build) for side in (0, 1))
        (qa, sa), (qb, sb) = product.sides
        arguments = qa, sa, qb, sb, product.extra, product.out_dtype, product.tensors
        node.target = observed
        node.args = (*arguments, lhs, rhs, len(sites.products) - 1)


def _source(qdata: fx.Node, site: ProductSite, side: int, sites: Sites, build: Builder) -> fx.Node | None:
    """Returns the operand `side` before its cast, and marks the cast; None if the graph has no cast."""
    cast, steps = producing_call(qdata)
    if Cast.from_node(cast) is None:
        return None
    mark = _cast_site(cast, sites)
    mark.readers.append((site.tag, site.tag.tensors[side]))
    mark.needed_by.add(site.key)
    source = argument(cast)
    if source.target is ops.decode:  # the columnwise copy is cast from the rowwise one
        first, _ = producing_call(argument(source))
        if Cast.from_node(first) is None:
            return None
        _cast_site(first, sites).needed_by.add(site.key)
        source = argument(first)
    if source.target is ops.hadamard:  # applied to both operands, so it cancels
        source = argument(source)
    return retaken(steps, source, build)


def _cast_site(cast: fx.Node, sites: Sites) -> CastSite:
    if MARK not in cast.meta:
        view = Cast.read(cast)
        dim = view.side % value_of(view.x).ndim
        cast.meta[MARK] = len(sites.casts)
        sites.casts.append(CastSite(block_dim=dim, rowwise=view.side == -1, fmt=view.form))
    index: int = cast.meta[MARK]
    return sites.casts[index]
