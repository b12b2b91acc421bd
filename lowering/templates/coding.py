"""How the operands of a product are coded, as arguments of the templates of products.

    MXFP8    e4m3 or e5m2, an element a byte, a scale for 32 bytes along K
    MXFP4    e2m1, two elements a byte along K, a scale for 16 bytes
    NVFP4    the same, an E4M3 scale for 8 bytes, and an FP32 scale of each tensor

Templates, tables of tiles and checks of alignment count K in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch._inductor import ir
from torch._inductor.lowering import expand
from torch._inductor.virtualized import V

from mxcompile.formats import BLOCK, ELEMENTS, Format, elem_type
from mxcompile.lowering.chips.tiles import TiledConfig
from mxcompile.lowering.choices import defaults
from mxcompile.lowering.choices.epilogue import has_epilogue
from mxcompile.lowering.targets import Target


@dataclass(frozen=True, kw_only=True, slots=True)
class Coding:
    """The coding of both operands of a product.

    precision: its name in policies. elems: names of the element types. block: bytes along K that share a
    scale. tensors: both tensor scales, realized, expanded to the result's size; () if formats have none.
    """

    precision: str
    elems: tuple[str, str]
    block: int = BLOCK
    tensors: tuple[Any, ...] = ()

    @staticmethod
    def from_operands(a: Any, b: Any, fmt: str, tensors: Sequence[Any] | None, size: Sequence[Any]) -> Coding:
        """Returns the coding of operands in MXFP8, or in the packed format `fmt`.

        tensors: their scales, one number or a number for each row or column of the result of `size`.
        """
        form = Format.parse(fmt)
        precision = defaults.precision_of(form)
        if not form.packed:
            return Coding(precision=precision, elems=(_fp8(a), _fp8(b)))
        name = form.elem.name
        return Coding(
            precision=precision,
            elems=(name, name),
            block=form.tile.along // form.elem.per_byte,
            tensors=tuple(ir.ExternKernel.realize_input(expand(scale, size)) for scale in tensors or ()),
        )

    @property
    def per_byte(self) -> int:
        """The number of elements that share a byte."""
        return ELEMENTS[self.elems[0]].per_byte

    @property
    def swapped(self) -> Coding:
        """The coding of the transposed product of groups, where each tensor has one scale."""
        return replace(self, elems=self.elems[::-1], tensors=self.tensors[::-1])

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the templates."""
        a, b = map(repr, self.elems)
        arguments: dict[str, Any] = {"ELEM_A": a, "ELEM_B": b, "BLOCK": self.block, "TWO_LEVEL": False}
        if self.tensors:
            lhs, rhs = self.tensors
            arguments |= {"TWO_LEVEL": True, "SHARED_A": _is_0(lhs, -2), "SHARED_B": _is_0(rhs, -1)}
        return arguments

    def default_form(
        self, kind: str, sizes: Sequence[int], tiles: Sequence[TiledConfig], target: Target, *, library: bool
    ) -> str:
        """Returns the form that runs the current product without timing.

        sizes: m, n and the bytes of K. tiles: tiles that can run it. library: whether the vendor's form can.
        """
        m, n, k = sizes
        product = defaults.MXProduct(
            kind=kind,
            precision=self.precision,
            m=m,
            n=n,
            k=k * self.per_byte,
            epilogue=has_epilogue(V.graph.current_node),
        )
        runs = defaults.forms(tiles) | ({defaults.VENDOR} if library else set())
        return defaults.default(product, target, runs).form


def _fp8(operand: Any) -> str:
    return elem_type(operand.get_dtype()).name


def _is_0(scale: Any, dim: int) -> bool:
    """Whether all elements along `dim` share a scale, which then has stride 0 along `dim`."""
    return bool(V.graph.sizevars.statically_known_equals(scale.get_stride()[dim], 0))


HEAD = r"""
{% set names = ["A", "SA", "B", "SB"] + OTHERS + (["TA", "TB"] if TWO_LEVEL else []) %}
{{def_kernel(*(names + (["BIAS"] if BIASED else [])))}}
{% if TWO_LEVEL %}
    ta, tb, stride_ta, stride_tb = TA, TB, {{stride("TA", -2)}}, {{stride("TB", -1)}}
{% endif %}
"""
"""Source: the head of a template. OTHERS: names of the operands after the first four."""

GAIN = r"""
{% if TWO_LEVEL %}
    ACC *= scaled_tile.factor(ta, idx_m, stride_ta, end_m, SHARED_A) * scaled_tile.factor(
        tb, idx_n, stride_tb, N, SHARED_B)
{% endif %}
"""
"""Source: multiplies ACC by the scales of both tensors. Reads idx_m, idx_n, their ends end_m and N."""
