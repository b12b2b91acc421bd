"""Copies by their words: what a cast makes of a tensor, and the errors of other words."""

from __future__ import annotations

import pytest
import torch

from mxcompile import ops
from mxcompile.errors import FormatError
from mxcompile.formats import Copy

WORDS = [
    "e4m3 1x32 rceil",
    "e4m3 32x32 rceil",
    "e4m3 channel nearest",
    "e5m2 tensor nearest",
    "e4m3 1x128 pow2",
    "e2m1 1x16 two-level",
]


@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("word", WORDS)
def test_parts_of_a_copy_are_those_of_the_whole(word: str, dim: int):
    x = torch.randn(40, 96, generator=torch.Generator().manual_seed(0))
    amax = [x.abs().amax().reshape(1)] if "two-level" in word else None

    def cast(part: str, *scale: torch.Tensor) -> list[torch.Tensor]:
        return ops.cast(x, [f"{word} @{dim} {part}"], None, 0, list(scale) or None, amax)

    qdata, scale = cast("codes")
    (scales,) = cast("scales")
    (elements,) = cast("elements", scale)
    assert torch.equal(scales.view(torch.uint8), scale.view(torch.uint8))
    assert torch.equal(elements.view(torch.uint8), qdata.view(torch.uint8))
    (values,) = cast("float32", scale)
    (numbers,) = cast("elements float32", scale)
    assert torch.equal(values, ops.decode(qdata, scale, dim, word, torch.float32))
    assert torch.equal(numbers, ops.decode(qdata, None, dim, word, torch.float32))


FORMS = "codes", "codes 128x4", "elements", "elements bfloat16", "elements transposed fnuz", "scales per-row"


@pytest.mark.parametrize("word", [*FORMS, "largest", "float32"])
def test_a_copy_is_written_as_it_is_read(word: str):
    written = f"e4m3 32x32 rceil @-2 {word}"
    assert str(Copy.parse(written)) == written


def test_elements_that_lie_transposed_have_half_the_value_in_types_of_mi300():
    x = torch.randn(40, 96, generator=torch.Generator().manual_seed(0))
    x[3, 5], x[4, 6], x[7] = -0.0, torch.nan, 0.0
    word = "e4m3 1x128 nearest @-2"
    (elements,) = ops.cast(x, [f"{word} elements"])
    (halves,) = ops.cast(x, [f"{word} elements transposed fnuz"])
    assert (halves.dtype, halves.shape, halves.is_contiguous()) == (torch.float8_e4m3fnuz, (96, 40), True)
    torch.testing.assert_close(2 * halves.t().float(), elements.float(), rtol=0, atol=0, equal_nan=True)


def test_the_largest_magnitude_is_that_of_the_tensor():
    x = torch.tensor([[1.0, -3.0], [2.0, 0.5]])
    (largest,) = ops.cast(x, ["e4m3 channel nearest @-1 largest"])
    assert largest.tolist() == [3.0]


NO_FORMS = ["", " codes codes", " bfloat16 elements", " float33", " 128x4", " 128x4 codes"]
NO_DIMENSIONS = ["e4m3 1x32 rceil codes", "e4m3 1x32 rceil @x codes", "e4m3 1x32 rceil @--1 codes"]


@pytest.mark.parametrize(
    "word", [*(f"e4m3 1x32 rceil @-1{form}" for form in NO_FORMS), *NO_DIMENSIONS, "", "@-1 codes"]
)
def test_a_copy_without_a_format_a_dimension_or_a_form_raises(word: str):
    with pytest.raises(FormatError, match="is not a copy: expected a format"):
        Copy.parse(word)
