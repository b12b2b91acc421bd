"""NVFP4 with a choice of scales ("4 over 6") and with a scale for each row, against numpy in FP32.

The reference follows the order of operations of Transformer Engine's `NVFP4QuantizerRef`
(transformer_engine/pytorch/custom_recipes/reference_nvfp4.py), for finite numbers.
"""

import ml_dtypes
import numpy as np
import pytest
import torch
from helpers.bits import assert_same_bits
from helpers.casts import codes, rounded_tensors
from helpers.spread import every_bf16

from mxcompile import ops
from mxcompile.errors import FormatError
from mxcompile.formats import Format
from mxcompile.formats.encoding import decode_tensors, element_values, encode_tensors, outer_amax, tensor_amax
from mxcompile.formats.four_over_six import BOUNDS, BlockError, FourOverSix

F32 = np.float32
MOST = np.finfo(F32).max
CHOICES = [FourOverSix(bound=bound, error=error) for bound in BOUNDS for error in BlockError]
EXTREMES = [448.0 * 6, 256.0 * 6, 1.0, 3.0e-39, 1e-30, 3.3e38, 7.0, 8.75, 0.001, 1e20]
BF16 = every_bf16()
SHAPES = [(16, 32), (5, 33), (70, 100), (1, 1), (0, 4), (4, 0), (2, 20, 40)]


def candidate(
    tiles: np.ndarray, amax: np.ndarray, choice: FourOverSix, wider: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scales, elements and errors of tiles [tiles, rows, elements] for one of the two scales."""
    bound, squared = choice.bound, choice.error is BlockError.MSE
    gain = np.where(amax == 0, F32(1), np.minimum(F32(bound * 6) / amax, MOST))
    over = np.abs(tiles).max((1, 2), initial=0) / F32(6) * gain
    if wider != 1:
        over = over * F32(wider)
    scale = np.minimum(over, F32(448)).astype(ml_dtypes.float8_e4m3fn).astype(F32)
    inverse = np.minimum(F32(1) / (scale * (F32(1) / gain)), MOST)
    elements = np.clip(tiles * inverse[:, None, None], F32(-6), F32(6))
    elements = elements.astype(ml_dtypes.float4_e2m1fn).astype(F32)
    values = elements * scale[:, None, None] * amax[:, None, None] / F32(bound * 6)
    difference = values - tiles
    cost = difference * difference if squared else np.abs(difference)
    rows = np.zeros(tiles.shape[:2], F32)
    for index in range(tiles.shape[2]):
        rows = rows + cost[:, :, index]
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return scale, elements, rows[:, 0]


def reference(tiles: np.ndarray, amax: np.ndarray, choice: FourOverSix) -> tuple[np.ndarray, np.ndarray]:
    """Scales [tiles] and elements of tiles [tiles, rows, elements]. amax: of each tile's tensor or row."""
    amax = np.broadcast_to(amax.astype(F32), tiles.shape[:1])
    with np.errstate(all="ignore"):
        scale, elements, error = candidate(tiles, amax, choice, 1.0)
        scale_of_four, of_four, error_of_four = candidate(tiles, amax, choice, 1.5)
    better = error_of_four < error
    return np.where(better, scale_of_four, scale), np.where(better[:, None, None], of_four, elements)


@pytest.mark.parametrize("largest", EXTREMES)
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_every_bf16_amax_gives_the_scales_and_elements_of_the_reference(choice: FourOverSix, largest: float):
    """Blocks whose largest magnitudes are all BF16 values up to the amax of the tensor."""
    amax = torch.tensor([largest], dtype=torch.float32)
    values = BF16.to(torch.float32)
    values = values[values.abs() <= amax]
    ratios = torch.tensor([1.0, -0.7, 0.31, 0.013, -0.0, 0.25, 0.75, 0.83, 0.9, -0.55, 0.625, 0.42, 0.17])
    blocks = torch.zeros(len(values), 16)
    for row in range(13):  # another combination of elements for each block
        blocks[row::13, :13] = values[row::13, None] * torch.cat([ratios[:1], ratios[1:].roll(row)])
        blocks[row::13, 1 + row % 12 :] = 0.0
    fmt = Format.parse(f"e2m1 1x16 two-level {choice}")
    qdata, scale = encode_tensors(blocks, -1, fmt, amax=amax)
    scales, elements = reference(blocks[:, None].numpy(), amax.numpy(), choice)
    np.testing.assert_array_equal(scale[:, 0].to(torch.float32).numpy(), scales)
    np.testing.assert_array_equal(element_values(qdata, fmt.elem).numpy(), elements[:, 0])
    plain = encode_tensors(blocks, -1, Format.parse("e2m1 1x16 two-level"), amax=amax)[1]
    if 1e-9 < largest < 1e9:  # else squares are 0 or inf, and the scale of 6 wins
        assert not torch.equal(scale.view(torch.uint8), plain.view(torch.uint8))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("tile", ["1x16", "16x16", "1x16 row-scaled"])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_tiles_of_any_shape_are_those_of_the_reference(
    choice: FourOverSix, tile: str, dim: int, shape: tuple[int, ...]
):
    extent, _, rows_word = tile.partition(" ")
    fmt = Format.parse(f"e2m1 {extent} two-level {choice} {rows_word}".strip())
    gen = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=gen) * torch.exp2(torch.randint(-9, 9, shape, generator=gen).float() / 3)
    amax = outer_amax(x, dim, fmt)
    qdata, scale = encode_tensors(x, dim, fmt, amax=amax)
    values = decode_tensors(qdata, scale, dim, fmt, torch.float32, amax)
    assert values.shape == x.shape
    across = fmt.tile.across
    for source, got, limits in matrices(x, values, amax, dim):
        for top in range(0, source.shape[0], across):
            for column in range(0, source.shape[1], 16):
                part = source[top : top + across, column : column + 16]
                padded = np.zeros((1, across, 16), F32)
                padded[0, : part.shape[0], : part.shape[1]] = part
                outer = limits[top if fmt.row_scaled else 0]
                scales, elements = reference(padded, np.array([outer], F32), choice)
                with np.errstate(all="ignore"):
                    wanted = elements[0] * (scales[0] * (F32(outer) / F32(6 * choice.bound)))
                np.testing.assert_array_equal(
                    got[top : top + across, column : column + 16], wanted[: part.shape[0], : part.shape[1]]
                )


