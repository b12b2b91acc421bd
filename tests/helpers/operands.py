"""MX operands made directly of codes and bytes, in memory that is NaN wherever an operand does not reach.

And their products in FP64, with the bound that FP32 accumulation keeps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mxcompile.formats import E4M3, ElemType, Format, num_blocks
from mxcompile.formats.encoding import decode_tensors
from mxcompile.formats.scale_tiles import tile_scale, untile_scale

NAN_CODE, NAN_BYTE = 0x7F, 255


@dataclass(frozen=True, kw_only=True, slots=True)
class Operand:
    """One side of a product, seen as [rows, K]: the rows are M of `a`, N of `b`.

    qdata: FP8 [rows, K], any strides. scale: bytes [rows, ⌈K/32⌉], any strides, or flat and tiled 128×4.
    """

    qdata: Tensor
    scale: Tensor

    @property
    def left(self) -> tuple[Tensor, Tensor]:
        """As the operators take a."""
        return self.qdata, self.scale

    @property
    def right(self) -> tuple[Tensor, Tensor]:
        """As the operators take b, [K, rows]."""
        return self.qdata.t(), self.scale if self.scale.ndim == 1 else self.scale.t()

    @property
    def values(self) -> Tensor:
        """FP64 [rows, K]."""
        return values(self.qdata, self.scale)


def values(qdata: Tensor, scale: Tensor) -> Tensor:
    """FP64 values of an operand [rows, K]; scale row-major [rows, ⌈K/32⌉] or flat, tiled."""
    if scale.ndim == 1:
        scale = untile_scale(scale, qdata.shape[0], num_blocks(qdata.shape[1]))
    return decode_tensors(qdata, scale, -1, Format(), torch.float64)


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """A · bᵀ (+ bias) of `values` in FP64, and Σ |a · b| (+ |bias|), which error bounds are relative to."""
    a, b = a.to(torch.float64), b.to(torch.float64).t()
    exact, magnitude = a @ b, a.abs() @ b.abs()
    if bias is not None:
        exact, magnitude = exact + bias.to(torch.float64), magnitude + bias.to(torch.float64).abs()
    return exact, magnitude


def finite_codes(rows: int, columns: int, elem: ElemType) -> torch.Tensor:
    """Random FP8 codes of every exponent, no NaN and no Inf."""
    largest = 0x7E if elem is E4M3 else 0x7B
    sign = torch.randint(0, 2, (rows, columns), dtype=torch.uint8) << 7
    return torch.randint(0, largest + 1, (rows, columns), dtype=torch.uint8) | sign


def embedded(values: torch.Tensor, poison: int) -> torch.Tensor:
    """`values`, as a view into the middle of a larger buffer that is `poison` everywhere else."""
    rows, columns = values.shape
    buffer = torch.full((rows + 3, columns + 16), poison, dtype=values.dtype)
    view = buffer[1 : rows + 1, :columns]
    view.copy_(values)
    return view


def operand(
    rows: int, k: int, elem: ElemType = E4M3, *, k_major: bool = True, spread: int = 40, tiled: bool = False
) -> Operand:
    """Codes [rows, k]; scales over 2·`spread` binades, different for every block; poisoned surroundings."""
    codes = finite_codes(rows, k, elem)
    scale = torch.randint(127 - spread, 127 + spread, (rows, num_blocks(k)), dtype=torch.uint8)
    if tiled:
        # what is beyond the rows is not read by any result that is kept; beyond the blocks it must be zero
        across = -num_blocks(k) % 4
        padded = torch.nn.functional.pad(scale, (0, across))
        down = torch.full((-rows % 128, padded.shape[1]), NAN_BYTE, dtype=torch.uint8)
        scale = tile_scale(torch.cat([padded, down]))
        codes = codes if k_major else codes.t().contiguous().t()
    elif k_major:
        codes, scale = embedded(codes, NAN_CODE), embedded(scale, NAN_BYTE)
    else:
        codes, scale = embedded(codes.t(), NAN_CODE).t(), embedded(scale.t(), NAN_BYTE).t()
    return Operand(qdata=codes.view(elem.dtype), scale=scale)


def far_apart(operand: Operand) -> Operand:
    """The same with rows 2^30 bytes and more apart. Only the pages that are written take memory."""
    apart = (1 << 30) + 64
    memory = torch.empty(len(operand.qdata) * apart, dtype=torch.uint8)
    far = memory.as_strided(operand.qdata.shape, (apart, 1))
    far.copy_(operand.qdata.view(torch.uint8))
    return Operand(qdata=far.view(operand.qdata.dtype), scale=operand.scale)


def assert_within(out: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor, k: int) -> None:
    """Each element within what FP32 accumulation over `k` and one rounding to the output dtype may lose."""
    assert out.shape == exact.shape
    bound = (
        (k + 2) * 2.0**-24 * magnitude + torch.finfo(out.dtype).eps / 2 * exact.abs() + (k + 2) * 2.0**-150
    )
    error = (out.to(torch.float64) - exact).abs()
    worst = (error / bound).max().item() if out.numel() else 0.0
    assert worst <= 1.0, f"error {worst:.3g} times the bound"
