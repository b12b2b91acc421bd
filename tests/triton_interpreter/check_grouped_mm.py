"""The generated products of batches, and of groups of rows, of columns and of K, against FP64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.operands import assert_within, operand, product
from helpers.packed_operands import ALONG, MXFP4, NVFP4, PackedOperand, packed_operand, tensors
from modules import results_of_calls
from torch import Tensor

from mxcompile import ops
from mxcompile.lowering.templates import vendor

F32 = torch.float32
MXFP8 = "e4m3 1x32 rceil"
WORDS = {MXFP8: MXFP8, MXFP4: f"{MXFP4} packed", NVFP4: f"{NVFP4} packed"}
CHIPS = [*((target, word) for target in ("sm_100", "sm_120") for word in WORDS), ("gfx950", MXFP4)]
SIZES = pytest.mark.parametrize(("n", "k"), [(104, 73), (272, 256)], ids=["pointers", "tiled"])
ENDS = [(70, 70, 271, 300), (1, 2, 2, 40), (0, 0, 0, 5), (33, 48, 97, 130)]
"""Of groups: inside bytes, blocks and tiles, empty ones, rows that are left over."""
ROUNDINGS = {MXFP8: 0, MXFP4: 4, NVFP4: 4}
"""Beside those of sums. The scales of both tensors are multiplied in FP32, and then what is accumulated."""


@pytest.fixture(autouse=True)
def ours(monkeypatch):
    """No library's product."""
    monkeypatch.setattr(vendor, "choice", lambda *_, **__: None)


def side(rows: int, k: int, word: str, batch: int = 0, *, k_major: bool = True) -> PackedOperand:
    """An operand [rows, k] or [batch, rows, k]. k_major: packed ones always are."""
    if word != MXFP8:
        return packed_operand(rows, k, word, batch=(batch,) if batch else (), spread=20)
    parts = [operand(rows, k, spread=20, k_major=k_major) for _ in range(batch or 1)]
    codes, scale, values = ([getattr(part, name) for part in parts] for name in ("qdata", "scale", "values"))
    if not batch:
        return PackedOperand(codes=codes[0], scale=scale[0], values=values[0], tensor=None)
    if k_major:
        codes, scale = torch.stack(codes), torch.stack(scale)
    else:
        codes, scale = (torch.stack([matrix.t() for matrix in side]).mT for side in (codes, scale))
    return PackedOperand(codes=codes, scale=scale, values=torch.stack(values), tensor=None)


def spans(ends: tuple[int, ...]) -> list[slice]:
    return [slice(start, end) for start, end in zip((0, *ends[:-1]), ends, strict=True)]


def grouped(a: PackedOperand, b: PackedOperand, ends: tuple[int, ...], word: str, target: str) -> Tensor:
    offs, words = torch.tensor(ends, dtype=torch.int32), [WORDS[word]] * 2
    arguments = (*a.left, *b.right, offs, F32, *words, tensors(a, b) or None)
    (out,) = results_of_calls(ops.grouped_matmul, [arguments], target=target)
    return out


@pytest.mark.parametrize(("target", "word"), CHIPS)
def test_products_of_batches_match_fp64(target, word):
    """Odd sizes, K-major and MN-major; an operand that all entries share; a bias for each."""
    sides = []
    for m, n, k, k_major in ((40, 70, 96, True), (3, 33, 131, False)):
        a, b = side(m, k, word, 3), side(n, k, word, 3, k_major=k_major)
        sides.append((a, b, torch.randn(3, 1, n)))
    a, b = side(17, 64, word, 2), side(24, 64, word)
    shared = {name: getattr(b, name).expand(2, -1, -1) for name in ("codes", "scale", "values")}
    sides.append((a, replace(b, **shared), None))
    words = [WORDS[word]] * 2
    calls = [(*a.left, *b.right, bias, F32, *words, tensors(a, b) or None) for a, b, bias in sides]
    for out, (a, b, bias) in zip(results_of_calls(ops.matmul, calls, target=target), sides, strict=True):
        added = [None] * len(out) if bias is None else bias
        for computed, left, right, entry in zip(out, a.values, b.values, added, strict=True):
            assert_within(computed, *product(left, right, entry), left.shape[1] + ROUNDINGS[word])


@SIZES
@pytest.mark.parametrize(("target", "word"), CHIPS)
@pytest.mark.parametrize("ends", ENDS[:3], ids=str)
def test_products_of_row_groups_match_fp64(ends, target, word, n, k):
    m = max(307, ends[-1])
    a, b = side(m, k, word), side(n, k, word, len(ends))
    a = replace(a, codes=a.codes.clone(memory_format=torch.contiguous_format))  # for TMA
    out = grouped(a, b, ends, word, target)
    for span, weight in zip(spans(ends), b.values, strict=True):
        assert_within(out[span], *product(a.values[span], weight), k + ROUNDINGS[word])
    assert not out[ends[-1] :].any()


@SIZES
@pytest.mark.parametrize("word", WORDS)
def test_products_of_column_groups_match_fp64(word, n, k):
    ends = (41, 41, 80)
    a, b = side(n, k, word, len(ends)), side(ends[-1], k, word)
    out = grouped(a, b, ends, word, "sm_100")
    for span, weight in zip(spans(ends), a.values, strict=True):
        assert_within(out[:, span], *product(weight, b.values[span]), k + ROUNDINGS[word])


@pytest.mark.parametrize(("target", "word"), CHIPS)
@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_products_of_k_groups_match_fp64(ends, target, word):
    """Groups begin and end inside blocks and bytes; the scale of a block is the one of the whole matrix."""
    k = max(307, ends[-1])
    a, b = side(72, k, word, k_major=False), side(104, k, word, k_major=False)
    out = grouped(a, b, ends, word, target)
    of_blocks = {MXFP8: 0, **ALONG}[word]
    for computed, span in zip(out, spans(ends), strict=True):
        assert_within(computed, *product(a.values[:, span], b.values[:, span]), k + of_blocks)
