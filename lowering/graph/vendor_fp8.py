"""vendor_fp8: products of FP8 operands with FP32 scales that the vendor's own FP8 GEMM runs.

    encoded_mm(qa, sa, qb, sb) → aten._scaled_mm(qa, qb, sa, sb)

on chips with an FP8 GEMM, by the extents of the scales:

    tensor              one number each
    channel             [m, 1] and [1, n], contiguous
    1×128 by 1×128      sm_90. [m, k/128] and [k/128, n], each with m or n innermost in memory
    1×128 by 128×128    sm_90. The right one [k/128, n/128] with k/128 innermost, a multiple of 4

It wants the contraction innermost in both operands: one cast along its other dimension gets a transposed
copy, which a cast of its own writes where casts are templates (see `fp8_layouts`). There this runs on the
joint graph, so that what is kept for backward is what backward reads. On gfx942 the bias of elements'
exponents is larger by one (``fnuz``): the same bits are half the value, but for −0 and NaN, and the scales
make up for it. What the GEMM does not take is left to `expand`, with the reason. Accumulation is in FP32.

Source: the checks of `torch._scaled_mm` (torch/_meta_registrations.py, ATen/native/cuda/ScaledBlas.cpp).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from mxcompile import ops
from mxcompile.formats import E5M2, WHOLE, Format, ScaleType, Tile
from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import argument, aten, packet
from mxcompile.graph.tags import set_tag, tags_of, tensor
from mxcompile.graph.transpose import transpose, untransposed
from mxcompile.lowering import optional
from mxcompile.lowering.graph.fp8_layouts import fits
from mxcompile.lowering.graph.lowering_pass import FP8_CASTS, LoweringPass, Reasons

_MULTIPLE = 16
"""Of the sizes of the right operand."""

_HALVES = (torch.bfloat16, torch.float16)

_ALIGNED = 4
"""Of the numbers of scales along the dimension that is innermost in their memory: 16 bytes."""

_BLOCKS_SINCE = (12, 9)
"""The CUDA whose GEMM takes scales of blocks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VendorFP8(LoweringPass):
    """For chips with an FP8 GEMM."""

    name: ClassVar[str] = "vendor_fp8"

    @property
    def applies(self) -> bool:
        """Where the vendor's GEMM takes FP8 operands."""
        return bool(self.target.fp8_tiles)

    def apply(self, graph: fx.Graph) -> Reasons:
        """Replace those products and name their kernel in their tags. Returns why others are not replaced."""
        reasons: dict[fx.Node, str] = {}
        build = Builder(graph, self.name)
        copies = _Copies(build, not optional.obstacle(*FP8_CASTS), self.target.fp8_fnuz)
        for node in list(graph.nodes):
            if packet(node) is ops.encoded_mm.overloadpacket:
                reason = self._obstacle(node)
                if reason is None:
                    _replace(node, copies)
                    continue
                if self.target.multiplies_mx(*_formats(node)):
                    _along_k(node, copies)
                if reason:
                    reasons[node] = reason
        graph.eliminate_dead_code()
        return reasons

    def _obstacle(self, node: fx.Node) -> str | None:
        """Why `node` is not such a product, None if it is; "" where its formats are of no FP8 GEMM."""
        out, a, b = map(tensor, (node, node.args[0], node.args[2]))
        forms = _formats(node)
        assert out is not None
        assert a is not None
        assert b is not None
        if any(form.scale is not ScaleType.FP32 or form.elem.is_coded for form in forms):
            return ""
        tile = forms[0].tile
        if not self.target.multiplies_fp8(*(str(form.tile) for form in forms)):
            scales = " and ".join(dict.fromkeys(str(form.tile) for form in forms))
            others = self.target.native and not self.target.multiplies_mx(*forms)
            hint = "; its MX GEMM multiplies powers of two (scale: pow2)" if others else ""
            return f"no FP8 GEMM of {self.target.name} for scales {scales}{hint}"
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


@dataclass(frozen=True, kw_only=True, slots=True)
class JointVendorFP8(VendorFP8):
    """The same on the joint graph, where casts write the transposes that the GEMM reads."""

    templates: ClassVar[tuple[str, ...]] = FP8_CASTS


def _formats(node: fx.Node) -> list[Format]:
    return [Format.of(str(word)) for word in node.args[6:8]]


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


