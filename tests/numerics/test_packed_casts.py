"""Casts to packed FP4: the codes of `encode` in the order of the contraction, and scales in either layout."""

from __future__ import annotations

import pytest
import torch
from helpers.casts import encode, encode_packed, packed
from torch import Tensor
from torch.library import opcheck

from mxcompile import ops
from mxcompile.errors import FormatError
from mxcompile.formats import Format
from mxcompile.formats.scale_tiles import untile_scale

NVFP4, SQUARE, MXFP4 = "e2m1 1x16 two-level", "e2m1 16x16 two-level", "e2m1 1x32 floor"
WORDS = [NVFP4, SQUARE, MXFP4, "e2m1 32x32 even", f"{NVFP4} stochastic", f"{NVFP4} hadamard:55272"]
SHAPES = [(70, 96), (33, 47), (1, 3), (2, 33, 65), (2, 3, 17, 32)]
SEED = torch.tensor([77])


def spread(shape: tuple[int, ...]) -> Tensor:
    gen = torch.Generator().manual_seed(sum(shape))
    powers = torch.randint(-6, 6, (*shape[:-1], 1), generator=gen).float()
    return torch.randn(shape, generator=gen) * torch.exp2(powers)


def arguments(x: Tensor, dim: int, word: str) -> tuple:
    """Seed, stream and amax of a cast of `x`."""
    form = Format.parse(word)
    seed = SEED if form.stochastic else None
    if not form.two_level:
        return seed, 3, None
    transformed = x if form.hadamard is None else ops.hadamard(x, dim, form.hadamard)
    return seed, 3, ops.largest(transformed)


CASTS = [(dim, word) for word in WORDS for dim in (-1, -2) if dim == -2 or "hadamard" not in word]
"""Dimensions and formats. Transforms run along columns."""


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dim", "word"), CASTS)
def test_packed_cast_equals_packed_codes_of_the_plain_cast(dim: int, word: str, shape: tuple[int, ...]):
    x, form = spread(shape), Format.parse(word)
    seed, stream, amax = arguments(x, dim, word)
    packed, scale = encode_packed(x, dim, word, seed, stream, amax, "row-major")
    source = x if form.hadamard is None else ops.hadamard(x, dim, form.hadamard)
    codes, scales = encode(source, dim, str(form.untransformed), seed, stream, None, amax)
    if dim == -2:
        codes, scales = codes.mT, scales.mT
    rows, length = codes.shape[-2:]
    low, high = packed & 15, packed >> 4
    assert packed.shape == (*shape[:-2], rows, (length + 1) // 2)
    assert torch.equal(low, codes[..., 0::2])
    assert torch.equal(high[..., : length // 2], codes[..., 1::2])
    assert length % 2 == 0 or not high[..., -1].any()
    every = scales.view(torch.uint8).repeat_interleave(form.tile.across, -2)[..., :rows, :]
    assert torch.equal(scale, every)
    if x.ndim == 2:
        same, tiles = encode_packed(x, dim, word, seed, stream, amax)
        assert torch.equal(same, packed)
        assert torch.equal(untile_scale(tiles, rows, scale.shape[1]), scale)


@pytest.mark.parametrize("shape", [(33, 47), (2, 33, 65)], ids=str)
@pytest.mark.parametrize(("dim", "word"), CASTS)
def test_packed_fp4_casts_pass_opcheck(dim: int, word: str, shape: tuple[int, ...]):
    x = spread(shape)
    for layout in ("row-major", "128x4") if x.ndim == 2 else ["row-major"]:
        seed, stream, amax = arguments(x, dim, word)
        opcheck(ops.cast, (x, packed(dim, word, layout), seed, stream, None, [amax]))


def test_scales_of_batches_are_not_tiled():
    with pytest.raises(FormatError, match="for a matrix only, found a tensor of 3 dimensions"):
        encode_packed(torch.ones(2, 4, 32), -1, MXFP4)
