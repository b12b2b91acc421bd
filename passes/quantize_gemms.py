"""quantize_gemms: replace every GEMM with formats by mx operators.

    a[M, K] · b[K, N]  →  matmul(cast(a along K), cast(b along K), formats)

Each operand is quantized along the GEMM's contraction dimension from its widest value (see `operand`). GEMMs
that read one node share its cast; `share` later merges casts of equal nodes. `seed` gives stochastic casts
their random numbers. Casts with a delayed scale read the state of their layer (see `delayed_scales`); without
a state they use the current amax, and the record has a reason. Two-level formats also have a scale for the
whole tensor, or for each of its rows: their casts read the amax, and their products multiply by the scales of
both operands. Operands of wgrad may be transformed before their casts (`formats.hadamard`), except in grouped
GEMMs, because groups of tokens end inside of transformed blocks. Rows past the last group are undefined; they
are set to 0 where they would count in a scale. Numerics change in this pass and in no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from mxcompile import ops
from mxcompile.formats import BLOCK, Copy, Format, ScaleLayout, Tile
from mxcompile.graph import dead
from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import BIASED, CONVOLUTIONS, PICKS, VIEWS, argument, aten, is_grouped, packet
from mxcompile.graph.shapes import offsets, operands
from mxcompile.graph.tags import GemmTag, numel, set_tag, tagged, tags_of, tensor, value_of
from mxcompile.graph.transpose import transpose, untransposed
from mxcompile.ops.view import result_of
from mxcompile.passes.delayed_scales import States
from mxcompile.passes.operand import as_returned, matrices, product_calls, widest
from mxcompile.passes.roles.flow import origin, picked_stack
from mxcompile.passes.rows import arrives
from mxcompile.passes.split import HALF
from mxcompile.policy import Code, Gemm, Reason, Saved, Sent


class Quantized(NamedTuple):
    """The results of a cast. amax: amax of the tensor or of its rows, for casts to two-level formats."""

    qdata: fx.Node
    scale: fx.Node
    amax: fx.Node | None = None


_Formats = tuple[Format, Format]
_FORWARD = ("x", "w")


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizeGemms:
    """Rewrites GEMMs. tapped: whether the layers of the graph have a state of delayed scales."""

    name: ClassVar[str] = "quantize_gemms"
    tapped: bool = False

    def apply(self, graph: fx.Graph) -> None:
        """Rewrites the GEMMs of `graph` whose tags have formats."""
        writer = _GemmWriter(graph, tapped=self.tapped)
        writer.record_ends(tagged(graph))
        for node, tag in tagged(graph):
            if tag.formats is not None:
                writer.rewrite(node, tag, tag.formats)
        for node, tag in tagged(graph):
            if tag.forward is not None:
                writer.dequantize(node, tag, tag.forward)
        writer.states.fill()
        dead.eliminate(graph)


class _GemmWriter:
    """State of one run: the casts, each made once."""

    def __init__(self, graph: fx.Graph, *, tapped: bool) -> None:
        self._graph = graph
        self._tapped = tapped
        self._build = Builder(graph, QuantizeGemms.name)
        self._products = product_calls(graph)
        self._casts: dict[tuple[Any, Copy], Quantized] = {}
        self._amaxes: dict[tuple[Any, ...], fx.Node] = {}
        self._rowwise: dict[tuple[Any, Copy], Quantized] = {}
        self.states = States(self._build)
        self._state_amaxes: dict[Quantized, fx.Node] = {}
        self._state: tuple[fx.Node, str] | None = None
        self._ends: set[tuple[fx.Node, fx.Node]] = set()
        self._masked: dict[tuple[fx.Node, int, fx.Node], fx.Node] = {}

    def record_ends(self, gemms: Sequence[tuple[fx.Node, GemmTag]]) -> None:
        """Records (tensor, offsets) of operands of grouped wgrads: they have rows past the last group."""
        for node, tag in gemms:
            is_wgrad = tag.formats is not None and tag.gemm is Gemm.WGRAD
            offs = offsets(node) if is_wgrad and is_grouped(node) else None
            if isinstance(offs, fx.Node):
                self._ends |= {(untransposed(side)[0], offs) for side in matrices(node, self._build)}

    def rewrite(self, node: fx.Node, tag: GemmTag, formats: tuple[Format, Format]) -> None:
        """Replaces `node`, a GEMM, by mx operators."""
        with self._graph.inserting_before(node):
            lhs, rhs = matrices(node, self._build)
            if is_grouped(node) and any(fmt.hadamard is not None for fmt in formats):
                formats = formats[0].untransformed, formats[1].untransformed
                tag = replace(tag, formats=formats).with_reason(Reason(Code.NO_TRANSFORM))
                set_tag(node, tag)
            state = None if is_grouped(node) else self.states.state_of(tag, (lhs, rhs))
            if state is None and self._tapped and any(fmt.amax.stateful for fmt in formats):
                tag = tag.with_reason(Reason(Code.NO_HISTORY))
                set_tag(node, tag)
            offs = offsets(node) if is_grouped(node) else None
            if offs is not None:
                lhs, rhs = self._without_rest(node, tag, lhs, rhs, offs)
            self._state = None if state is None else (state, tag.tensors[0])
            a = self._quantize(lhs, -1, tag, node)
            self._state = None if state is None else (state, tag.tensors[1])
            b = self._quantize(rhs, -2, tag, node)
            self._state = None
            if offs is not None:
                result = self._scaled(node, a, b, offs, formats, ops.grouped_matmul)
            else:
                result = self._product(node, a, b, formats)
        if HALF in node.meta:  # `node` returns a tuple, and its user is the result
            self._build.replace(next(iter(node.users)), result)
            self._graph.erase_node(node)
        else:
            self._build.replace(node, result)

    def dequantize(self, node: fx.Node, tag: GemmTag, forward: _Formats) -> None:
        """Makes `node`, a GEMM of backward, read the dequantized copy that fprop reads of x or w."""
        side = 0 if tag.tensors[0] in _FORWARD else 1
        word, operand = tag.tensors[side], operands(node)[side]
        with self._graph.inserting_before(node):
            values = self._dequantized(operand, forward, _FORWARD.index(word), -2 + side, node)
        code = Code.NOT_DEQUANTIZED if values is None else Code.DEQUANTIZED
        set_tag(node, tag.with_reason(Reason(code, word)))
        if values is not None:
            node.args = tuple(values if arg is operand else arg for arg in node.args)

    def _dequantized(
        self, operand: fx.Node, forward: _Formats, side: int, dim: int, node: fx.Node
    ) -> fx.Node | None:
        """Returns the values of fprop's cast of `operand` along `dim`; None if there is no such cast."""
        source, swapped = untransposed(widest(operand, self._build, self._products))
        dim = -3 - dim if swapped else dim
        fmt, mx = forward[side], _are_mx(forward)
        dim = -1 if fmt.tile.is_square else dim
        copy = Copy.for_product(fmt, dim) if mx else Copy(format=fmt, dim=dim)
        cast = self._rowwise.get((_same(source), copy)) if dim == -1 else self._casts.get((source, copy))
        if cast is None or value_of(cast.qdata).ndim != value_of(operand).ndim:
            return None
        if origin(source).op == "placeholder" and side == 1 and not fmt.amax.stateful:
            # the weight exists anyway, so backward casts it again instead of keeping its codes
            argument(cast.qdata).meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        args = dim, str(fmt.as_read), value_of(operand).dtype, cast.amax
        values = self._build.call(ops.decode, cast.qdata, cast.scale, *args, like=node)
        return transpose(values, self._build) if swapped else values

    def _product(self, node: fx.Node, a: Quantized, b: Quantized, formats: _Formats) -> fx.Node:
        """Returns the product of `a` and `b`, plus the bias and factors of the operator that it replaces."""
        op = packet(node)
        if op in CONVOLUTIONS:
            bias = node.args[2] if HALF not in node.meta else None
            return as_returned(self._scaled(node, a, b, bias, formats), node, self._build)
        biased = op in BIASED
        alpha, beta = node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)
        plain = alpha == 1 and beta == 1 and op is not aten.addmv
        bias = node.args[0] if biased and plain else None
        result = self._scaled(node, a, b, bias, formats)
        if op in (aten.mv, aten.addmv):
            result = self._build.call(aten.squeeze.dim, result, 1, like=node)
        if biased and not plain:
            added = node.args[0]
            if alpha != 1:
                result = self._build.call(aten.mul.Tensor, result, alpha, like=node)
            if beta != 1:
                added = self._build.call(aten.mul.Tensor, added, beta, like=node)
            if beta != 0:
                result = self._build.call(aten.add.Tensor, result, added, like=node)
        return result

    def _scaled(
        self, node: fx.Node, a: Quantized, b: Quantized, extra: Any, formats: _Formats, op: Any = ops.matmul
    ) -> fx.Node:
        """Returns the product of `a` and `b`, with the tags of `node`. extra: its bias, or its offsets."""
        sides = a.qdata, a.scale, b.qdata, b.scale
        result = value_of(next(iter(node.users)) if HALF in node.meta else node)
        args = extra, result.dtype, *self._format_args(a, b, formats, node)
        product = self._build.call(op, *sides, *args, like=node)
        set_tag(product, *tags_of(node))
        return product

    def _without_rest(
        self, node: fx.Node, tag: GemmTag, lhs: fx.Node, rhs: fx.Node, offs: fx.Node
    ) -> tuple[fx.Node, fx.Node]:
        """Returns the operands of a grouped GEMM, with 0 past the last group where these rows would count."""
        assert tag.formats is not None
        if tag.gemm is Gemm.WGRAD:  # rows past the last group are undefined: keep them out of amaxes
            lhs = self._zero_past_end(lhs, -1, offs, node)
            rhs = self._zero_past_end(rhs, -2, offs, node)
        elif any(fmt.of_tensor for fmt in tag.formats) or (
            tag.gemm is Gemm.DGRAD and tag.sent is Sent.MXFP8
        ):  # these rows count in the amax of the tensor, or in the copy that wgrad's copy is made from
            if value_of(lhs).ndim == 2:
                lhs = self._zero_past_end(lhs, -2, offs, node)
            elif value_of(rhs).ndim == 2:
                rhs = self._zero_past_end(rhs, -1, offs, node)
        elif tag.gemm is Gemm.FPROP:
            # wgrad casts the masked tensor: fprop casts it too, so that one kernel reads it once for both.
            # dgrad does not: routing, mask and two casts of a gradient in one kernel spill registers.
            lhs, rhs = (
                self._zero_past_end(side, rows, offs, node)
                if (untransposed(side)[0], offs) in self._ends
                else side
                for side, rows in ((lhs, -2), (rhs, -1))
            )
        return lhs, rhs

    def _format_args(self, a: Quantized, b: Quantized, formats: _Formats, node: fx.Node) -> tuple[Any, ...]:
        """Returns the formats of both operands, and the list of tensor scales if there are any."""
        read = tuple(Format.mx(fmt.elem) for fmt in formats) if _are_mx(formats) else formats
        names = tuple(map(str, read))
        scales: list[fx.Node] = []
        for amax, name in zip((a.amax, b.amax), names, strict=True):
            if amax is not None:  # scales of a tensor or of its rows, which broadcast to a product
                ndim = value_of(amax).ndim
                if ndim > 1:  # as the only row of a state
                    amax = self._build.call(aten.unsqueeze.default, amax, 0, like=node)
                scales.append(self._build.call(ops.known_scale, amax, 0, name, ndim, like=node))
        return (*names, scales) if scales else names

    def _zero_past_end(self, side: fx.Node, dim: int, offs: fx.Node, node: fx.Node) -> fx.Node:
        """Returns `side` with 0 past the last of its groups, which are along `dim` (−1 or −2)."""
        base, swapped = untransposed(side)
        dim = -3 - dim if swapped else dim
        if (base, dim, offs) not in self._masked:
            value, call = value_of(base), self._build.call
            length = self._build.size(base, dim % 2, like=node)
            rows = self._build.range(length, value.device, node)
            end = call(aten.select.int, offs, 0, -1, like=node)
            mask = call(aten.lt.Tensor, rows, end, like=node)
            if dim == -2:
                mask = call(aten.unsqueeze.default, mask, 1, like=node)
            zero = call(aten.full.default, [], 0.0, like=node, dtype=value.dtype, device=value.device)
            self._masked[base, dim, offs] = call(aten.where.self, mask, base, zero, like=node)
        kept = self._masked[base, dim, offs]
        return transpose(kept, self._build) if swapped else kept

    def _quantize(self, operand: fx.Node, dim: int, tag: GemmTag, node: fx.Node) -> Quantized:
        """Returns qdata and scale of `operand`, contracted along `dim` (−1 or −2); one cast per source."""
        assert tag.formats is not None
        source, swapped = untransposed(widest(operand, self._build, self._products))
        fmt, mx = tag.formats[-1 - dim], _are_mx(tag.formats)
        kept = tag.gemm is Gemm.WGRAD and tag.tensors[-1 - dim] != "dy"
        transcode = tag.saved is Saved.TRANSCODE and kept
        sent = tag.gemm is Gemm.WGRAD and tag.sent is Sent.MXFP8 and mx and not fmt.stochastic
        dim = -3 - dim if swapped else dim
        copy = Copy.for_product(fmt, dim) if mx else Copy(format=fmt, dim=dim)
        rowwise = replace(copy, dim=-1)
        untransformed = replace(rowwise, format=fmt.untransformed)
        if _is_better_picked_later(source, fmt):
            cast = self._picked(source, copy, node)
        elif copy.layout is ScaleLayout.PER_ROW:
            cast = self._square_cast(source, copy, node)
        elif fmt.tile.is_square:
            cast = self._cast(source, rowwise, node)
        elif sent and arrives(source):
            cast = self._transcoded(source, self._cast(source, rowwise, node), copy, node)
        elif transcode and (first := self._rowwise.get((_same(source), untransformed))) is not None:
            cast = self._transcoded(source, first, copy, node)
        else:
            cast = self._cast(source, copy, node)
        _set_itemsize(cast, operand)
        if swapped:
            qdata, scale = (transpose(side, self._build) for side in (cast.qdata, cast.scale))
            amax = cast.amax
            if amax is not None and fmt.row_scaled:
                amax = transpose(amax, self._build)
            return Quantized(qdata, scale, amax)
        return cast

    def _picked(self, source: fx.Node, copy: Copy, node: fx.Node) -> Quantized:
        """Quantizes the stack that `source` picks matrices from, then picks their codes and scales."""
        cast = self._cast(widest(argument(source), self._build, self._products), copy, node)
        rest = source.args[1:]
        call = self._build.call
        return Quantized(*(call(source.target, part, *rest, like=node) for part in (cast.qdata, cast.scale)))

    def _cast(self, source: fx.Node, copy: Copy, node: fx.Node) -> Quantized:
        stateful = self._state is not None and copy.format.amax.stateful
        key = (_same(source) if stateful else source, copy)
        if key not in self._casts:
            like = source if source.op == "call_function" else node
            self._casts[key] = self._emit(source, copy, like)
        cast = self._casts[key]
        if copy.dim == -1 and copy.format.hadamard is None:
            self._rowwise.setdefault((_same(source), copy), cast)
        if stateful and self._state is not None and cast in self._state_amaxes:
            self.states.add(*self._state, self._state_amaxes[cast])
        return cast

    def _emit(self, source: fx.Node, copy: Copy, like: fx.Node) -> Quantized:
        fmt, scale, state_amax, amax = copy.format, None, None, None
        if fmt.hadamard is not None:
            source = self._build.call(ops.hadamard, source, copy.dim, fmt.hadamard, like=like)
        if fmt.amax.stateful and self._state is not None:
            scale, state_amax = self.states.scale(*self._state, source, fmt, like)
        elif fmt.two_level:
            # one node for the casts of a tensor in both layouts, or for its rows
            key = (source, copy.dim) if fmt.row_scaled else (source,)
            if key not in self._amaxes:
                self._amaxes[key] = self._build.call(ops.largest, *key, like=like)
            amax = self._amaxes[key]
        extra = (None, 0, scale and [scale], [amax]) if amax else (None, 0, [scale]) if scale else ()
        node = self._build.call(ops.cast, source, [str(copy)], *extra, like=like)
        qdata, scales = self._build.results(node)
        cast = Quantized(qdata, scales, amax)
        if state_amax is not None:
            self._state_amaxes[cast] = state_amax
        return cast

    def _square_cast(self, source: fx.Node, copy: Copy, node: fx.Node) -> Quantized:
        """Casts in 32×32 tiles: one rowwise copy, and a view of its scales for columnwise reads."""
        qdata, scale, _ = cast = self._cast(source, replace(copy, dim=-1), node)
        if copy.dim == -1:
            return cast
        value = value_of(source)
        call = self._build.call
        rank, width = value.ndim, self._build.size(source, value.ndim - 1, like=node)
        tiles = call(aten.slice.Tensor, scale, rank - 2, 0, 2**63 - 1, BLOCK, like=node)
        column = self._build.range(width, value.device, node)
        tile = call(aten.div.Tensor_mode, column, BLOCK, like=node, rounding_mode="floor")
        scale = call(aten.index.Tensor, tiles, [None] * (rank - 1) + [tile], like=node)
        return Quantized(qdata, scale)

    def _transcoded(self, source: fx.Node, rowwise: Quantized, copy: Copy, node: fx.Node) -> Quantized:
        """Makes `copy` from the `rowwise` copy, so that only the latter is saved for backward."""
        key = (source, copy)
        if key not in self._casts:
            qdata, scale, amax = rowwise
            fmt = str(copy.format.as_read)
            amaxes = () if amax is None else (amax,)
            values = self._build.call(ops.decode, qdata, scale, -1, fmt, torch.float32, *amaxes, like=node)
            self._casts[key] = self._emit(values, copy, node)
        return self._casts[key]


def _are_mx(formats: _Formats) -> bool:
    """Whether both operands are MXFP8, so that an MX GEMM multiplies them."""
    return all(fmt.is_mx for fmt in formats)


def _same(source: fx.Node) -> Any:
    """Returns a key that is equal for equal views of one tensor, because `share` will merge them."""
    if packet(source) not in VIEWS:
        return source
    return source.target, _same(argument(source)), str(source.args[1:]), str(source.kwargs)


def _is_better_picked_later(source: fx.Node, fmt: Format) -> bool:
    """Whether to cast the stack before `source` picks matrices: the stack has at most as many elements."""
    stack, value = picked_stack(source), tensor(source)
    if stack is None or value is None or not fmt.is_mx or fmt.tile == Tile.SQUARE:
        return False
    return numel(stack.meta["val"].shape) <= numel(value.shape)


def _set_itemsize(cast: Quantized, operand: fx.Node) -> None:
    """Writes the item size of `operand` into the metadata of its cast, for `account`."""
    value = tensor(operand)
    qdata = argument(cast[0]) if packet(cast[0]) in PICKS else cast[0]
    cast_node, _ = result_of(qdata)
    if cast_node is not None and value is not None:
        cast_node.meta.setdefault("mx_itemsize", value.element_size())