def _replace(node: fx.Node, copies: _Copies) -> None:
    out, build = tensor(node), copies.build
    assert out is not None
    a, scale_a, b, scale_b, bias = node.args[:5]
    assert isinstance(a, fx.Node)
    assert isinstance(b, fx.Node)
    forms = _formats(node)
    with build.graph.inserting_before(node):
        left, right = (copies.elements(matrix) for matrix in (a, transpose(b, build)))
        scale_a, scale_b = _scales(scale_a, scale_b, forms, copies)
        if copies.fnuz:
            scale_a, scale_b = (build.call(aten.mul.Scalar, s, 2.0, like=node) for s in (scale_a, scale_b))
        args = (left, transpose(right, build), scale_a, scale_b, bias, None, out.dtype, False)
        result = build.call(aten._scaled_mm.default, *args, like=node)
    words = " and ".join(dict.fromkeys(str(form.tile) for form in forms))
    set_tag(result, *(replace(tag, kernel=f"aten._scaled_mm ({words} scales)") for tag in tags_of(node)))
    build.replace(node, result)


def _along_k(node: fx.Node, copies: _Copies) -> None:
    """Let `node`, which the MX GEMM will run, read K-major what casts of their own lay out so."""
    a, b = argument(node, 0), argument(node, 2)
    with copies.build.graph.inserting_before(node):
        left, right = copies.transposed(a), copies.transposed(transpose(b, copies.build))
        right = None if right is None else transpose(right, copies.build)
    node.update_arg(0, left or a)
    node.update_arg(2, right or b)


def _scales(left: object, right: object, forms: list[Format], copies: _Copies) -> tuple[fx.Node, fx.Node]:
    """Both scales, in the shape and layout that their GEMM takes."""
    build = copies.build
    assert isinstance(left, fx.Node)
    assert isinstance(right, fx.Node)
    if forms[0].tile == Tile.CHANNEL:  # a vector, however its matrix lies: with strides of 1
        views = zip((left, right), ([-1, 1], [1, -1]), strict=True)
        vectors = (build.call(aten.view.default, untransposed(s)[0], to, like=s) for s, to in views)
        return next(vectors), next(vectors)
    if forms[0].tile.along == WHOLE:
        return left, right
    left = transpose(copies.rows(transpose(left, build)), build)
    if forms[1].tile.across > 1:
        return left, transpose(copies.rows(transpose(right, build)), build)
    return left, copies.rows(right)


class _Copies:
    """What was made of matrices: their transposes copied, or their elements as another type."""

    def __init__(self, build: Builder, transposes: bool, fnuz: bool) -> None:
        self.build = build
        self.fnuz = fnuz
        self._transposes = transposes
        self._made: dict[tuple[fx.Node, Any], fx.Node] = {}

    def elements(self, matrix: fx.Node) -> fx.Node:
        """`matrix` with its last dimension innermost in memory, of the elements that the GEMM takes."""
        if (found := self.transposed(matrix)) is not None:
            return found
        base, swapped = untransposed(matrix)
        matrix = self.rows(matrix if swapped else base)
        if not self.fnuz:
            return matrix
        return self._once((matrix, ops.as_fnuz), lambda: self.build.call(ops.as_fnuz, matrix, like=matrix))

    def transposed(self, matrix: fx.Node) -> fx.Node | None:
        """`matrix` as a cast of its own writes it, if it is the transpose of what such a cast makes."""
        base, swapped = untransposed(matrix)
        made = argument(base) if base.target is operator.getitem else None
        if (
            not self._transposes
            or not swapped
            or made is None
            or made.target is not ops.encode
            or not fits(made)
        ):
            return None
        return self._once((base, ops.encode_transposed), lambda: self._transposed(base, made))

    def rows(self, matrix: fx.Node) -> fx.Node:
        """`matrix` with its last dimension innermost in memory, copied if need be."""
        value = tensor(matrix)
        assert value is not None
        inner = value.stride()[1]
        if isinstance(inner, int) and inner == 1:
            return matrix
        form = torch.contiguous_format
        return self._once(
            untransposed(matrix),
            lambda: self.build.call(aten.clone.default, matrix, like=matrix, memory_format=form),
        )

    def _once(self, key: tuple[fx.Node, Any], make: Callable[[], fx.Node]) -> fx.Node:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _transposed(self, qdata: fx.Node, cast: fx.Node) -> fx.Node:
        """The transpose of what `cast` made, cast from its source again: one kernel writes both."""
        given = cast.args[5] if len(cast.args) > 5 else None
        scale = given or next((user for user in cast.users if user.args[1] == 1), None)
        assert isinstance(scale, fx.Node), "a product reads the scale of its operand"
        call = (ops.encode_transposed, *cast.args[:3], scale, self.fnuz)
        made = self.build.call(*call, like=cast)
        made.meta.update({key: value for key, value in cast.meta.items() if key not in made.meta})
        return made
