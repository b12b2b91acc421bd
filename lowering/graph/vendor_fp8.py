"""vendor_fp8: products of FP8 operands with FP32 scales that the vendor's own FP8 GEMM runs.

    encoded_mm(qa, sa, qb, sb) → aten._scaled_mm(qa, qb, sa, sb)

on chips with an FP8 GEMM, by the extents of the scales:

    tensor              one number each
    channel             [m, 1] and [1, n], contiguous
    1×128 by 1×128      sm_90. [m, k/128] and [k/128, n], each with m or n innermost in memory
    1×128 by 128×128    sm_90. The right one [k/128, n/128] with k/128 innermost, a multiple of 4

It wants the contraction innermost in both operands: one cast along its other dimension gets a transposed
copy, which its cast writes where both are in one graph. On gfx942 the bias of elements' exponents is larger
by one (``fnuz``): the same bits are half the value, but for −0 and NaN, and the scales make up for it. What
the GEMM does not take is left to `expand`, with the reason. Accumulation is in FP32.

Source: the checks of `torch._scaled_mm` (torch/_meta_registrations.py, ATen/native/cuda/ScaledBlas.cpp).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from mxcompile import ops
from mxcompile.formats import E5M2, WHOLE, Format, ScaleType, Tile
from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import aten, packet
from mxcompile.graph.tags import set_tag, tags_of, tensor
from mxcompile.graph.transpose import transpose, untransposed
from mxcompile.lowering.targets import Target

_MULTIPLE = 16
"""Of the sizes of the right operand."""

_HALVES = (torch.bfloat16, torch.float16)

_ALIGNED = 4
"""Of the numbers of scales along the dimension that is innermost in their memory: 16 bytes."""

_BLOCKS_SINCE = (12, 9)
"""The CUDA whose GEMM takes scales of blocks."""

_Copies = dict[tuple[fx.Node, Any], fx.Node]
"""What was made of a matrix: its transpose copied, or its elements as another type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VendorFP8:
    """target: the chip. device: type of the device that stands for it."""

    target: Target
    device: str
    name: ClassVar[str] = "vendor_fp8"

    def apply(self, graph: fx.Graph) -> dict[fx.Node, str]:
        """Replace those products and name their kernel in their tags. Why others are not, by node."""
        reasons: dict[fx.Node, str] = {}
        build = Builder(graph, VendorFP8.name)
        copies: _Copies = {}
        for node in list(graph.nodes):
            if packet(node) is ops.encoded_mm.overloadpacket and self.target.fp8_tiles:
                reason = self._obstacle(node)
                if reason is None:
                    _replace(node, build, copies, fnuz=self.target.fp8_fnuz)
                elif reason:
                    reasons[node] = reason
        return reasons

    def _obstacle(self, node: fx.Node) -> str | None:
        """Why `node` is not such a product, None if it is; "" where its formats are of no FP8 GEMM."""
        out, a, b = map(tensor, (node, node.args[0], node.args[2]))
        forms = [Format.of(str(word)) for word in node.args[6:8]]
        assert out is not None
        assert a is not None
        assert b is not None
        if any(form.scale is not ScaleType.FP32 or form.elem.is_coded for form in forms):
            return ""
        tile = forms[0].tile
        if not self.target.multiplies_fp8(*(str(form.tile) for form in forms)):
            return f"no FP8 GEMM of {self.target.name} for scales {forms[0].tile} and {forms[1].tile}"
        if a.ndim != 2 or out.device.type != self.device:
            return "no FP8 GEMM for batches of matrices" if a.ndim != 2 else "not on the target's device"
        sizes = {"k": b.shape[0], "n": b.shape[1]}
        odd = [key for key, size in sizes.items() if not isinstance(size, int) or size % _MULTIPLE]
        if odd or any(isinstance(size, int) and size == 0 for size in (*out.shape, b.shape[0])):
            said = ", ".join(f"{key}={sizes[key]}" for key in odd) or "empty"
            return f"the FP8 GEMM takes multiples of {_MULTIPLE} ({said})"
        if all(form.elem == E5M2 for form in forms) or (tile == Tile.CHANNEL and forms[1].elem == E5M2):
            return "the FP8 GEMM takes no E5M2 on the right"
        if tile == Tile.CHANNEL and out.dtype is not torch.bfloat16:
            return "the FP8 GEMM with scales a channel gives BF16"
        if tile.along != WHOLE and (reason := _obstacle_of_blocks(a, forms[1])):
            return reason
        bias = tensor(node.args[4])
        if bias is not None and (bias.ndim != 1 or bias.dtype is not out.dtype or out.dtype not in _HALVES):
            return "the FP8 GEMM takes a vector of its result's half precision as bias"
        return None


