"""The casts of every format of the table, against numbers of ml_dtypes, numpy and torchao."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from helpers.casts import rounded_tensors
from helpers.reference import scale_byte_of
from helpers.spread import every_bf16
from torch.utils._python_dispatch import TorchDispatchMode

from mxcompile.errors import FormatError
from mxcompile.formats import PRECISIONS, Choices, ElemType, Format, Rounding, ScaleType, Tile
from mxcompile.formats.encoding import (
    decode_tensors,
    element_values,
    encode_tensors,
    pack,
    tensor_amax,
    to_elements,
)

DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
ROWS = [row for row in PRECISIONS.values() if row.quantizes]
ELEMS = {elem.name: elem for row in ROWS for elem in row.elems}


def nearest(values: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Bytes and FP32 values of the nearest elements: by ml_dtypes; integers by numpy, in FP64."""
    if name == "int8":
        steps = np.rint(values.astype(np.float64) * 64).astype(np.int8)
        return steps.view(np.uint8), steps / np.float32(64)
    elements = values.astype(np.float32).astype(DTYPES[name])
    return elements.view(np.uint8), elements.astype(np.float32)


FORMATS = sorted(
    {
        str(fmt)
        for row in ROWS
        for word in row.tiles
        for elem in row.elems
        for block in row.weight_blocks or (None,)
        for operands in [row.formats(Choices(elem_dtype=elem, block=word, scaling=word, weight_block=block))]
        for fmt in (operands.x, operands.w)
    }
)
BF16 = every_bf16()


@pytest.mark.parametrize("name", ELEMS)
def test_elements_are_the_nearest_of_the_grid(name: str):
    elem = ELEMS[name]
    grid = element_values(torch.arange(1 << elem.bits, dtype=torch.uint8).view(elem.dtype), elem)
    grid = grid[grid.isfinite()].unique()
    middles = (grid[1:] + grid[:-1]) / 2
    around = torch.cat([middles, middles.nextafter(grid[1:]), middles.nextafter(grid[:-1]), grid])
    plain = BF16.to(torch.float32)
    values = torch.cat([plain, around])
    values = values[values.abs() <= elem.max]
    codes, expected = nearest(values.numpy(), name)
    elements = to_elements(values, elem)
    np.testing.assert_array_equal(elements.view(torch.uint8).numpy(), codes)
    np.testing.assert_array_equal(element_values(elements, elem).numpy(), expected)


class Operators(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "int8"])
def test_elements_of_large_weights_take_few_operators(name: str):
    """Each operator reads and writes the whole weight, so storing a model takes as long as they are many."""
    values = torch.tensor([-1.5, float("nan"), 0.3, 1.9])
    with Operators() as operators:
        elements = to_elements(values, ELEMS[name])
    assert operators.count <= 4
    expected = [-1.5, 0.0 if name == "int8" else float("nan"), 0.3, 1.9]
    decoded = element_values(elements, ELEMS[name])
    torch.testing.assert_close(decoded, torch.tensor(expected), rtol=0.1, atol=0.0, equal_nan=True)


def around_steps(elem: ElemType) -> torch.Tensor:
    """largest·2^k, 2^k and the thresholds of EVEN, with the 4 FP32 neighbours on each side."""
    steps = [elem.max / 2.0**elem.emax, 1.0, 2.0 - 2.0 ** -(elem.mantissa_bits + 1)]
    with np.errstate(over="ignore"):
        anchors = np.array([step * 2.0**k for step in steps for k in range(-149, 128)], dtype=np.float32)
    around = (anchors.view(np.int32)[:, None] + np.arange(-4, 5)).ravel()
    around = around[(around >= 0) & (around <= 0x7F800001)].astype(np.int32)
    return torch.from_numpy(around.view(np.float32))


