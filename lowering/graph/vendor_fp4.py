"""vendor_fp4: give products of FP4 operands to the vendor's FP4 GEMM.

    encoded_mm(qa, sa, qb, sb)  →  packed_mm(bytes_a, tiles_a, bytes_b, tiles_b)
    encode(x, dim)              →  encode_packed(x, dim)        two codes a byte, the contraction innermost
    hadamard(x, dim)            →  a part of that cast, and of the one that finds its largest magnitude

    nvfp4   sm_100, sm_103, sm_120: cuBLAS. Blocks of 16 with E4M3 scales, an FP32 scale for each tensor
    mxfp4   sm_100, sm_103: PyTorch built with MSLK. Blocks of 32 with E8M0 scales

Runs on the joint graph, so that what is kept for backward is packed. Other products are left to
`as_mx` and `expand`, with the reason: batches and groups, an operand that was cast elsewhere, K that 32 does
not divide, N that 16 does not. Accumulation is in FP32, rounded once; a bias of MXFP4 products is added in
the dtype of the result.

Source: `_scaled_mm_v2`, `_scaled_nvfp4_nvfp4` and `_scaled_mxfp4_mxfp4` in PyTorch's
aten/src/ATen/native/cuda/ScaledBlas.cpp, and `meta_scaled_mm_v2` in its torch/_meta_registrations.py.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from typing import cast as cast_to

import torch
from torch import fx
from torch._inductor import config

from mxcompile import ops
from mxcompile.formats import ScaleType
from mxcompile.graph import dead
from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import argument, aten
from mxcompile.graph.tags import set_tag, tags_of, tensor, value_of
from mxcompile.lowering import optional
from mxcompile.lowering.graph.lowering_pass import LoweringPass, Reasons
from mxcompile.lowering.graph.operands import stored
from mxcompile.ops.view import Encode, Product, result_of

FP4_CASTS = ("templates.fp4_casts", "templates.vendor_fp4")

_K, _N = 32, 16
"""Multiples of sizes that the GEMM asks for: 16 bytes of K, and N."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VendorFP4(LoweringPass):
    """For chips with an FP4 GEMM."""

    name: ClassVar[str] = "vendor_fp4"
    templates: ClassVar[tuple[str, ...]] = FP4_CASTS

    @property
    def applies(self) -> bool:
        """Where the vendor's library has a GEMM of FP4 operands."""
        return bool(self.target.fp4_scales)

    def candidates(self, graph: fx.Graph) -> Iterator[fx.Node]:
        """The products whose formats that GEMM multiplies."""
        for node in graph.nodes:
            is_product = node.target in (ops.encoded_mm, ops.encoded_grouped_mm)
            if is_product and self.target.multiplies_fp4(*Product.read(node).forms):
                yield node

    def apply(self, graph: fx.Graph) -> Reasons:
        """Replace those products and name their kernel in their tags. Returns why others are not replaced."""
        reasons: dict[fx.Node, str] = {}
        casts = _PackedCasts(Builder(graph, self.name))
        for node in list(self.candidates(graph)):
            reason = _unmet(Product.read(node))
            if reason:
                reasons[node] = reason
            else:
                _replace(Product.read(node), casts)
        dead.eliminate(graph)
        return reasons


def _unmet(product: Product) -> str:
    """Why the GEMM does not take `product`; "" if it does."""
    if not hasattr(aten, "_scaled_mm_v2"):
        return f"PyTorch {torch.__version__} has no product of packed FP4 operands"
    if config.cpp_wrapper:
        return "AOTInductor and cpp_wrapper cannot call the product of packed FP4 operands"
    if product.forms[0].scale is ScaleType.E8M0 and not optional.has_mslk():
        return "this build of PyTorch has no MSLK, whose product of MXFP4 operands it would call"
    out, bias = value_of(product.node), tensor(product.bias)
    if product.is_grouped or out.ndim != 2:
        return "the FP4 GEMM multiplies two matrices, not batches or groups"
    if out.dtype not in (torch.bfloat16, torch.float16):
        return f"the FP4 GEMM gives BF16 or FP16, not {str(out.dtype).removeprefix('torch.')}"
    if bias is not None and (bias.dtype is not out.dtype or bias.ndim != 1):
        return "the FP4 GEMM adds a bias of the dtype of the result alone"
    k, n = value_of(product.b).shape
    if not _is_multiple(k, _K) or not _is_multiple(n, _N):
        return f"the FP4 GEMM wants k a multiple of {_K} and n one of {_N}; here k={k}, n={n}"
    if product.forms[0].two_level and _tensor_scales(product.alpha) is None:
        return "the scales of both tensors are not at hand"
    if any(_cast_of(*side) is None for side in product.sides):
        return "an operand is stored, or was cast in another graph"
    return ""


