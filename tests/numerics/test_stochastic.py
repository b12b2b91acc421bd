"""Stochastic rounding: its random numbers, that it rounds to neighbours, what to expect of it."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from helpers.casts import WITHOUT_SCHEMA, encode, rounded_tensors
from helpers.casts import codes as copies
from torch.library import opcheck

from mxcompile import ops
from mxcompile.errors import FormatError
from mxcompile.formats import ElemType, Format
from mxcompile.formats.elements import E2M1, E2M3, E3M2, E4M3, E5M2, INT8
from mxcompile.formats.encoding import element_values
from mxcompile.formats.stochastic import halves, philox, rounded

ELEMS = [E4M3, E5M2, E3M2, E2M3, E2M1, INT8]
FORMATS = ["e5m2 tensor nearest stochastic", "e4m3 1x32 rceil stochastic", "e2m1 1x32 rceil stochastic"]
TWO_LEVEL = "e2m1 1x16 two-level stochastic"
"""Whose largest elements saturate where an E4M3 scale is rounded down, so that they have another mean."""
SEED = torch.tensor([20260101])


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0), 0, (0x257A3673, 0xCD26BE2A)),
        ((0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFF, (0xAB302C4D, 0x3DC9D239)),
        ((0x243F6A88, 0x85A308D3), 0x13198A2E, (0xBEDBBE6B, 0xE4C770B3)),
    ],
)
def test_philox_has_the_known_answers_of_random123(
    counter: tuple[int, int], key: int, words: tuple[int, int]
):
    """Lines "philox2x32 7" of the library's kat_vectors."""
    left, right = philox(torch.tensor([counter[0]]), counter[1], torch.tensor([key]))
    assert (int(left), int(right)) == words