def matrices(x: torch.Tensor, values: torch.Tensor, amax: torch.Tensor, dim: int):
    """The matrices of `x`, their values and amaxes, with the contraction along the columns."""
    if dim == -2:
        x, values = x.mT, values.mT
        amax = amax.mT if amax.ndim > 1 else amax
    for index in range(len(x)) if x.ndim > 2 else [...]:
        limits = amax[index] if amax.ndim > 2 else amax
        yield x[index].numpy(), values[index].numpy(), limits.flatten().numpy()


def test_a_scale_for_each_row_equals_the_cast_of_each_row_alone():
    fmt, alone = Format.parse("e2m1 1x16 two-level row-scaled"), Format.parse("e2m1 1x16 two-level")
    x = torch.randn(40, 50, generator=torch.Generator().manual_seed(1)) * torch.logspace(-20, 20, 40)[:, None]
    for dim, rows in ((-1, x), (-2, x.T.contiguous())):
        amax = outer_amax(rows, dim, fmt)
        qdata, scale = encode_tensors(rows, dim, fmt, amax=amax)
        values = decode_tensors(qdata, scale, dim, fmt, torch.float32, amax)
        for index, row in enumerate(x):
            row_amax = tensor_amax(row)
            row_parts = encode_tensors(row[None], -1, alone, amax=row_amax)
            wanted = decode_tensors(*row_parts, -1, alone, torch.float32, row_amax)
            assert torch.equal(values[index] if dim == -1 else values[:, index], wanted[0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "word", ["4over6:256:mae", "4over6:448:mse", "row-scaled", "4over6:256:mse row-scaled"]
)
def test_nan_and_inf_make_the_tensor_nan_or_their_row(word: str, bad: float):
    fmt = Format.parse(f"e2m1 1x16 two-level {word}")
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(2))
    for dim in (-1, -2):
        broken = x.clone()
        broken[3, 40] = bad
        clean, injected = (rounded_tensors(source, dim, fmt) for source in (x, broken))
        affected = torch.full((64, 64), not fmt.row_scaled)
        if fmt.row_scaled:
            affected.select(*((0, 3) if dim == -1 else (1, 40)))[:] = True
        assert injected[affected].isnan().all()
        assert torch.equal(injected[~affected], clean[~affected])