def _tensor_scales(alpha: fx.Node | None) -> tuple[fx.Node, fx.Node] | None:
    """The scales of both tensors, whose product `alpha` is."""
    if alpha is None or alpha.target is not aten.mul.Tensor:
        return None
    left, right = alpha.args
    return (left, right) if isinstance(left, fx.Node) and isinstance(right, fx.Node) else None


def _is_multiple(size: Any, of: int) -> bool:
    return isinstance(size, int) and size > 0 and size % of == 0


def _cast_of(qdata: fx.Node, scale: fx.Node) -> tuple[Encode, bool] | None:
    """The cast of an operand, and whether the operand is its transpose."""
    qdata, scale, swapped = stored(qdata, scale)
    (cast, _), (its, _) = result_of(qdata), result_of(scale)
    encode = Encode.of(cast) if cast is its else None
    value = None if encode is None else tensor(encode.x)
    if encode is None or value is None or value.ndim != 2 or encode.scale is not None:
        return None
    return encode, swapped


def _replace(product: Product, casts: _PackedCasts) -> None:
    node, build = product.node, casts.build
    with build.graph.inserting_before(node):
        sides = [part for place, side in enumerate(product.sides) for part in casts.packed(*side, place)]
        scales = _tensor_scales(product.alpha) or ()
        args = (*sides, product.bias, product.out_dtype, *product.words, *scales)
        result = build.call(ops.packed_mm, *args, like=node)
    word = "nvfp4" if product.forms[0].two_level else "mxfp4"
    set_tag(result, *(replace(tag, kernel=f"aten._scaled_mm_v2 ({word})") for tag in tags_of(node)))
    build.replace(node, result)


class _PackedCasts:
    """The packed casts made so far."""

    def __init__(self, build: Builder) -> None:
        self.build = build
        self._made: dict[tuple[fx.Node, int, str], tuple[fx.Node, fx.Node]] = {}

    def packed(self, qdata: fx.Node, scale: fx.Node, place: int) -> tuple[fx.Node, fx.Node]:
        """Bytes and tiles of the operand at `place`, 0 for the left one."""
        source = _cast_of(qdata, scale)
        assert source is not None
        cast, swapped = source
        dim = -2 if swapped != (place == 1) else -1
        key = cast.node, dim, cast.fmt
        if key not in self._made:
            self._made[key] = self._make(cast, dim)
        return self._made[key]

    def _make(self, cast: Encode, dim: int) -> tuple[fx.Node, fx.Node]:
        source, form, amax = cast.x, cast.form.untransformed, cast.amax
        if source.target is ops.hadamard and source.args[1] == dim == -2:
            form = replace(form, hadamard=cast_to(int, source.args[2]))
            amax = None if amax is None else self._largest(source, amax)
            source = argument(source)
        with self.build.graph.inserting_before(cast.node):
            how = source, dim, str(form), cast.seed, cast.stream, amax
            pair = self.build.call(ops.encode_packed, *how, like=cast.node)
            first, second = (self.build.call(operator.getitem, pair, at, like=cast.node) for at in (0, 1))
        pair.meta.update({key: value for key, value in cast.node.meta.items() if key not in pair.meta})
        return first, second

    def _largest(self, transformed: fx.Node, amax: fx.Node) -> fx.Node:
        """`amax`, by an operator that does not need the transform in memory."""
        if amax.target is not ops.largest or argument(amax) is not transformed:
            return amax
        with self.build.graph.inserting_before(amax):
            source, _, signs = transformed.args
            both = self.build.call(ops.hadamard_largest, source, signs, like=amax)
            result = self.build.call(operator.getitem, both, 1, like=amax)
        self.build.replace(amax, result)
        return result
