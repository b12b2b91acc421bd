"""The generated products of batches, and of groups of rows, of columns and of K, against FP64."""

from __future__ import annotations

import pytest
import torch
from helpers.casts import scaled_grouped_mm, scaled_mm
from helpers.operands import Operand, assert_within, operand, product
from modules import results_of_calls
from torch import Tensor

BF16, F32 = torch.bfloat16, torch.float32
ENDS = [(70, 70, 271, 300), (1, 2, 2, 40), (0, 0, 0, 5)]
"""Of groups: inside blocks and tiles, empty ones, rows that are left over."""


def stacked(count: int, rows: int, k: int, *, k_major: bool = True) -> list[Operand]:
    return [operand(rows, k, spread=20, k_major=k_major) for _ in range(count)]


def together(sides: list[Operand]) -> tuple[Tensor, Tensor]:
    """Codes [G, rows, K], in the order of each, and scales."""
    k_major = sides[0].qdata.stride(1) == 1
    codes, scales = ([getattr(side, name) for side in sides] for name in ("qdata", "scale"))
    if k_major:
        return torch.stack(codes), torch.stack(scales)
    return torch.stack([matrix.t() for matrix in codes]).mT, torch.stack([matrix.t() for matrix in scales]).mT


def turned(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return codes.mT, scale.mT


def spans(ends: tuple[int, ...]) -> list[slice]:
    return [slice(start, end) for start, end in zip((0, *ends[:-1]), ends, strict=True)]


@pytest.mark.parametrize("target", ["sm_100", "sm_120"])
def test_scaled_mm_of_batches_matches_fp64(target):
    """K-major and MN-major; an operand that all entries share; a bias for each."""
    calls, sides = [], []
    for m, n, k, k_major in ((40, 70, 96, True), (3, 33, 130, False)):
        a, b, bias = stacked(3, m, k), stacked(3, n, k, k_major=k_major), torch.randn(3, 1, n)
        calls.append((*together(a), *turned(*together(b)), bias, F32))
        sides.append((a, b, bias))
    a, b = stacked(2, 17, 64), operand(24, 64)
    shared = [side.expand(2, *side.shape) for side in b.left]
    calls.append((*together(a), *turned(*shared), None, F32))
    sides.append((a, [b, b], [None, None]))
    for out, operands in zip(results_of_calls(scaled_mm, calls, target=target), sides, strict=True):
        for computed, a, b, bias in zip(out, *operands, strict=True):
            assert_within(computed, *product(a.values, b.values, bias), a.qdata.shape[1])


@pytest.mark.parametrize(("n", "k"), [(104, 72), (272, 128)], ids=["pointers", "tiled"])
@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_scaled_mm_of_row_groups_matches_fp64(ends, n, k):
    m = max(307, ends[-1])
    a, weights = operand(m, k, spread=20), stacked(len(ends), n, k)
    a = Operand(qdata=a.qdata.clone(memory_format=torch.contiguous_format), scale=a.scale)  # for TMA
    offs = torch.tensor(ends, dtype=torch.int32)
    (out,) = results_of_calls(
        scaled_grouped_mm, [(*a.left, *turned(*together(weights)), offs, F32)], target="sm_100"
    )
    for span, w in zip(spans(ends), weights, strict=True):
        assert_within(out[span], *product(a.values[span], w.values), k)
    assert not out[ends[-1] :].any()


@pytest.mark.parametrize(("n", "k"), [(104, 72), (272, 128)], ids=["pointers", "tiled"])
def test_scaled_mm_of_column_groups_matches_fp64(n, k):
    ends = (41, 41, 80)
    b, weights = operand(ends[-1], k, spread=20), stacked(len(ends), n, k)
    offs = torch.tensor(ends, dtype=torch.int32)
    (out,) = results_of_calls(scaled_grouped_mm, [(*together(weights), *b.right, offs, F32)], target="sm_100")
    for span, w in zip(spans(ends), weights, strict=True):
        assert_within(out[:, span], *product(w.values, b.values[span]), k)


@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_scaled_mm_of_k_groups_matches_fp64(ends):
    """Groups begin and end inside blocks, whose scale then is the one of the whole matrix."""
    k = max(307, ends[-1])
    a, b = operand(72, k, spread=20, k_major=False), operand(104, k, spread=20, k_major=False)
    offs = torch.tensor(ends, dtype=torch.int32)
    (out,) = results_of_calls(scaled_grouped_mm, [(*a.left, *b.right, offs, F32)], target="sm_100")
    for computed, span in zip(out, spans(ends), strict=True):
        assert_within(computed, *product(a.values[:, span], b.values[:, span]), k)
