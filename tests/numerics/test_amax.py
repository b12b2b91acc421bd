"""What scales follow from beside the largest magnitude: percentiles, and the operators of states."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from helpers.casts import WITHOUT_SCHEMA, codes
from torch.library import opcheck

from mxcompile import ops
from mxcompile.errors import FormatError
from mxcompile.formats import Amax, AmaxKind, Format
from mxcompile.formats.encoding import decode_tensors, encode_tensors


@pytest.mark.parametrize("percent", [50.0, 90.0, 99.9, 100.0])
@pytest.mark.parametrize(
    ("word", "rows", "columns"),
    [("e4m3 tensor nearest", 60, 70), ("e5m2 channel nearest", 1, 70), ("e4m3 1x128 nearest", 1, 128)],
)
def test_percentile_scale_equals_sorting_by_hand(word: str, rows: int, columns: int, percent: float):
    """The smallest magnitude that so many percent of a tile do not exceed; larger elements saturate."""
    fmt = Format.parse(f"{word} percentile:{percent:g}")
    assert Format.parse(str(fmt)) == fmt
    gen = torch.Generator().manual_seed(2)
    x = torch.randn(60, 70, generator=gen) * torch.exp2(torch.randint(-6, 6, (60, 70), generator=gen).float())
    value = decode_tensors(*encode_tensors(x, -1, fmt), -1, fmt, torch.float32)
    dtype = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[fmt.elem.name]
    for top in range(0, 60, rows):
        for column in range(0, 70, columns):
            tile = x[top : top + rows, column : column + columns].numpy()
            reached = np.sort(np.abs(tile).ravel())[math.ceil(tile.size * percent / 100) - 1]
            scale = np.float32(reached) / np.float32(fmt.elem.max)
            over = np.clip(tile / scale, -fmt.elem.max, fmt.elem.max)
            expected = over.astype(dtype).astype(np.float32) * scale
            part = value[top : top + rows, column : column + columns]
            np.testing.assert_array_equal(part.numpy(), expected)


def test_percentile_of_mx_blocks_saturates_elements_above_it():
    x = torch.ones(2, 32)
    x[0, 7] = 1000.0
    plain, robust = (Format.parse(f"e2m1 1x32 rceil{rest}") for rest in ("", " percentile:90"))
    lost = decode_tensors(*encode_tensors(x, -1, plain), -1, plain, torch.float32)
    kept = decode_tensors(*encode_tensors(x, -1, robust), -1, robust, torch.float32)
    assert not lost[0, 0]
    assert kept[0, 0] == 1
    assert kept[0, 7] == 1.5  # the largest E2M1, 6, under the scale of 1
    assert torch.equal(lost[1], kept[1])


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (2, 3, 40)])
def test_percentile_casts_keep_shapes_of_tensors(shape: tuple[int, ...]):
    fmt = Format.parse("e4m3 1x32 rceil percentile:90")
    qdata, scale = encode_tensors(torch.ones(shape), -1, fmt)
    assert qdata.shape == shape
    assert scale.shape == (*shape[:-1], -(-shape[-1] // 32))


def test_operators_of_scale_states_pass_opcheck():
    state, x = torch.tensor([1.0, 0.0, 3.0]), torch.randn(20, 30)
    delayed, ema = "e4m3 tensor nearest delayed:4:1", "e5m2 tensor nearest ema:0.5"
    opcheck(ops.largest, (x,))
    opcheck(ops.largest, (x[:0],))
    opcheck(ops.known_scale, (state, 2, delayed, 2))
    opcheck(ops.mean, (state, 0, ops.largest(x), ema))
    opcheck(ops.slot, (state,))
    w = torch.randn(8, 8, requires_grad=True)
    opcheck(ops.tapped, (w, state.clone().requires_grad_()))
    arguments = x, codes(-1, "e4m3 tensor nearest delayed:4:0"), None, 0, [torch.full((1, 1), 0.25)]
    opcheck(ops.cast, arguments, test_utils=WITHOUT_SCHEMA)


def test_known_scale_follows_from_the_state():
    state = torch.tensor([448.0, 0.0, torch.inf])
    scales = [float(ops.known_scale(state, row, "e4m3 tensor nearest delayed:4:1", 2)) for row in range(3)]
    assert scales[:2] == [2.0, 1.0]
    assert math.isnan(scales[2])


def test_amax_text_parses_and_prints():
    assert str(Amax(kind=AmaxKind.DELAYED, value=1024, margin=-2)) == "delayed:1024:-2"
    assert Amax.parse("delayed:1024:-2").history == 1024
    assert Amax.parse("ema:0.9").history == 1
    assert Amax.parse("max") == Amax()
    with pytest.raises(FormatError, match="unknown amax 'most'"):
        Amax.parse("most")
    with pytest.raises(FormatError, match="amax 'percentile:high': expected numbers after percentile"):
        Amax.parse("percentile:high")


@pytest.mark.parametrize("word", ["ema:0.9", "delayed:16:0"])
def test_scales_of_earlier_calls_need_elements_with_nan(word: str):
    with pytest.raises(FormatError, match="would turn NaN into 0"):
        Format.parse(f"e2m1 tensor nearest {word}")


@pytest.mark.parametrize(
    "word", ["max foo", "nearest stochastic", "hadamard:x", "hadamard:1 hadamard:2", "packed packed"]
)
def test_a_word_of_no_format_raises(word: str):
    with pytest.raises(FormatError, match="is not a format: expected element type, tile and derivation"):
        Format.parse(f"e4m3 1x32 rceil {word}")
