"""vendor_fp8: run products of FP8 operands with FP32 scales on the vendor's FP8 GEMM.

    matmul(qa, sa, qb, sb) → aten._scaled_mm(qa, qb, sa, sb)

on chips with an FP8 GEMM, by the granularity of the scales:

    tensor              one number for each operand
    channel             [m, 1] and [1, n], contiguous
    1×128 by 1×128      sm_90. [m, k/128] and [k/128, n], with m and n innermost in memory
    1×128 by 128×128    sm_90. Right scales [k/128, n/128] with k/128 innermost, a multiple of 4

The GEMM needs the contraction innermost in both operands: an operand with another layout gets a transposed
copy. If casts have templates, a separate cast writes that copy (see `merge_casts`), and the pass runs on the
joint graph, so that forward saves the copy that backward reads. On gfx942 the exponent bias of elements is
larger by one (``fnuz``): the same bits have half the value, except −0 and NaN, and doubled scales compensate
for it. `expand` emulates products that the GEMM does not take, with the requirement that they violate as the
reason. Accumulation is in FP32.

Source of the requirements: the checks of `torch._scaled_mm` (torch/_meta_registrations.py,
ATen/native/cuda/ScaledBlas.cpp).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from mxcompile import ops
from mxcompile.formats import E5M2, FNUZ, WHOLE, Copy, CopyPart, Format, Tile
from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import aten
from mxcompile.graph.tags import is_empty, set_tag, tags_of, tensor, value_of
from mxcompile.graph.transpose import transpose, untransposed
from mxcompile.lowering import optional
from mxcompile.lowering.choices.configs import contiguous
from mxcompile.lowering.choices.epilogue import is_native
from mxcompile.lowering.choices.families import TABLE, Family, lacking, runs
from mxcompile.lowering.graph.lowering_pass import FP8_CASTS, LoweringPass, Reasons
from mxcompile.lowering.graph.merge_casts import is_fp8
from mxcompile.ops.view import Cast, Product, result_of, results_of

_MULTIPLE = 16
"""The sizes of the right operand are multiples of this."""

_HALVES = (torch.bfloat16, torch.float16)

_ALIGNED = 4
"""The number of scales along their innermost dimension is a multiple of this: 16 bytes."""

_BLOCKS_SINCE = (12, 9)
"""The first CUDA whose GEMM takes block scales."""


class VendorFP8(LoweringPass):
    """Runs FP8 products on the vendor's GEMM, on chips with an FP8 GEMM."""

    family = Family.FP8

    def apply(self, graph: fx.Graph) -> Reasons:
        """Replaces products by the GEMM, and names it in tags. Returns the reasons why others stay."""
        reasons: dict[fx.Node, str] = {}
        build = Builder(graph, self.name)
        copies = _Copies(build, not optional.obstacle(*FP8_CASTS), self.target.fp8_fnuz)
        for node in list(graph.nodes):
            product = Product.from_node(node) if node.target is ops.matmul else None
            if product is None or is_native(node):
                continue
            if TABLE[self.family].takes(product.forms):
                lack = lacking(self.family, product.forms, self.target)
                reason = lack or unmet(product, self.device)
                if not reason:
                    _replace(product, copies)
                    continue
                reasons[node] = reason
            if runs(Family.AS_MX, product.forms, self.target):
                _along_k(product, copies)
        return reasons


class JointVendorFP8(VendorFP8):
    """Runs FP8 products on the vendor's GEMM, with transposed copies from casts of the joint graph."""

    templates = FP8_CASTS


def unmet(product: Product, device: str) -> str:
    """Returns the reason why the vendor's FP8 GEMM does not take `product`, or "".

    product: operands are FP8 with FP32 scales. device: device type of the target's tensors.
    """
    lhs, rhs = product.forms
    out, a, b = map(value_of, (product.node, product.a, product.b))
    if a.ndim != 2:
        return "no FP8 GEMM for batches of matrices"
    if out.device.type != device:
        return "it is not on the target's device"
    sizes = zip("kn", b.shape, strict=True)
    odd = [f"{key}={size}" for key, size in sizes if not isinstance(size, int) or size % _MULTIPLE]
    if odd or is_empty((*out.shape, b.shape[0])):
        return f"the FP8 GEMM takes multiples of {_MULTIPLE} ({', '.join(odd) or 'empty'})"
    if rhs.elem == E5M2 and (lhs.elem == E5M2 or lhs.tile == Tile.CHANNEL):
        return "the FP8 GEMM takes no E5M2 on the right"
    if lhs.tile == Tile.CHANNEL and out.dtype is not torch.bfloat16:
        return "the FP8 GEMM with a scale per channel gives BF16"
    if lhs.tile.along != WHOLE and (reason := _unmet_blocks(a, rhs.tile)):
        return reason
    bias = tensor(product.bias)
    if bias is not None and not (bias.ndim == 1 and bias.dtype is out.dtype and out.dtype in _HALVES):
        return "the FP8 GEMM takes a vector bias in its result's half precision"
    return ""