@pytest.mark.parametrize("dim", [-1, 1])
def test_four_neighbours_along_the_contraction_share_a_call(dim: int):
    """The last group may be smaller, and what follows begins with a call of its own."""
    shape = torch.Size([3, 6, 5])
    bits = halves(shape, dim, 9, SEED).movedim(dim, -1)
    groups = (
        torch.arange(3 * 6 * 2).reshape(3, 6, 2) if dim == -1 else torch.arange(3 * 2 * 5).reshape(3, 2, 5)
    )
    words = [word.movedim(dim, -1) for word in philox(groups, 9, SEED)]
    for position in np.ndindex(*bits.shape):
        *row, at = position
        word = int(words[at % 4 // 2][(*row, at // 4)])
        assert int(bits[position]) == (word >> 16 if at % 2 else word & 0xFFFF)


@pytest.mark.parametrize("elem", ELEMS, ids=str)
def test_the_definition_in_rational_numbers(elem: ElemType):
    gen = torch.Generator().manual_seed(3)
    exponents = torch.randint(elem.min_exponent - 26, elem.emax, (2000,), generator=gen)
    y = (torch.randn(2000, generator=gen) * torch.exp2(exponents.float())).clamp(-elem.max, elem.max)
    half = torch.randint(1 << 16, (2000,), generator=gen)
    least = Fraction(2) ** elem.min_exponent
    for value, bits, result in zip(y.tolist(), half.tolist(), rounded(y, elem, half).tolist(), strict=True):
        exact = abs(Fraction(value))
        if exact < least:  # FP32's last place of what lies between `least` and twice that
            ulp_of_fp32 = least / 2**23
            exact = round(exact / ulp_of_fp32) * ulp_of_fp32
        exponent = max(math.frexp(float(exact))[1] - 1, elem.min_exponent)
        ulp = Fraction(2) ** (exponent - elem.mantissa_bits)
        steps = math.floor(exact / ulp + Fraction(bits | 1, 1 << 16))
        assert abs(Fraction(result)) == steps * ulp, (value, bits)
        assert math.copysign(1.0, result) == math.copysign(1.0, value)


def neighbours(y: np.ndarray, elem: ElemType) -> tuple[np.ndarray, np.ndarray]:
    """The values of `elem` below and above, equal where `y` is one."""
    grid = element_values(torch.arange(1 << elem.bits, dtype=torch.uint8).view(elem.dtype), elem)
    grid = np.unique(grid[grid.isfinite()].numpy().astype(np.float64))
    above = np.searchsorted(grid, y)
    below = np.where(grid[np.minimum(above, len(grid) - 1)] == y, above, above - 1)
    return grid[below], grid[above]


@pytest.mark.parametrize("elem", ELEMS, ids=str)
def test_every_value_goes_to_a_neighbour(elem: ElemType):
    y = torch.linspace(-elem.max, elem.max, 4096)
    y = torch.cat([y, y * 2.0**-6, y * 2.0**-16, torch.tensor([0.0, -0.0, elem.max, -elem.max])])
    results = rounded(y, elem, halves(y.shape, -1, 0, SEED))
    below, above = neighbours(y.double().numpy(), elem)
    values = results.double().numpy()
    assert ((values == below) | (values == above)).all()
    assert ((values == below) & (values < y.double().numpy())).any()
    assert ((values == above) & (values > y.double().numpy())).any()
    assert torch.equal(results.signbit(), y.signbit())


@pytest.mark.parametrize("elem", ELEMS, ids=str)
def test_stochastic_rounding_keeps_representable_values_for_all_bits(elem: ElemType):
    values = element_values(torch.arange(1 << elem.bits, dtype=torch.uint8).view(elem.dtype), elem)
    values = values[values.isfinite()]
    for half in (0, 0xFFFF):
        assert torch.equal(rounded(values, elem, torch.full(values.shape, half)), values)


@pytest.mark.parametrize("elem", ELEMS, ids=str)
@pytest.mark.parametrize("share", [0.03, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("interval", ["normal", "subnormal"])
def test_the_expectation_is_the_value(elem: ElemType, share: float, interval: str):
    """Up as often as `share` says, to five standard deviations; rounding to nearest is far outside."""
    low = 2.0 ** (elem.min_exponent - elem.mantissa_bits)  # the smallest subnormal, then 1.0 and what follows
    below, above = (low, 2 * low) if interval == "subnormal" else (1.0, 1.0 + 2.0**-elem.mantissa_bits)
    count = 1 << 18
    y = torch.full((count,), below + share * (above - below))
    exact = (float(y[0]) - below) / (above - below)
    ups = int((rounded(y, elem, halves(y.shape, -1, 5, SEED)) == above).sum())
    deviation = (exact * (1 - exact) * count) ** 0.5
    assert abs(ups - exact * count) < 5 * deviation
    nearest = float(round(exact)) * count
    assert abs(nearest - exact * count) > 50 * deviation


def test_neighbouring_elements_streams_and_seeds_are_independent():
    count = 1 << 16
    first = halves(torch.Size([count]), -1, 0, SEED).double()
    others = {
        **{f"{shift} further": first.roll(shift) for shift in range(1, 5)},
        "stream": halves(torch.Size([count]), -1, 1, SEED).double(),
        "seed": halves(torch.Size([count]), -1, 0, SEED + 1).double(),
    }
    for name, other in others.items():
        together = torch.corrcoef(torch.stack([first, other]))[0, 1]
        assert abs(float(together)) < 5 / count**0.5, name
    bytes_ = torch.bincount((first.long() >> 8).flatten(), minlength=256)
    assert float(((bytes_ - count / 256) ** 2 / (count / 256)).sum()) < 255 + 5 * (2 * 255) ** 0.5


@pytest.mark.parametrize("word", FORMATS)
@pytest.mark.parametrize("dim", [-1, -2])
def test_mean_of_stochastic_casts_approaches_the_tensor(word: str, dim: int):
    """The mean of many casts comes closer to the tensor as independent errors do; nearest does not."""
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(64, 96, generator=gen) * torch.exp2(torch.randint(-9, 9, (64, 1), generator=gen).float())
    x /= x.abs().amax() / 6.0
    fmt = Format.parse(word)
    draws = [rounded_tensors(x, dim, fmt, SEED, stream).double() for stream in range(256)]
    plain = Format.parse(word.removesuffix(" stochastic"))
    nearest = rounded_tensors(x, dim, plain).double()

    def error(value: torch.Tensor) -> float:
        return float((value - x.double()).norm())

    assert error(sum(draws) / 256) < 1.15 * error(draws[0]) / 16
    assert error(nearest) > 4 * error(draws[0]) / 16


@pytest.mark.parametrize("word", [*FORMATS, TWO_LEVEL])
def test_nan_and_inf_survive_stochastic_casts(word: str):
    fmt = Format.parse(word)
    for bad in (float("nan"), float("inf"), -float("inf")):
        x = torch.ones(4, 64)
        x[1, 40] = bad
        value = rounded_tensors(x, -1, fmt, SEED)
        whole = fmt.rounding is None
        assert value[1, 32:].isnan().all()
        assert bool(value[0].isnan().all()) == whole
        assert bool(value[1, :32].isnan().all()) == whole


@pytest.mark.parametrize("word", [*FORMATS, TWO_LEVEL])
def test_stochastic_casts_pass_opcheck(word: str):
    fmt = Format.parse(word)
    checked = {} if fmt.elem.is_coded and not fmt.two_level else {"test_utils": WITHOUT_SCHEMA}
    for shape in ((40, 70), (0, 5), (2, 33, 65)):
        x = torch.randn(shape)
        amax = ops.largest(x) if fmt.two_level else None
        opcheck(ops.cast, (x, copies(-1, word), SEED, 3, None, [amax]), **checked)
        valued = checked if fmt.two_level else {}
        (scale,) = ops.cast(x, [f"{word} @-1 scales"], None, 0, None, [amax])
        for form, checks in (("elements", checked), ("bfloat16", valued), ("elements float32", valued)):
            opcheck(ops.cast, (x, [f"{word} @-1 {form}"], SEED, 3, [scale], [amax]), **checks)


def test_a_cast_without_its_seed_is_an_error():
    with pytest.raises(FormatError, match="e5m2 tensor nearest stochastic rounds stochastically: pass seed"):
        encode(torch.ones(2, 2), -1, "e5m2 tensor nearest stochastic")