def test_equal_errors_take_the_scale_of_six():
    """A block of 6 · 2^k and one of 4 · 2^k are exact under both scales."""
    fmt = Format.parse("e2m1 1x16 two-level 4over6:448:mae")
    x = torch.zeros(2, 16)
    x[0, 0], x[1, 0] = 448 * 6.0, 24.0
    _, scale = encode_tensors(x, -1, fmt, amax=tensor_amax(x))
    assert scale[:, 0].to(torch.float32).tolist() == [448.0, 4.0]


@pytest.mark.parametrize(
    "word",
    [
        "e4m3 1x32 rceil 4over6:256:mae",
        "e2m1 1x32 rceil row-scaled",
        "e2m1 16x16 two-level row-scaled",
        "e2m1 1x16 two-level 4over6:128:mae",
        "e2m1 1x16 two-level 4over6:256",
        "e2m1 1x16 two-level 4over6:256:mae 4over6:448:mae",
        "e2m1 1x16 two-level row-scaled row-scaled",
        "e4m3 1x16 two-level 4over6:256:mae",
    ],
)
def test_formats_without_a_meaning_are_errors(word: str):
    with pytest.raises(FormatError, match=r"4over6|row-scaled"):
        Format.parse(word)


def test_words_are_read_back_and_weights_are_stored_as_plain_nvfp4():
    for choice in CHOICES:
        word = f"e2m1 1x16 two-level stochastic percentile:99 hadamard:9 {choice} row-scaled packed"
        assert str(Format.parse(word)) == word
        fmt = Format.parse(f"e2m1 1x16 two-level {choice}")
        assert fmt.storable
        assert str(fmt.stored) == "e2m1 1x16 two-level"
    assert not Format.parse("e2m1 1x16 two-level row-scaled").storable


@pytest.mark.parametrize("dim", [-1, -2])
def test_row_scaled_casts_pass_opcheck(dim: int):
    fmt = "e2m1 1x16 two-level 4over6:256:mae row-scaled"
    x = torch.randn(2, 20, 40)
    torch.library.opcheck(ops.largest, (x, dim))
    amax = ops.largest(x, dim)
    assert torch.equal(amax, x.abs().amax(dim, keepdim=True))
    torch.library.opcheck(ops.known_scale, (amax.unsqueeze(0), 0, fmt, 3))
    assert torch.equal(ops.known_scale(amax.unsqueeze(0), 0, fmt, 3), amax / torch.tensor(256.0 * 6))
    torch.library.opcheck(ops.cast, (x, codes(dim, fmt), None, 0, None, [amax]))


@pytest.mark.slow
def test_compiled_casts_have_the_bits_of_the_reference():
    words = [
        "e2m1 1x16 two-level 4over6:256:mae",
        "e2m1 1x16 two-level 4over6:448:mse row-scaled",
        "e2m1 16x16 two-level 4over6:256:mse",
    ]

    def casts(x: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for word in words:
            for dim in (-1, -2):
                rows = "row-scaled" in word
                amax = ops.largest(x, dim) if rows else ops.largest(x)
                qdata, scale = ops.cast(x, [f"{word} @{dim} codes"], None, 0, None, [amax])
                values = ops.decode(qdata, scale, dim, word, torch.float32, amax)
                outer = ops.known_scale(amax.unsqueeze(0), 0, word, 2) if rows else amax
                results += [qdata, scale.to(torch.float32), values, outer]
        return results

    x = torch.randn(37, 90, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(3))
    torch._dynamo.reset()
    assert_same_bits(torch.compile(casts)(x), casts(x))