def _unmet_blocks(a: Tensor, right: Tile) -> str:
    """Returns the violated requirement of a GEMM with several scales along K, or ""."""
    version = torch.version.cuda
    if version is not None and tuple(map(int, version.split(".")[:2])) < _BLOCKS_SINCE:
        return f"the FP8 GEMM takes block scales from CUDA 12.9 on (this is {version})"
    rows, k = a.shape
    if not isinstance(rows, int) or rows % _ALIGNED:
        return f"the FP8 GEMM with block scales takes multiples of {_ALIGNED} rows (m={rows})"
    num_blocks = -(-k // right.along)
    if right.across > 1 and num_blocks % _ALIGNED:
        return f"the FP8 GEMM takes multiples of {_ALIGNED} blocks along k ({num_blocks})"
    return ""


def _replace(product: Product, copies: _Copies) -> None:
    node, forms, build = product.node, product.forms, copies.build
    with build.graph.inserting_before(node):
        operands = zip((product.a, transpose(product.b, build)), forms, strict=True)
        lhs, rhs = (copies.elements(matrix, form) for matrix, form in operands)
        scale_a, scale_b = _scales(product.scale_a, product.scale_b, forms, copies)
        if copies.fnuz:
            scale_a, scale_b = (build.call(aten.mul.Scalar, s, 2.0, like=node) for s in (scale_a, scale_b))
        args = (lhs, transpose(rhs, build), scale_a, scale_b, product.bias, None, product.out_dtype, False)
        result = build.call(aten._scaled_mm.default, *args, like=node)
    tiles = " and ".join(dict.fromkeys(str(form.tile) for form in forms))
    set_tag(result, *(replace(tag, kernel=f"aten._scaled_mm ({tiles} scales)") for tag in tags_of(node)))
    build.replace(node, result)


def _along_k(product: Product, copies: _Copies) -> None:
    """Makes `product`, which the MX GEMM will run, read K-major copies, where casts can write them."""
    a, b = product.a, product.b
    with copies.build.graph.inserting_before(product.node):
        lhs, rhs = copies.transposed(a), copies.transposed(transpose(b, copies.build))
        rhs = None if rhs is None else transpose(rhs, copies.build)
    product.node.args = product.arguments(a=lhs or a, b=rhs or b)


def _scales(
    lhs: fx.Node, rhs: fx.Node, forms: tuple[Format, ...], copies: _Copies
) -> tuple[fx.Node, fx.Node]:
    """Returns both scales in the shapes and layouts that the GEMM takes."""
    build = copies.build
    if forms[0].tile == Tile.CHANNEL:  # views of vectors, so that strides are 1 also for transposed operands
        views = zip((lhs, rhs), ([-1, 1], [1, -1]), strict=True)
        vectors = (build.call(aten.view.default, untransposed(s)[0], to, like=s) for s, to in views)
        return next(vectors), next(vectors)
    if forms[0].tile.along == WHOLE:
        return lhs, rhs
    lhs = transpose(copies.rows(transpose(lhs, build)), build)
    if forms[1].tile.across > 1:
        return lhs, transpose(copies.rows(transpose(rhs, build)), build)
    return lhs, copies.rows(rhs)


class _Copies:
    """Copies of matrices, each made once: transposes, or elements in FNUZ types."""

    def __init__(self, build: Builder, transposes: bool, fnuz: bool) -> None:
        self.build = build
        self.fnuz = fnuz
        self._transposes = transposes
        self._copies: dict[tuple[fx.Node, Any], fx.Node] = {}

    def elements(self, matrix: fx.Node, form: Format) -> fx.Node:
        """Returns `matrix`, in `form`, with its last dimension innermost, in the element type of the GEMM."""
        if (copy := self.transposed(matrix)) is not None:
            return copy
        base, swapped = untransposed(matrix)
        matrix = self.rows(matrix if swapped else base)
        if not self.fnuz:
            return matrix
        arguments = matrix, None, -1, str(form), FNUZ[form.elem.dtype]
        return self._once((matrix, ops.decode), lambda: self.build.call(ops.decode, *arguments, like=matrix))

    def transposed(self, matrix: fx.Node) -> fx.Node | None:
        """Returns a copy that a cast writes transposed; None unless `matrix` transposes a cast's result."""
        base, swapped = untransposed(matrix)
        cast = Cast.from_node(result_of(base)[0])
        if not self._transposes or not swapped or cast is None or not is_fp8(cast):
            return None
        return self._once((base, CopyPart.ELEMENTS), lambda: self._transposed(cast))

    def rows(self, matrix: fx.Node) -> fx.Node:
        """Returns `matrix` with its last dimension innermost and rows aligned, a copy if necessary."""
        value = value_of(matrix)
        if contiguous(value.stride(), value.itemsize) == 1:
            return matrix
        form = torch.contiguous_format
        return self._once(
            untransposed(matrix),
            lambda: self.build.call(aten.clone.default, matrix, like=matrix, memory_format=form),
        )

    def _once(self, key: tuple[fx.Node, Any], make: Callable[[], fx.Node]) -> fx.Node:
        if key not in self._copies:
            self._copies[key] = make()
        return self._copies[key]

    def _transposed(self, cast: Cast) -> fx.Node:
        """Returns the transposed elements of `cast`, by a second cast that `merge_casts` merges with it."""
        node = cast.node
        scale = cast.scale or next((result for index, result in results_of(node) if index == 1), None)
        assert scale is not None, "a product reads the scale of its operand"
        part = CopyPart.ELEMENTS
        copy = Copy(format=cast.form, dim=cast.side, part=part, transposed=True, fnuz=self.fnuz)
        new_node = self.build.call(ops.cast, cast.x, [str(copy)], None, 0, [scale], like=node)
        new_node.meta = node.meta | new_node.meta
        (result,) = self.build.results(new_node)
        return result
