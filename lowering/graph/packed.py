"""packed: run products of FP4 operands on the chip's FP4 instruction, which reads two codes per byte.

    matmul(qa, sa, qb, sb)               →  matmul(bytes_a, bytes_sa, bytes_bᵀ, bytes_sb, packed formats)
    cast(x, codes)                       →  cast(x, packed codes)        the contraction innermost
    codes of w, s                        →  w, s                         for a weight that is stored packed
    hadamard(x, −2)                      →  a part of that cast, and of the kernel of its amax

    nvfp4   sm_100, sm_103, sm_120               blocks of 16 with E4M3 scales, an FP32 scale for each tensor
    mxfp4   sm_100, sm_103, sm_120, gfx950       blocks of 32 with E8M0 scales

`choices.defaults` selects the kernel of a product. Casts of matrices write scales in the chip's layout,
other casts write them row-major. Scales of stored weights are row-major. For large products the pass tiles
these scales, so that kernels on tiled scales can run; tiling moves at most a quarter of the weight's bytes.
Other products read row-major scales.

Runs on the joint graph, so that forward saves packed copies. `promote_to_mx` and `expand` take the other
products, with a reason: an operand was cast in another graph, or is stored with another dimension innermost.

Source: PTX ISA, block scaling of tcgen05.mma and mma, kinds mxf4 and mxf4nvf4; CDNA 4 ISA, V_MFMA_SCALE.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast as cast_to

import torch
from torch import fx

from mxcompile import ops
from mxcompile.formats import Copy, CopyPart, Format, ScaleLayout
from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import argument, aten
from mxcompile.graph.tags import hint, set_tag, tags_of, tensor, value_of
from mxcompile.graph.transpose import transpose
from mxcompile.lowering.choices import configs, defaults
from mxcompile.lowering.choices.families import TABLE, Family, lacking
from mxcompile.lowering.graph.lowering_pass import NATIVE, LoweringPass, Reasons
from mxcompile.lowering.graph.native import unmet
from mxcompile.lowering.graph.operands import stored
from mxcompile.lowering.targets import Target
from mxcompile.ops.view import Cast, Product, Unpack, result_of


class Packed(LoweringPass):
    """Packs the operands of FP4 products, on chips with an FP4 instruction."""

    family = Family.PACKED
    templates = ("templates.fp4_casts", *NATIVE[1:])

    def candidates(self, graph: fx.Graph) -> Iterator[fx.Node]:
        """Returns the products of FP4 operands that are not packed."""
        products = (product for product in Product.calls(graph) if not product.is_packed)
        return (product.node for product in products if TABLE[self.family].takes(product.forms))

    def apply(self, graph: fx.Graph) -> Reasons:
        """Replaces the candidates that the chip multiplies. Returns the reasons why others stay."""
        reasons: dict[fx.Node, str] = {}
        operands = _PackedOperands(Builder(graph, self.name), self.target)
        for node in list(self.candidates(graph)):
            product = Product.read(node)
            lack = lacking(self.family, product.forms, self.target)
            if reason := lack or unmet(product, self.device) or _unmet_scales(product):
                reasons[node] = reason
                continue
            sides = [_Side.from_operand(*side, index) for index, side in enumerate(product.sides)]
            if reason := next((side for side in sides if isinstance(side, str)), ""):
                reasons[node] = reason
            else:
                _replace(product, [side for side in sides if isinstance(side, _Side)], operands)
        return reasons


def _unmet_scales(product: Product) -> str:
    """Returns why the tensor scales of `product` keep the chip from multiplying it, or ""."""
    if not product.forms[0].two_level:
        return ""
    if len(scales := product.tensors or ()) != len(product.sides):
        return "the graph lacks the global scale of an operand"
    several = any(value_of(scale).numel() != 1 for scale in scales)
    return "a tensor has several scales, and groups share one" if product.is_grouped and several else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Side:
    """One operand of a product, before transposes.

    source: its cast, or the packed codes of a stored weight. scale: scale of the weight. dim: contracted
    dimension of the source, −1 or −2.
    """

    source: Cast | Unpack
    scale: fx.Node
    dim: int

    @staticmethod
    def from_operand(qdata: fx.Node, scale: fx.Node, index: int) -> _Side | str:
        """Returns the operand at `index` (0: left, 1: right), or the reason why it cannot be packed."""
        qdata, scale, swapped = stored(qdata, scale)
        dim = -2 if swapped != (index == 1) else -1
        unpack = Unpack.from_node(qdata)
        if unpack is not None:
            codes = value_of(unpack.qdata)
            if dim != -1 or unpack.block_dim % codes.ndim != codes.ndim - 1 or codes.stride(-1) != 1:
                return "a weight is stored with another dimension innermost than the contraction"
            return _Side(source=unpack, scale=scale, dim=dim)
        (cast, _), (scale_cast, _) = result_of(qdata), result_of(scale)
        encode = Cast.from_node(cast) if cast is scale_cast else None
        if encode is None or tensor(encode.x) is None or encode.scale is not None:
            return "an operand was cast in another graph"
        packed = [*value_of(encode.x).shape]
        packed[dim] = (packed[dim] + 1) // 2
        if all(size == 1 for size in packed):
            return "an operand is one byte"
        return _Side(source=encode, scale=scale, dim=dim)


def _replace(product: Product, sides: list[_Side], operands: _PackedOperands) -> None:
    node, build = product.node, operands.build
    with build.graph.inserting_before(node):
        (a, scale_a), (b, scale_b) = (operands.packed(product, side) for side in sides)
        b, scale_b = (part if value_of(part).ndim == 1 else transpose(part, build) for part in (b, scale_b))
        formats = (str(replace(form, packed=True)) for form in product.forms)
        args = a, scale_a, b, scale_b, product.extra, product.out_dtype, *formats
        scales = (product.tensors,) if product.tensors else ()
        result = build.call(node.target, *args, *scales, like=node)
    set_tag(result, *tags_of(node))
    build.replace(node, result)


class _PackedOperands:
    """Makes the packed operands of one graph, each of them once."""

    def __init__(self, build: Builder, target: Target) -> None:
        self.build = build
        self._target = target
        self._casts: dict[tuple[fx.Node, int, str, ScaleLayout], tuple[fx.Node, fx.Node]] = {}
        self._scales: dict[tuple[fx.Node, ScaleLayout], fx.Node] = {}

    def packed(self, product: Product, side: _Side) -> tuple[fx.Node, fx.Node]:
        """Returns the bytes [.., rows, K/2] of an operand, and its scales. Inserts at the insertion point."""
        layout = ScaleLayout.ROW_MAJOR
        if value_of(product.node).ndim == 2 and not product.is_grouped:
            layout = self._target.scale_layout
        if isinstance(side.source, Unpack):
            tiles = layout is ScaleLayout.TILED_128X4 and self._reads_tiles(product)
            layout = layout if tiles else ScaleLayout.ROW_MAJOR
            return side.source.qdata, self._stored_scale(side.source, side.scale, layout)
        key = side.source.node, side.dim, side.source.fmt, layout
        if key not in self._casts:
            self._casts[key] = self._cast(side.source, side.dim, layout)
        return self._casts[key]

    def _reads_tiles(self, product: Product) -> bool:
        """Whether `product` is large and has a kernel that needs tiled scales."""
        m, n, k = map(hint, (*value_of(product.node).shape, value_of(product.a).shape[-1]))
        size, form = defaults.MXProduct(kind=defaults.DENSE, m=m, n=n, k=k), product.forms[0]
        ours = configs.tiled_products(self._target, m, n, k // form.elem.per_byte)
        return size.is_large(self._target) and bool(ours or form.scale in self._target.library_fp4)

    def _stored_scale(self, codes: Unpack, scale: fx.Node, layout: ScaleLayout) -> fx.Node:
        """Returns the scales of a stored weight as bytes in `layout`."""
        key = scale, layout
        if key not in self._scales:
            bytes_ = scale
            if value_of(scale).dtype is not torch.uint8:
                bytes_ = self.build.call(aten.view.dtype, scale, torch.uint8, like=scale)
            if layout is ScaleLayout.TILED_128X4:
                arguments = bytes_, codes.qdata, -1, codes.fmt, str(layout)
                bytes_ = self.build.call(ops.scale_bytes, *arguments, like=scale)
            self._scales[key] = bytes_
        return self._scales[key]

    def _cast(self, cast: Cast, dim: int, layout: ScaleLayout) -> tuple[fx.Node, fx.Node]:
        source, form, amax = cast.x, cast.form.untransformed, cast.amax
        if source.target is ops.hadamard and source.args[1] == dim == -2:
            form = replace(form, hadamard=cast_to(int, source.args[2]))
            amax = None if amax is None else self._largest(source, amax, form)
            source = argument(source)
        with self.build.graph.inserting_before(cast.node):
            copy = Copy.packed(form, dim, layout)
            args = source, [str(copy)], cast.seed, cast.stream, None, amax and [amax]
            pair = self.build.call(ops.cast, *args, like=cast.node)
            first, second = self.build.results(pair)
        pair.meta = cast.node.meta | pair.meta
        return first, second

    def _largest(self, transformed: fx.Node, amax: fx.Node, form: Format) -> fx.Node:
        """Returns the amax of `transformed` by a cast that does not store the transform; replaces `amax`."""
        if amax.target is not ops.largest or argument(amax) is not transformed:
            return amax
        with self.build.graph.inserting_before(amax):
            copy = Copy(format=replace(form, packed=True), dim=-2, part=CopyPart.LARGEST)
            cast = self.build.call(ops.cast, argument(transformed), [str(copy)], like=amax)
            (result,) = self.build.results(cast)
        self.build.replace(amax, result)
        return result
