"""The generated products of stored weights against FP64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from helpers.operands import Operand, assert_within, embedded, far_apart, operand, product
from helpers.spread import spread
from modules import results_of_calls

from mxcompile import ops
from mxcompile.formats import E5M2, Format, elem_type
from mxcompile.lowering.targets import TARGETS

SMALL = {name: replace(TARGETS[name], processors=4) for name in ("sm_80", "sm_90")}
"""A chip that encodes and decodes FP8 itself and one that does not, with few multiprocessors: no split."""
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def activation(m: int, k: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return embedded(spread(m, k).to(dtype), float("nan"))


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A stored weight in E2M1, under scales over many binades or of two levels; poisoned surroundings."""

    codes: torch.Tensor
    scale: torch.Tensor
    word: str
    whole: tuple[torch.Tensor, ...] = ()

    @property
    def values(self) -> torch.Tensor:
        exact = ops.decode(self.codes, self.scale, -1, self.word, torch.float64)
        return exact / self.whole[0].double() if self.whole else exact


def stored(n: int, k: int, word: str, *, whole: int = 0) -> Operand | Packed:
    """A weight in one of `WORDS`. whole: how many global scales, 0, 1 or n."""
    if word == "mxfp8":
        return operand(n, k)
    codes = embedded(torch.randint(256, (n, k // 2), dtype=torch.uint8), 0x77)
    if word == "mxfp4":
        scale = embedded(torch.randint(87, 167, (n, -(-k // 32)), dtype=torch.uint8), 255)
        return Packed(codes=codes, scale=scale, word="e2m1 1x32 rceil packed")
    scale = embedded(torch.randint(1, 0x7F, (n, -(-k // 16)), dtype=torch.uint8), 0x7F)
    global_scale = (torch.rand(whole, 1) + 0.5,) if whole else ()
    scale = scale.view(torch.float8_e4m3fn)
    return Packed(codes=codes, scale=scale, word="e2m1 1x16 two-level packed", whole=global_scale)


def products(calls, target) -> list[torch.Tensor]:
    """calls: x, w, bias, dtype of the result."""
    arguments = []
    for x, w, bias, out_dtype in calls:
        if isinstance(w, Operand):
            arguments.append((x, *w.left, bias, out_dtype, str(Format.mx(elem_type(w.qdata.dtype)))))
        else:
            arguments.append((x, w.codes, w.scale, bias, out_dtype, w.word, *w.whole))
    outputs: list[torch.Tensor] = results_of_calls(ops.weight_only_mm, arguments, target=target)
    return outputs


def check(calls, target) -> None:
    for out, (x, w, bias, out_dtype) in zip(products(calls, target), calls, strict=True):
        assert out.dtype is out_dtype
        roundings = 0 if isinstance(w, Operand) else 2  # of a product beside those of its sum
        assert_within(out, *product(x, w.values, bias), x.shape[1] + roundings)


WORDS = ("mxfp8", "mxfp4", "nvfp4")


@pytest.mark.parametrize("target", [*SMALL, "gfx942"])
@pytest.mark.parametrize("word", WORDS)
def test_weight_only_mm_of_odd_shapes_matches_fp64(target, word):
    """One row and several, of BF16 and FP32; chips whose codes PTX decodes, and one without."""
    shapes = [(1, 200, 1056), (2, 130, 300), (3, 70, 96), (20, 130, 260), (5, 2, 2), (1, 3, 40)]
    if word == "mxfp8":
        shapes += [(5, 1, 1), (1, 1, 40)]
    biases = [torch.randn(n).to(BF16 if word == "mxfp8" else F32) for _, n, _ in shapes]
    sides = [(activation(m, k), stored(n, k, word)) for m, n, k in shapes]
    calls = [(*pair, bias, BF16) for pair, bias in zip(sides, biases, strict=True)]
    calls.append((activation(2, 200, F32), stored(40, 200, word), None, F32))
    check(calls, replace(TARGETS[target], processors=4))


def test_weight_only_mm_with_split_k_matches_fp64():
    sides = [(activation(m, 4100), operand(24, 4100), torch.randn(24)) for m in (1, 17)]
    check([(*side, BF16) for side in sides], TARGETS["sm_90"])


def test_weight_only_mm_of_fp16_and_fp32_matches_fp64():
    sides = [(activation(m, 200, dtype), operand(40, 200, E5M2)) for m in (1, 9) for dtype in (F16, F32)]
    check([(*side, None, F32) for side in sides], SMALL["sm_90"])


def test_weight_only_mm_with_extreme_scales_matches_fp64():
    """In FP32 every weight is exact, also with the smallest scale and the largest of a finite value."""
    w = operand(16, 64)
    w.scale[:8], w.scale[8:] = 0, 246
    check([(activation(1, 64) * 2.0**-30, w, None, F32)], SMALL["sm_90"])


def test_weight_only_mm_of_strided_weight_matches_fp64():
    calls = [(activation(m, 160), operand(70, 160, k_major=False), None, BF16) for m in (2, 16)]
    check(calls, SMALL["sm_90"])


@pytest.mark.parametrize("word", WORDS)
def test_nan_scale_and_nan_activation(word):
    calls = [(activation(m, 64), stored(32, 64, word), None, F32) for m in (1, 2, 16)]
    for x, w, *_ in calls:
        w.scale.view(torch.uint8)[4, 1] = 0x7F if word == "nvfp4" else 255
        if len(x) > 1:
            x[1, 3] = float("nan")
    for out in products(calls, SMALL["sm_90"]):
        wanted = torch.zeros(out.shape, dtype=torch.bool)
        wanted[1:2], wanted[:, 4] = True, True
        assert torch.equal(out.isnan(), wanted)


@pytest.mark.parametrize("m", [1, 3])
def test_rows_more_than_two_gigabytes_apart(m):
    """Offsets into a weight are 64 bits wide. Only the pages that are written take memory."""
    check([(activation(m, 64), far_apart(operand(3, 64)), None, BF16)], SMALL["sm_90"])


@pytest.mark.parametrize("rows", [1, 24])
def test_global_scales_divide_sums(rows: int):
    """Of the tensor or of each row; also of the parts of a split K."""
    sizes = (1, 300), (9, 300), (1, 8200), (5, 4300)
    sides = [(activation(m, k), stored(24, k, "nvfp4", whole=rows)) for m, k in sizes]
    check([(*pair, torch.randn(24), BF16) for pair in sides], TARGETS["sm_90"])