@pytest.mark.parametrize("rounding", Rounding)
@pytest.mark.parametrize("name", ELEMS)
def test_e8m0_scales_of_every_bf16_amax_and_around_every_step(name: str, rounding: Rounding):
    """And of random FP32 amax; a block has each once, in the middle."""
    elem = ELEMS[name]
    bits = np.random.default_rng(0).integers(0, 1 << 32, 20_000, dtype=np.uint32)
    amax = torch.cat([BF16.float(), around_steps(elem), torch.from_numpy(bits.view(np.float32))])
    blocks = torch.zeros(amax.numel(), 32)
    blocks[:, 0], blocks[:, 9] = -0.0, amax
    _, scale = encode_tensors(blocks, -1, Format(elem=elem, rounding=rounding))
    parts = (elem.max, elem.emax, elem.mantissa_bits)
    expected = [scale_byte_of(abs(v), *parts, str(rounding)) for v in amax.tolist()]
    np.testing.assert_array_equal(scale.squeeze(1).numpy(), expected)


def fp32_reference(tile: np.ndarray, largest: float, dtype: type) -> tuple[np.float32, np.ndarray]:
    """Scale and values of one tile that shares it, by numpy's FP32 division and ml_dtypes' elements."""
    amax = np.abs(tile).max()
    if not np.isfinite(amax):
        return np.float32(np.nan), np.full(tile.shape, np.nan, np.float32)
    with np.errstate(under="ignore"):
        scale = np.float32(amax) / np.float32(largest)
        scale = np.float32(1) if scale == 0 else scale
        over = np.clip(tile / scale, -np.float32(largest), np.float32(largest))
        return scale, over.astype(dtype).astype(np.float32) * scale


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_fp32_scales_of_every_bf16_amax(name: str):
    elem = ELEMS[name]
    fmt = Format(elem=elem, rounding=None, tile=Tile.CHANNEL, scale=ScaleType.FP32)
    rows = BF16.to(torch.float32)[:, None] * torch.tensor([1.0, 0.7, -0.31, 0.013, 0.0])
    qdata, scale = encode_tensors(rows, -1, fmt)
    value = decode_tensors(qdata, scale, -1, fmt, torch.float32)
    for row in range(0, len(rows), 7):
        wanted, values = fp32_reference(rows[row].numpy(), elem.max, DTYPES[name])
        np.testing.assert_array_equal(scale[row, 0].numpy(), wanted)
        np.testing.assert_array_equal(value[row].numpy(), values)


def two_level_reference(tile: np.ndarray, amax: np.ndarray, dtype: type) -> tuple[np.ndarray, np.ndarray]:
    """Scales and values of tiles [tiles, elements], in Transformer Engine's order of operations.

    amax: of the tensor. As in its `NVFP4QuantizerRef`; the values are those of torchao's `dequantize`.
    """
    f32, most = np.float32, np.finfo(np.float32).max
    if not np.isfinite(amax):
        return np.full(len(tile), np.nan, f32), np.full(tile.shape, np.nan, f32)
    with np.errstate(all="ignore"):
        gain = f32(1) if amax == 0 else np.minimum(f32(448 * 6) / f32(amax), most)
        multiplier = f32(gain * (f32(1) / f32(6)))
        largest = np.abs(tile).max(1, initial=0)
        scale = np.minimum(largest * multiplier, f32(448)).astype(DTYPES["e4m3"]).astype(f32)
        inverse = np.minimum(f32(1) / (scale * (f32(1) / gain)), most)
        over = np.clip(tile * inverse[:, None], f32(-6), f32(6)).astype(dtype).astype(f32)
        outer = f32(1) if amax == 0 else f32(amax) / f32(448 * 6)
        return scale, over * (scale * outer)[:, None]


EXTREMES = [448.0 * 6, 1.0, 3.0e-39, 1e-30, 3.3e38, 7.0, 35.0, 1.75 * 5, 0.001, 1e20]


