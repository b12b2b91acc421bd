"""The quantize kernels, bit for bit, against their torch reference and the integer reference."""

from __future__ import annotations

import numpy as np
import pytest
import reference as integer_reference
import torch

from mxcompile.formats import ELEM_TYPES, Format, Rounding, ScaleLayout, Tile
from mxcompile.formats.scale_tiles import tile_scale
from mxcompile.lowering.kernels.quantize import Layout, plan, quantize
from mxcompile.lowering.reference import quantize as reference
from mxcompile.lowering.targets import TARGETS

FORMATS = [Format(elem=elem, rounding=rounding) for elem in ELEM_TYPES.values() for rounding in Rounding]
SHAPES = [(1, 1), (1, 4096), (32, 32), (33, 65), (130, 257), (257, 31), (64, 640)]
CONVERSIONS = ["sm_90", "sm_80"]
"""A target that converts FP8 itself and one whose conversion is integer arithmetic."""


def spread(m: int, n: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal values whose magnitude changes by many binades from block to block in both directions."""
    exponents = torch.randint(-100, 100, (-(-m // 32), -(-n // 32))).to(torch.float32)
    scale = torch.exp2(exponents).repeat_interleave(32, 0)[:m].repeat_interleave(32, 1)[:, :n]
    return (torch.randn(m, n) * scale).to(dtype)


def assert_same(copies, expected) -> None:
    for copy, (qdata, scale) in zip(copies, expected, strict=True):
        assert torch.equal(copy.scale, scale)
        is_nan = qdata.to(torch.float32).isnan()
        assert torch.equal(copy.qdata.to(torch.float32).isnan(), is_nan)
        bits, wanted = copy.qdata.view(torch.uint8), qdata.view(torch.uint8)
        assert torch.equal(bits[~is_nan], wanted[~is_nan])


def both(x, fmt, scales):
    expected = reference.quantize(x, fmt, scales)
    return expected[:2], expected[2:]


@pytest.mark.parametrize("target", CONVERSIONS)
@pytest.mark.parametrize("scales", ScaleLayout)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, scales, target):
    x, fmt = spread(*shape), Format()
    assert_same(quantize(x, Layout.BOTH, fmt, scales, TARGETS[target]), both(x, fmt, scales))


@pytest.mark.parametrize("target", CONVERSIONS)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_formats(fmt, dtype, target):
    x, scales = spread(96, 96, dtype), ScaleLayout.ROW_MAJOR
    x[0, 5], x[40, 50], x[70, 70] = float("nan"), float("inf"), -float("inf")
    x[32:64, 64:] = -0.0
    if dtype is torch.float32:
        x[64:, :32] = torch.randint(1, 1 << 23, (32, 32), dtype=torch.int32).view(torch.float32)  # subnormal
        x[:32, 32:64] = torch.finfo(torch.float32).max * (1 - torch.rand(32, 32) / 4)
    expected = both(x, fmt, scales)
    for layout, wanted in zip((Layout.ROWWISE, Layout.COLUMNWISE), expected, strict=True):
        assert_same(quantize(x, layout, fmt, scales, TARGETS[target]), (wanted,))


@pytest.mark.parametrize("target", CONVERSIONS)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_integer_reference(fmt, target):
    largest = fmt.elem.max
    x = spread(8, 64, torch.float32).clamp(-3e38, 3e38)
    x[:, 7] = torch.tensor([largest * 2.0**k for k in range(-9, -1)])
    x[0, :32], x[1, 40], x[2, 50] = 0.0, float("nan"), float("inf")
    x[3, :32] = 2.0**-149
    x[4:6, 32:] = torch.nextafter(torch.tensor(largest), torch.tensor([0.0, 1e9]))[:, None] * 2.0**20
    (copy,) = quantize(x, Layout.ROWWISE, fmt, ScaleLayout.ROW_MAJOR, TARGETS[target])
    values, scales = integer_reference.quantize(x.numpy(), fmt.elem.name, fmt.rounding)
    np.testing.assert_array_equal(copy.scale.numpy(), scales)
    np.testing.assert_array_equal(copy.qdata.to(torch.float64).numpy(), values)


@pytest.mark.parametrize("scales", ScaleLayout)
@pytest.mark.parametrize("shape", [(32, 64), (70, 100)], ids=str)
def test_square(shape, scales):
    x, fmt = spread(*shape), Format(tile=Tile.SQUARE)
    assert_same(quantize(x, Layout.BOTH, fmt, scales, TARGETS["sm_100"]), both(x, fmt, scales))


@pytest.mark.parametrize("layout", Layout)
def test_strides(layout):
    wide = spread(64, 300)
    scales, fmt = ScaleLayout.ROW_MAJOR, Format()
    for x in (wide.t(), wide[:, ::3], wide[::2, 7:], wide[:1].expand(40, 300)):
        expected = both(x, fmt, scales)
        wanted = {Layout.ROWWISE: expected[:1], Layout.COLUMNWISE: expected[1:], Layout.BOTH: expected}
        assert_same(quantize(x, layout, fmt, scales, TARGETS["sm_90"]), wanted[layout])


@pytest.mark.parametrize("scales", ScaleLayout)
@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0)], ids=str)
def test_empty(shape, scales):
    x, fmt = torch.empty(shape), Format()
    assert_same(quantize(x, Layout.BOTH, fmt, scales, TARGETS["sm_100"]), both(x, fmt, scales))


def test_swizzled_padding_is_written():
    """Memory that held NaN scales holds zeros in the padding afterwards, and nothing else is touched."""
    x = spread(130, 200)
    launch, (rowwise, columnwise) = plan(x, Layout.BOTH, Format(), ScaleLayout.TILED_128X4, TARGETS["sm_100"])
    rowwise.scale.fill_(255)
    columnwise.scale.fill_(255)
    launch.run()
    assert_same((rowwise, columnwise), both(x, Format(), ScaleLayout.TILED_128X4))


def test_swizzle_formula():
    """The reference's tiling is the formula of cuBLAS's documentation, byte by byte."""
    scale = torch.randint(1, 255, (200, 7), dtype=torch.uint8)
    flat = tile_scale(scale)
    assert flat.numel() == 256 * 8
    tiled = torch.zeros(256 * 8, dtype=torch.uint8)
    for row in range(200):
        for block in range(7):
            tile = (row // 128) * 2 + block // 4
            inside = (row % 32) * 16 + ((row % 128) // 32) * 4 + block % 4
            tiled[tile * 512 + inside] = scale[row, block]
    assert torch.equal(flat, tiled)


def test_bytes_beyond_the_matrix_are_not_written():
    """A view into a larger buffer: what lies outside keeps its value."""
    x = spread(33, 70)
    launch, _ = plan(x, Layout.BOTH, Format(), ScaleLayout.ROW_MAJOR, TARGETS["sm_90"])
    guarded = {}
    for name, value in launch.arguments.items():
        if isinstance(value, torch.Tensor) and name != "x_ptr":
            buffer = torch.full((value.numel() + 64,), 0xAB, dtype=torch.uint8)
            guarded[name] = buffer
            launch.arguments[name] = buffer[:-64]
    launch.run()
    for name, buffer in guarded.items():
        assert (buffer[-64:] == 0xAB).all(), name


@pytest.mark.parametrize("dim", [0, 1])
def test_offsets_beyond_32_bits(dim):
    """Rows, or columns, 2^30 elements apart: the third lies where a 32-bit offset would have wrapped."""
    apart = (1 << 30) + 16
    memory = torch.empty(2 * apart + 64, dtype=torch.uint8).view(
        torch.float8_e5m2
    )  # pages are made when touched
    x = memory.as_strided((3, 64), (apart, 1)) if dim == 0 else memory.as_strided((64, 3), (1, apart))
    values = spread(*x.shape).to(torch.float8_e5m2)
    x.copy_(values)
    (copy,) = quantize(x, Layout.ROWWISE, Format(), ScaleLayout.ROW_MAJOR, TARGETS["sm_90"])
    assert_same((copy,), both(values, Format(), ScaleLayout.ROW_MAJOR)[:1])
