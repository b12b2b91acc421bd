"""The table that chooses a product's kernel: kernel families, best first, by operand formats and chip.

    family        operands                                                      chip
    FP8           FP8 elements, FP32 scales of a granularity that it takes      an FP8 GEMM of the vendor
    PACKED        E2M1 in blocks of 32 with E8M0 scales, of 16 with E4M3 ones   an FP4 instruction
    MX            MXFP8 in blocks of 32                                         an MX instruction
    AS_MX         power-of-two scales that whole blocks of 32 share             an MX instruction
    INTEGER       MXINT8 in blocks of 32, many rows                             a CPU that multiplies integers
    WEIGHT_ONLY   a weight stored in MXFP8, MXINT8 or packed FP4, few rows      a CPU, or a GPU with Triton
    EMULATED      all

A product runs on the first of its families whose pass also supports its sizes, strides and device. The record
has the reasons why earlier families do not run it. `mxcompile.offline.estimate` reads the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from mxcompile.formats import BLOCK, Format, ScaleType
from mxcompile.formats.elements import E2M1, E4M3, INT8
from mxcompile.lowering.chips.target import BLOCKS, WEIGHTS, Target

NO_CAST = "no kernel casts to FP4 with a choice of scales, or with a scale for each row"
"""Reason why products are emulated that the chip's instruction could multiply."""

Forms = Sequence[Format]
"""The formats of both operands of a product."""


class Family(StrEnum):
    """The kernel families of products, best first, with their names in docs/formats.md."""

    FP8 = "FP8 GEMM"
    PACKED = "FP4 GEMM"
    MX = "MX GEMM"
    AS_MX = "as MXFP8"
    INTEGER = "integer"
    WEIGHT_ONLY = "weight-only"
    EMULATED = "emulated"


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyRow:
    """The conditions of a family. takes: on operand formats. on: on a chip. fits: on formats on such a chip.

    reason: why the chip has no kernel of the family for the formats, for the record.
    """

    takes: Callable[[Forms], bool] = lambda forms: True
    on: Callable[[Target], bool] = lambda target: True
    fits: Callable[[Forms, Target], bool] = lambda forms, target: True
    reason: Callable[[Forms, Target], str] = lambda forms, target: ""


def _takes_granularity(forms: Forms, target: Target) -> bool:
    lhs, rhs = (str(form.tile) for form in forms)
    alike = lhs == rhs != WEIGHTS or (lhs, rhs) == (BLOCKS, WEIGHTS)
    return alike and {lhs, rhs} <= target.fp8_tiles


def _no_fp8_gemm(forms: Forms, target: Target) -> str:
    tiles = " and ".join(dict.fromkeys(str(form.tile) for form in forms))
    converts = not _are_convertible(forms) and _are_convertible([replace(form, pow2=True) for form in forms])
    hint = "; its MX GEMM multiplies powers of two (scale: pow2)" if target.native and converts else ""
    return f"no FP8 GEMM of {target.name} for scales {tiles}{hint}"


def _is_fp4(form: Format) -> bool:
    along = 16 if form.two_level else BLOCK
    return form.elem is E2M1 and form.tile.along == along and form.tile.across in (1, along)


def _no_fp4_gemm(forms: Forms, target: Target) -> str:
    if forms[0].scale in target.fp4_scales:
        return NO_CAST
    return "no kernel multiplies E2M1 under E4M3 scales"


def _are_convertible(forms: Forms) -> bool:
    return all(form.mx_elem is not None for form in forms)


def _is_beyond(form: Format) -> bool:
    """Whether elements under E8M0 scales have values that E4M3 lacks, so that no MX instruction applies."""
    return form.scale is ScaleType.E8M0 and form.elem.is_coded and not form.elem.is_in(E4M3)


def _no_mx_gemm(forms: Forms, _: Target) -> str:
    name = next(form.elem.name for form in forms if _is_beyond(form))
    return f"no kernel multiplies {name.upper()} under E8M0 scales"


TABLE: dict[Family, FamilyRow] = {
    Family.FP8: FamilyRow(
        takes=lambda forms: all(f.scale is ScaleType.FP32 and not f.elem.is_coded for f in forms),
        on=lambda chip: bool(chip.fp8_tiles),
        fits=_takes_granularity,
        reason=_no_fp8_gemm,
    ),
    Family.PACKED: FamilyRow(
        takes=lambda forms: len({form.scale for form in forms}) == 1 and all(map(_is_fp4, forms)),
        on=lambda chip: bool(chip.fp4_scales),
        fits=lambda forms, chip: forms[0].scale in chip.fp4_scales and all(f.is_plain for f in forms),
        reason=_no_fp4_gemm,
    ),
    Family.MX: FamilyRow(
        takes=lambda forms: all(f.is_mx_operand for f in forms), on=lambda chip: chip.native
    ),
    Family.AS_MX: FamilyRow(
        takes=lambda forms: _are_convertible(forms) or any(map(_is_beyond, forms)),
        on=lambda chip: chip.native,
        fits=lambda forms, chip: _are_convertible(forms),
        reason=_no_mx_gemm,
    ),
    Family.INTEGER: FamilyRow(
        takes=lambda forms: all(f.elem is INT8 and f.lies_stored and not f.packed for f in forms),
        on=lambda chip: chip.device == "cpu",
        fits=lambda forms, chip: bool(chip.integers),
    ),
    Family.WEIGHT_ONLY: FamilyRow(
        takes=lambda forms: forms[1].lies_stored, on=lambda chip: chip.device == "cpu" or bool(chip.arch)
    ),
    Family.EMULATED: FamilyRow(),
}


def families(forms: Forms, target: Target) -> list[Family]:
    """Returns the families by which `target` multiplies `forms`, best first; the last is `EMULATED`."""
    return [family for family in TABLE if runs(family, forms, target)]


def runs(family: Family, forms: Forms, target: Target) -> bool:
    """Whether `target` multiplies `forms` by `family`."""
    row = TABLE[family]
    return row.takes(forms) and row.on(target) and row.fits(forms, target)


def lacking(family: Family, forms: Forms, target: Target) -> str:
    """Returns why `target` has kernels of `family`, but none for `forms`; "" if it has one."""
    row = TABLE[family]
    return "" if row.fits(forms, target) else row.reason(forms, target)