@pytest.mark.parametrize("largest", EXTREMES)
def test_two_levels_of_every_bf16_amax(largest: float):
    """Blocks whose largest magnitudes are all BF16 values up to that of the tensor."""
    fmt = Format.parse("e2m1 1x16 two-level")
    amax = torch.tensor([largest], dtype=torch.float32)
    values = BF16.to(torch.float32)
    values = values[values.abs() <= amax]
    blocks = torch.zeros(len(values), 16)
    blocks[:, :5] = values[:, None] * torch.tensor([0.31, 1.0, -0.7, 0.013, -0.0])
    blocks[:, 5:9] = values[:, None] * torch.tensor([0.25, 0.75, 1.25, 2.5]) / 6
    qdata, scale = encode_tensors(blocks, -1, fmt, amax=amax)
    decoded = decode_tensors(qdata, scale, -1, fmt, torch.float32, amax)
    scales, expected = two_level_reference(blocks.numpy(), amax.numpy()[0], DTYPES["e2m1"])
    np.testing.assert_array_equal(scale.squeeze(1).to(torch.float32).numpy(), scales)
    np.testing.assert_array_equal(decoded.numpy(), expected)


def test_two_levels_are_those_of_torchao():
    """Its values for its codes always; its codes where the tensor's scale is a power of two.

    Otherwise it rounds three quotients where Transformer Engine rounds products. Its scales of blocks are
    at least 2^−6.
    """
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    fmt, gen = Format.parse("e2m1 1x16 two-level"), torch.Generator().manual_seed(5)
    for exponent in (-20, 0, 7):
        x = torch.randn(64, 96, generator=gen).to(torch.bfloat16) * 2.0**exponent
        x[3, 5] = 448 * 6 * 2.0 ** (exponent - 8)
        amax = tensor_amax(x)
        outer = nvfp4.per_tensor_amax_to_scale(amax[0])
        theirs = nvfp4.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=outer)
        qdata, scale = encode_tensors(x, -1, fmt, amax=amax)
        assert torch.equal(scale.to(torch.float32), theirs.scale.to(torch.float32))
        assert torch.equal(pack(qdata, -1, fmt.elem), theirs.qdata)
        values = decode_tensors(qdata, scale, -1, fmt, torch.float32, amax)
        assert torch.equal(values, theirs.dequantize(torch.float32))


def test_a_cast_to_two_levels_without_the_amax_is_an_error():
    message = "e2m1 1x16 two-level needs the largest magnitude of the tensor: pass amax"
    with pytest.raises(FormatError, match=message):
        encode_tensors(torch.ones(2, 16), -1, Format.parse("e2m1 1x16 two-level"))


def pow2_reference(amax: float, largest: float) -> float:
    """The least power of two ≥ amax / largest, in rational numbers; at least 2^−127."""
    if amax == 0 or not np.isfinite(amax):
        return 1.0 if amax == 0 else np.nan
    wanted = Fraction(amax) / Fraction(largest)
    exponent = max(-127, int(np.frexp(amax / largest)[1]) - 3)
    while Fraction(2) ** exponent < wanted:
        exponent += 1
    return float(Fraction(2) ** exponent)


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_fp32_scales_that_are_powers_of_two(name: str):
    """Of every 37th BF16 amax and FP32 numbers around max · 2^k; elements are those of the exact quotient."""
    elem = ELEMS[name]
    edges = torch.exp2(torch.arange(-149, 110).double()) * elem.max
    edges = edges[edges < 3e38].float()
    amax = torch.cat([BF16[::37].float(), edges, edges.nextafter(edges * 2), edges.nextafter(edges * 0)])
    rows = amax[:, None] * torch.tensor([1.0, -0.7, 0.31, 0.013, -0.0])
    fmt = Format.parse(f"{name} channel pow2")
    assert str(fmt) == f"{name} channel pow2"
    qdata, scale = encode_tensors(rows, -1, fmt)
    wanted = np.array([pow2_reference(abs(value), elem.max) for value in amax.tolist()], np.float64)
    np.testing.assert_array_equal(scale.squeeze(1).double().numpy(), wanted)
    over = np.clip(rows.double().numpy() / wanted[:, None], -elem.max, elem.max)  # exact
    expected = over.astype(np.float32).astype(DTYPES[name]).astype(np.float32)
    np.testing.assert_array_equal(qdata.float().numpy(), expected)


