"""fuse: one operator of a product and of the cast that it alone reads.

    scaled_mm(quantize(x), w)  →  quantize_mm(x, w)                      the FP8 copy of x is never stored

For a matrix x cast along its rows' K, whose two results go to that product and nowhere else: of inference, or
of a forward whose backward has another copy. A cast that several products share (QKV) stays; so does one of a
tensor that has another cast too, for `pair`, and one for which the template has no tile that pays. Where
Inductor is to choose by timing, the operator reads the cast beside x, which vanishes if the fused form wins.
Numerics do not change.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import fx

from mxcompile import ops
from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import argument, packet
from mxcompile.graph.tags import hint, set_tag, tags_of, tensor
from mxcompile.lowering.graph.lowering_pass import NO_REASONS, NativePass, Reasons
from mxcompile.lowering.templates.configs import autotuning
from mxcompile.lowering.templates.fused_tiles import Tiles, tiles


@dataclass(frozen=True, kw_only=True, slots=True)
class Fuse(NativePass):
    """For chips with an MX GEMM."""

    name: ClassVar[str] = "fuse"
    templates: ClassVar[tuple[str, ...]] = (*NativePass.templates, "templates.fused_quantize_mm")

    def apply(self, graph: fx.Graph) -> Reasons:
        """Fuse what pays among the products of `graph` that have a kernel, and name that in their tags."""
        build = Builder(graph, self.name)
        for node in list(graph.nodes):
            cast = cast_of(node)
            if cast is not None:
                out = tensor(node)
                assert out is not None
                found = tiles(self.target.name, *map(hint, out.shape))
                if found:
                    self._fuse(build, node, cast, found)
        return NO_REASONS

    def _fuse(self, build: Builder, node: fx.Node, cast: fx.Node, found: Tiles) -> None:
        qdata, scale, b, scale_b, bias, out_dtype = node.args
        source, _, elem_dtype, rounding, *_ = cast.args
        competing = (qdata, scale) if autotuning() else ()
        with build.graph.inserting_before(node):
            arguments = (source, b, scale_b, bias, elem_dtype, rounding, out_dtype, *competing)
            fused = build.call(ops.quantize_mm, *arguments, like=node)
        kernel = f"mx_quantize_mm {_config(found, bool(competing))} ({self.target.mma})"
        set_tag(fused, *(replace(tag, kernel=kernel) for tag in tags_of(node)))
        build.replace(node, fused)
        if not competing:
            for result in (*cast.users, cast):
                build.graph.erase_node(result)


def _config(found: Tiles, competes: bool) -> str:
    """The tile the template takes, or that Inductor is to choose, also the other form."""
    if competes:
        return f"autotuned of {len(found) + 1}"
    ((swap, tile),) = found
    return f"{tile.block_m}x{tile.block_n}x{tile.block_k}{' swapped' if swap else ''}"


def cast_of(node: fx.Node) -> fx.Node | None:
    """The cast of the left operand of `node`, a product of matrices, if it may be computed there instead."""
    if packet(node) is not ops.scaled_mm.overloadpacket or not all(tag.kernel for tag in tags_of(node)):
        return None
    bias, out = tensor(node.args[4]), tensor(node)
    results = node.args[:2]
    if out is None or out.ndim != 2 or (bias is not None and bias.ndim != 1):
        return None
    if not all(_is_result(result, place, node) for place, result in enumerate(results)):
        return None
    cast = argument(node.args[0])  # type: ignore[arg-type]
    source, dim, _, _, *square = cast.args
    alone = len(cast.users) == 2 and all(user in results for user in cast.users)
    shared = any(packet(user) in ops.CASTS and user is not cast for user in argument(cast).users)
    rowwise = int(dim) in (-1, 1) and not any(square[:1])  # type: ignore[arg-type]
    return cast if alone and rowwise and not shared and tensor(source) is not None else None


def _is_result(result: Any, place: int, reader: fx.Node) -> bool:
    """Whether `result` is what a cast returns in `place`, for `reader` alone."""
    if not isinstance(result, fx.Node) or result.target is not operator.getitem:
        return False
    cast, index = result.args
    ours = isinstance(cast, fx.Node) and cast.target is ops.quantize
    return bool(ours and index == place and list(result.users) == [reader])
