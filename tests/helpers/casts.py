"""The casts that tests make: ``mx.cast`` with its copies named by what tells them apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxcompile import ops
from mxcompile.formats import Copy, Format, Rounding, ScaleLayout, Tile, elem_type
from mxcompile.formats.encoding import decode_tensors, encode_tensors, outer_amax

WITHOUT_SCHEMA = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
"""Of `opcheck`: its test of schemas compares inputs before and after, which torch cannot do for FP8."""


@torch.compiler.assume_constant_result
def mx(
    dim: int,
    elem: torch.dtype,
    rounding: str,
    square: bool = False,
    layout: str = "row-major",
    dtype: torch.dtype | None = None,
) -> list[str]:
    """The copies of a cast to MXFP8. dim: counted from the last. dtype: of values; None for codes."""
    tile = Tile.SQUARE if square else Tile.ROW
    fmt = Format(elem=elem_type(elem), rounding=Rounding(rounding), tile=tile)
    if layout == ScaleLayout.ROW_MAJOR and dtype is None:
        return [str(Copy.for_product(fmt, dim))]
    return [str(Copy(format=fmt, dim=dim, layout=ScaleLayout(layout), dtype=dtype))]


@torch.compiler.assume_constant_result
def codes(dim: int, word: str) -> list[str]:
    """The copies of a cast to the format that is written `word`."""
    return [str(Copy(format=Format.parse(word), dim=dim))]


def _from_last(x: Tensor, dim: int) -> int:
    return dim - x.ndim if dim >= 0 else dim


def quantize(x: Tensor, dim: int, *how: Any) -> list[Tensor]:
    """Codes and scales in MXFP8."""
    return ops.cast(x, mx(_from_last(x, dim), *how))


def values(x: Tensor, dim: int, elem: torch.dtype, rounding: str, square: bool, dtype: torch.dtype) -> Tensor:
    """The values of codes and scales in MXFP8."""
    return ops.cast(x, mx(_from_last(x, dim), elem, rounding, square, "row-major", dtype))[0]


def both(elem: torch.dtype, rounding: str, layout: str = "row-major") -> list[str]:
    """The copies along rows and along columns."""
    return [word for dim in (-1, -2) for word in mx(dim, elem, rounding, False, layout)]


def quantize_both(x: Tensor, *how: Any) -> list[Tensor]:
    """Codes and scales along rows, then along columns."""
    return ops.cast(x, both(*how))


def quantize_two(x: Tensor, y: Tensor, *how: Any) -> list[Tensor]:
    """The same of x, then of y."""
    return ops.cast(x, both(*how), None, 0, None, None, y)


def operand_copies(elem: torch.dtype, rounding: str, dtype: torch.dtype, *forms: str) -> list[str]:
    """The copies along rows and along columns: each "codes", "values", "squares" or "none"."""
    kinds = {"codes": (False, "row-major", None), "values": (False, "row-major", dtype)}
    kinds["squares"] = (True, "row-major", dtype)
    wanted = [(dim, kinds[form]) for dim, form in zip((-1, -2), forms, strict=True) if form != "none"]
    return [word for dim, kind in wanted for word in mx(dim, elem, rounding, *kind)]


def quantize_operands(x: Tensor, y: Tensor | None, *how: Any) -> list[Tensor]:
    """What emulated products read and keep, of x, then of y."""
    return ops.cast(x, operand_copies(*how), None, 0, None, None, y)


def encode(
    x: Tensor,
    dim: int,
    word: str,
    seed: Tensor | None = None,
    stream: int = 0,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
) -> list[Tensor]:
    """Elements and scales in any format."""
    return ops.cast(x, codes(_from_last(x, dim), word), seed, stream, [scale], [amax])


@torch.compiler.assume_constant_result
def packed(dim: int, word: str, layout: str = "128x4") -> list[str]:
    """The copies of a cast to packed elements in the format that is written `word`."""
    return [str(Copy.packed(Format.parse(word), dim, ScaleLayout(layout)))]


def encode_packed(
    x: Tensor,
    dim: int,
    word: str,
    seed: Tensor | None = None,
    stream: int = 0,
    amax: Tensor | None = None,
    layout: str = "128x4",
) -> list[Tensor]:
    """Packed elements, the contraction innermost, and scale bytes."""
    return ops.cast(x, packed(dim, word, layout), seed, stream, None, [amax])


def encode_packed_both(
    x: Tensor,
    row_word: str,
    column_word: str,
    row_amax: Tensor | None = None,
    column_amax: Tensor | None = None,
    layout: str = "128x4",
) -> list[Tensor]:
    """The same along rows, then along columns."""
    copies = packed(-1, row_word, layout) + packed(-2, column_word, layout)
    return ops.cast(x, copies, None, 0, None, [row_amax, column_amax])


def casts_both(result: Any, launch: Any, tensors: int = 1) -> bool:
    """Whether `launch` is a kernel that casts as many tensors to codes along rows and along columns."""
    if not launch.generated or "mx.cast.default" not in launch.operators or launch.gemms:
        return False
    source = result.kernel(launch).source
    written = source.count("quantize_rowwise("), source.count("quantize_columnwise(")
    return written == (tensors, tensors)


def multiplies_scaled(kernel: Any) -> bool:
    """Whether a generated kernel multiplies operands with scales, on the MX instruction or emulated."""
    return "dot_scaled" in kernel.source or "tile_product" in kernel.source


@torch.compiler.assume_constant_result
def operand_words(a: torch.dtype, b: torch.dtype) -> list[str]:
    """The words of the formats of MXFP8 operands with elements of these dtypes."""
    return [str(Format.mx(elem_type(dtype))) for dtype in (a, b)]


def scaled_mm(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, *how: Any) -> Tensor:
    """The product of MXFP8 operands. how: bias and dtype of the result."""
    return ops.matmul(a, scale_a, b, scale_b, *how, *operand_words(a.dtype, b.dtype))


def scaled_grouped_mm(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, *how: Any) -> Tensor:
    """The products of groups of MXFP8 operands. how: ends of groups and dtype of the result."""
    return ops.grouped_matmul(a, scale_a, b, scale_b, *how, *operand_words(a.dtype, b.dtype))


def rounded_tensors(
    x: Tensor, block_dim: int, fmt: Format, seed: Tensor | None = None, stream: int = 0
) -> Tensor:
    """The values that a cast of `x` stands for, FP32."""
    amax = outer_amax(x, block_dim, fmt) if fmt.two_level else None
    qdata, scale = encode_tensors(x, block_dim, fmt, seed, stream, amax=amax)
    return decode_tensors(qdata, scale, block_dim, fmt, torch.float32, amax)