def _obstacle_of_blocks(a: Tensor, right: Format) -> str:
    """Why `a`, scaled in blocks, cannot be the left operand of one of format `right`; "" if it can."""
    version = torch.version.cuda
    if version is not None and tuple(map(int, version.split(".")[:2])) < _BLOCKS_SINCE:
        return f"the FP8 GEMM takes scales of blocks from CUDA 12.9 on (this is {version})"
    rows, blocks = a.shape[0], -(-a.shape[1] // right.tile.along)
    if not isinstance(rows, int) or rows % _ALIGNED:
        return f"the FP8 GEMM with scales of blocks takes multiples of {_ALIGNED} (m={rows})"
    if right.tile.across > 1 and blocks % _ALIGNED:
        return f"the FP8 GEMM takes multiples of {_ALIGNED} blocks along k ({blocks})"
    return ""


def _replace(node: fx.Node, build: Builder, copies: _Copies, *, fnuz: bool) -> None:
    out = tensor(node)
    assert out is not None
    a, scale_a, b, scale_b, bias = node.args[:5]
    assert isinstance(a, fx.Node)
    assert isinstance(b, fx.Node)
    forms = [Format.of(str(word)) for word in node.args[6:8]]
    with build.graph.inserting_before(node):
        left, right = _rows(a, build, copies), _rows(transpose(b, build), build, copies)
        scale_a, scale_b = _scales(scale_a, scale_b, forms, build, copies)
        if fnuz:
            left, right = (_fnuz(matrix, build, copies) for matrix in (left, right))
            scale_a, scale_b = (build.call(aten.mul.Scalar, s, 2.0, like=node) for s in (scale_a, scale_b))
        args = (left, transpose(right, build), scale_a, scale_b, bias, None, out.dtype, False)
        result = build.call(aten._scaled_mm.default, *args, like=node)
    words = " and ".join(dict.fromkeys(str(form.tile) for form in forms))
    set_tag(result, *(replace(tag, kernel=f"aten._scaled_mm ({words} scales)") for tag in tags_of(node)))
    build.replace(node, result)


def _scales(
    left: object, right: object, forms: list[Format], build: Builder, copies: _Copies
) -> tuple[fx.Node, fx.Node]:
    """Both scales, in the shape and layout that their GEMM takes."""
    assert isinstance(left, fx.Node)
    assert isinstance(right, fx.Node)
    if forms[0].tile == Tile.CHANNEL:  # a vector, however its matrix lies: with strides of 1
        views = zip((left, right), ([-1, 1], [1, -1]), strict=True)
        vectors = (build.call(aten.view.default, untransposed(s)[0], to, like=s) for s, to in views)
        return next(vectors), next(vectors)
    if forms[0].tile.along == WHOLE:
        return left, right
    left = transpose(_rows(transpose(left, build), build, copies), build)
    if forms[1].tile.across > 1:
        return left, transpose(_rows(transpose(right, build), build, copies), build)
    return left, _rows(right, build, copies)


def _fnuz(matrix: fx.Node, build: Builder, copies: _Copies) -> fx.Node:
    """`matrix` as elements of half the value."""
    if (matrix, ops.as_fnuz) not in copies:
        copies[matrix, ops.as_fnuz] = build.call(ops.as_fnuz, matrix, like=matrix)
    return copies[matrix, ops.as_fnuz]


def _rows(matrix: fx.Node, build: Builder, copies: _Copies) -> fx.Node:
    """`matrix` with its last dimension innermost in memory, copied if need be."""
    value = tensor(matrix)
    assert value is not None
    inner = value.stride()[1]
    if isinstance(inner, int) and inner == 1:
        return matrix
    base, swapped = untransposed(matrix)
    if (base, swapped) not in copies:
        form = torch.contiguous_format
        copies[base, swapped] = build.call(aten.clone.default, matrix, like=matrix, memory_format=form)
    return copies[base, swapped]