def test_powers_of_two_are_those_of_torchao():
    """Its rowwise recipes round the inverse scale down."""
    utils = pytest.importorskip("torchao.float8.float8_utils")
    amax = BF16[BF16.float().isfinite() & (BF16.float() > 1e-11)].float()
    theirs = utils.amax_to_scale(amax, torch.float8_e4m3fn, round_scales_to_power_of_2=True)
    _, scale = encode_tensors(amax[:, None], -1, Format.parse("e4m3 channel pow2"))
    np.testing.assert_array_equal((1 / theirs).numpy(), scale.squeeze(1).numpy())


@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (130, 257), (0, 4), (4, 0), (2, 40, 70)], ids=str)
@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("word", FORMATS)
def test_tiles_cast_alone_equal_the_whole_cast(word: str, dim: int, shape: tuple[int, ...]):
    fmt = Format.parse(word)
    gen = torch.Generator().manual_seed(len(word))
    spread = torch.exp2(torch.randint(-30, 30, (*shape[:-1], 1), generator=gen).float())
    x = torch.randn(shape, generator=gen) * spread
    value = rounded_tensors(x, dim, fmt)
    assert value.shape == x.shape
    along, across = (fmt.tile.along or 10**9), (fmt.tile.across or 10**9)
    rows, columns = (across, along) if dim == -1 else (along, across)
    whole = fmt.tile == Tile.TENSOR
    batches = [(x, value)] if whole or x.ndim == 2 else list(zip(x, value, strict=True))
    for source, cast in batches:
        flat = source if source.ndim == 2 else source.reshape(1, -1)
        got = cast if cast.ndim == 2 else cast.reshape(1, -1)
        for top in range(0, flat.shape[0], rows):
            for column in range(0, flat.shape[1], columns):
                tile = flat[top : top + rows, column : column + columns].numpy()
                part = got[top : top + rows, column : column + columns].numpy()
                if fmt.two_level:
                    amax, dtype = tensor_amax(x).numpy()[0], DTYPES[fmt.elem.name]
                    expected = two_level_reference(tile.reshape(1, -1), amax, dtype)[1].reshape(tile.shape)
                elif fmt.rounding is None:
                    _, expected = fp32_reference(tile, fmt.elem.max, DTYPES[fmt.elem.name])
                else:
                    parts = (fmt.elem.max, fmt.elem.emax, fmt.elem.mantissa_bits)
                    byte = scale_byte_of(float(np.abs(tile).max()), *parts, str(fmt.rounding))
                    power = 2.0 ** (byte - 127)
                    over = np.clip(tile.astype(np.float64) / power, -fmt.elem.max, fmt.elem.max)
                    expected = nearest(over, fmt.elem.name)[1] * power
                np.testing.assert_array_equal(part, expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("word", [*FORMATS, "e4m3 channel nearest percentile:50"])
def test_nan_and_inf_fill_their_tile(word: str, bad: float):
    fmt = Format.parse(word)
    x = torch.ones(256, 256)
    x[3, 200] = bad
    value = rounded_tensors(x, -1, fmt)
    clean = rounded_tensors(torch.ones(256, 256), -1, fmt)
    tile = Tile.TENSOR if fmt.two_level else fmt.tile  # the tensor's scale is of all elements
    across, along = tile.across or 256, tile.along or 256
    rows = slice(3 // across * across, (3 // across + 1) * across)
    columns = slice(200 // along * along, (200 // along + 1) * along)
    assert value[rows, columns].isnan().all()
    clean[rows, columns] = torch.nan
    torch.testing.assert_close(value, clean, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("word", ["e3m2 1x32 floor", "e2m3 1x32 floor", "e2m1 1x32 floor"])
def test_sub_byte_values_are_those_of_torchao(word: str):
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    fmt = Format.parse(word)
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    names = {"e3m2": "fp6_e3m2", "e2m3": "fp6_e2m3", "e2m1": torch.float4_e2m1fn_x2}
    scale, packed = mx.to_mx(x, names[fmt.elem.name], 32, mx.ScaleCalculationMode.FLOOR)
    wanted = mx.to_dtype(packed, scale, names[fmt.elem.name], 32, torch.float32)
    values = decode_tensors(*encode_tensors(x, -1, fmt), -1, fmt, torch.float32)
    assert torch.equal(values, wanted)
