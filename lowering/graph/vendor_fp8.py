"""vendor_fp8: products of FP8 operands with FP32 scales that the vendor's own FP8 GEMM runs.

    encoded_mm(qa, sa, qb, sb) → aten._scaled_mm(qa, qb, sa, sb)

for one scale a tensor or a channel, on chips with an FP8 GEMM. It wants the contraction innermost in both
operands: one cast along its other dimension gets a transposed copy, which its cast writes where both are in
one graph. What it does not take is left to `expand`, with the reason. Accumulation is in FP32.

Source: the checks of `torch._scaled_mm` (torch/_meta_registrations.py, ATen/native/cuda/ScaledBlas.cpp).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from mxcompile import ops
from mxcompile.formats import E5M2, Format, ScaleType, Tile
from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import aten, packet
from mxcompile.graph.tags import set_tag, tags_of, tensor
from mxcompile.graph.transpose import transpose, untransposed
from mxcompile.lowering.targets import Target

_MULTIPLE = 16
"""Of the sizes of the right operand."""

_HALVES = (torch.bfloat16, torch.float16)


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
        copies: dict[fx.Node, fx.Node] = {}
        for node in list(graph.nodes):
            if packet(node) is ops.encoded_mm.overloadpacket and self.target.fp8_tiles:
                reason = self._obstacle(node)
                if reason is None:
                    _replace(node, build, copies)
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
        if tile != forms[1].tile or str(tile) not in self.target.fp8_tiles:
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
        bias = tensor(node.args[4])
        if bias is not None and (bias.ndim != 1 or bias.dtype is not out.dtype or out.dtype not in _HALVES):
            return "the FP8 GEMM takes a vector of its result's half precision as bias"
        return None


def _replace(node: fx.Node, build: Builder, copies: dict[fx.Node, fx.Node]) -> None:
    out = tensor(node)
    assert out is not None
    a, scale_a, b, scale_b, bias = node.args[:5]
    assert isinstance(a, fx.Node)
    assert isinstance(b, fx.Node)
    tile = Format.of(str(node.args[6])).tile
    with build.graph.inserting_before(node):
        left = _rows(a, build, copies)
        if tile == Tile.CHANNEL:  # a vector, however its matrix lies: with strides of 1
            scale_a = build.call(aten.view.default, _stored(scale_a), [-1, 1], like=node)
            scale_b = build.call(aten.view.default, _stored(scale_b), [1, -1], like=node)
        right = transpose(_rows(transpose(b, build), build, copies), build)
        result = build.call(
            aten._scaled_mm.default, left, right, scale_a, scale_b, bias, None, out.dtype, False, like=node
        )
    set_tag(result, *(replace(tag, kernel=f"aten._scaled_mm ({tile} scales)") for tag in tags_of(node)))
    build.replace(node, result)


def _stored(scale: object) -> fx.Node:
    """`scale` as its cast made it."""
    assert isinstance(scale, fx.Node)
    return untransposed(scale)[0]


def _rows(matrix: fx.Node, build: Builder, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """`matrix` with its last dimension innermost in memory, copied if need be."""
    value = tensor(matrix)
    assert value is not None
    inner = value.stride()[1]
    if isinstance(inner, int) and inner == 1:
        return matrix
    if matrix not in copies:
        copies[matrix] = build.call(
            aten.clone.default, matrix, like=matrix, memory_format=torch.contiguous_format
        )
    return copies[matrix]
