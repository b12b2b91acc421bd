"""The generated casts to packed FP4, bit for bit, against the operators' reference."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.bits import assert_same_bits
from helpers.casts import encode_packed, encode_packed_both
from helpers.spread import every_amax
from modules import run
from torch import Tensor
from torch.nn import functional as F

from mxcompile import ops
from mxcompile.formats import Format, ScaleLayout

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ROW_MAJOR, TILED = str(ScaleLayout.ROW_MAJOR), str(ScaleLayout.TILED_128X4)
NVFP4, MXFP4 = "e2m1 1x16 two-level", "e2m1 1x32 rceil"
SEED = torch.tensor([123456789])


def spread(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Rows and columns of many binades, zeros with both signs, and numbers halfway between elements."""
    *batch, m, n = shape
    gen = torch.Generator().manual_seed(m + n)
    rows, columns = (torch.randint(-6, 6, size, generator=gen) for size in ((*batch, m, 1), (*batch, 1, n)))
    x = torch.randn(shape, generator=gen) * torch.exp2((rows + columns).float())
    x[..., n // 2], x[..., m // 2, :] = -0.0, 0.0
    ties = torch.tensor([0.25, 0.75, -1.25, 1.75, -2.5, 3.5, 5.0, 6.0])
    x[..., 0, :] = ties.repeat(-(-n // 8))[:n]
    return x.to(dtype)


def casts(word: str, layout: str, x: Tensor, seed: Tensor) -> list[Tensor]:
    """Each copy of `x` by itself, then both of what is not random, and the amax that they need."""
    form, results = Format.parse(word), []
    randomness = (seed, 5) if form.stochastic else (None, 0)
    plain, others = ops.largest(x) if form.two_level else None, []
    for dim in (-1, -2):
        amax, its = plain, form
        if form.hadamard is not None and dim == -2:
            words = f"{form.untransformed} packed @-1", f"{word} packed @-2"
            rowwise_amax, amax = ops.cast(x, [f"{copy} largest" for copy in words])
            results += [rowwise_amax, amax]
        elif dim == -1:
            its = form.untransformed
        others.append(amax)
        results += encode_packed(x, dim, str(its), *randomness, amax, layout)
    if form.stochastic:
        return results
    rows = str(form.untransformed)
    return [*results, *encode_packed_both(x, rows, word, plain, others[1], layout)]


def check(cases: list[tuple[str, str, Tensor]], target: str) -> None:
    """One module of all cases."""

    def function(seed: Tensor, *inputs: Tensor) -> list[Tensor]:
        pairs = zip(cases, inputs, strict=True)
        return [copy for (word, layout, _), x in pairs for copy in casts(word, layout, x, seed)]

    sources = [x for *_, x in cases]
    assert_same_bits(run(function, SEED, *sources, target=target), function(SEED, *sources), target)


@pytest.mark.parametrize("target", ["sm_100", "sm_120", "gfx950"])
def test_packed_fp4_casts_of_odd_shapes_equal_reference(target):
    shapes = [(1, 3), (33, 47), (70, 96), (130, 257), (3, 33, 47), (2, 2, 16, 130)]
    words = [MXFP4] if target == "gfx950" else [MXFP4, NVFP4]
    cases = itertools.product(words, [TILED, ROW_MAJOR], shapes)
    check(
        [(word, layout, spread(*s)) for word, layout, s in cases if len(s) == 2 or layout == ROW_MAJOR],
        target,
    )


@pytest.mark.parametrize("shape", [(70, 96), (3, 33, 71)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_packed_fp4_casts_of_every_rounding_equal_reference(dtype, shape):
    words = ["e2m1 16x16 two-level", "e2m1 32x32 even", "e2m1 1x32 floor stochastic"]
    words += [f"{NVFP4} stochastic", f"{NVFP4} hadamard:55272", f"{NVFP4} stochastic hadamard:9"]
    check([(word, ROW_MAJOR, spread(*shape, dtype=dtype)) for word in words], "sm_100")


@pytest.mark.parametrize("word", [NVFP4, f"{NVFP4} stochastic", MXFP4, f"{MXFP4} stochastic"])
def test_packed_fp4_casts_of_every_amax_equal_reference(word):
    """Under the largest tensor scale there is, under one, and under the smallest: most scales are then 0."""
    x = every_amax(Format.parse(word).tile.along, 0x7F80, 256)
    amaxes = [torch.tensor([amax]) for amax in (3.3e38, 1.0, 1e-36)] if "two-level" in word else [None]

    def function(x: Tensor, seed: Tensor, *amaxes: Tensor) -> list[Tensor]:
        randomness = (seed, 5) if "stochastic" in word else (None, 0)
        casts = (encode_packed(x, -1, word, *randomness, amax, ROW_MAJOR) for amax in amaxes or (None,))
        return [result for cast in casts for result in cast]

    inputs = x, SEED, *(amax for amax in amaxes if amax is not None)
    assert_same_bits(run(function, *inputs, target="sm_100"), function(*inputs))


@pytest.mark.parametrize("layout", [TILED, ROW_MAJOR])
def test_nan_is_its_blocks_or_its_tensors(layout):
    """Scales are those of the reference. Codes under a NaN scale may be any."""
    x = spread(40, 70)
    x[3, 5], x[20, 40] = torch.nan, torch.inf
    for word in (NVFP4, MXFP4):
        computed = run(lambda x, seed, word=word: casts(word, layout, x, seed), x, SEED, target="sm_100")
        expected = casts(word, layout, x, SEED)
        assert_same_bits(computed[1::2], expected[1::2])
        assert all((scale == (255 if word == MXFP4 else 0x7F)).any() for scale in expected[1::2])


def test_a_producer_is_part_of_the_cast():
    """Of a batch, with a factor for each of its entries and a bias for each column."""

    def function(x: Tensor, factor: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        how = MXFP4, None, 0, None, ROW_MAJOR
        y = F.relu(x * factor + bias)
        return *encode_packed(y, -1, *how), *encode_packed(y, -2, *how)

    inputs = spread(3, 33, 47, dtype=F32), torch.randn(3, 1, 1), torch.randn(47)
    assert_same_bits(run(function, *inputs, target="sm_100"), function(*inputs))
