"""Statistics of a cast, against values counted one by one from the tensor and its reference cast."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict

import pytest
import torch
from helpers.casts import encode
from helpers.reference import quantize, round_trip
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mxcompile import ops
from mxcompile.formats import PRECISIONS, Format
from mxcompile.formats.precisions import Choices
from mxcompile.watch.tally import Tally

FORMATS = sorted(
    {
        str(operands.operand_format(name))
        for row in PRECISIONS.values()
        if row.quantizes
        for tiles in row.tiles
        for operands in [row.formats(Choices(block=tiles, scaling=tiles))]
        for name in ("x", "w", "dy")
    }
    | {"e4m3 1x32 floor", "e4m3 1x32 even", "e5m2 32x32 ceil", "e5m2 1x32 rceil stochastic"}
)


def drawn(shape: tuple[int, ...], seed: int, dtype: torch.dtype, odd: bool) -> Tensor:
    """Numbers of many magnitudes, zeros among them, and, if `odd`, NaN and Inf."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randn(shape, generator=generator) * 8)
    x[torch.rand(shape, generator=generator) < 0.1] = 0.0
    if odd:
        flat = x.flatten()
        flat[0], flat[-1], flat[flat.numel() // 2] = math.nan, math.inf, -math.inf
        x = flat.view(shape)
    return x.to(dtype)


def counted(x: Tensor, value: Tensor, stored: Tensor, limit: float) -> dict[str, float]:
    """Every field, one element after the other."""
    statistics: dict[str, float] = dict.fromkeys(ops.watch.FIELDS, 0.0)
    statistics["smallest"] = math.inf
    for number, cast, element in zip(
        *(t.double().flatten().tolist() for t in (x, value, stored)), strict=True
    ):
        statistics["elements"] += 1
        if not math.isfinite(number):
            statistics["nan" if math.isnan(number) else "inf"] += 1
            continue
        statistics["amax"] = max(statistics["amax"], abs(number))
        if number != 0:
            statistics["nonzero"] += 1
            statistics["smallest"] = min(statistics["smallest"], abs(number))
        if not math.isfinite(cast):
            statistics["poisoned"] += 1
            continue
        statistics["underflow"] += number != 0 and cast == 0
        statistics["saturated"] += abs(element) == limit and abs(number) > abs(cast)
        statistics["signal"] += number * number
        statistics["noise"] += (cast - number) ** 2
    return statistics


def seeds(fmt: str) -> list[Tensor]:
    return [torch.tensor([7])] if "stochastic" in fmt else []


def measured(x: Tensor, dim: int, fmt: str) -> Tally:
    numbers, _ = ops.cast_statistics(x, dim, fmt, 0, *seeds(fmt))
    return Tally.from_numbers("", fmt, numbers.tolist())


@pytest.mark.parametrize("fmt", FORMATS)
@settings(max_examples=8, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 70)) | st.tuples(*[st.integers(1, 9)] * 3),
    dim=st.sampled_from([-1, -2]),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    odd=st.booleans(),
)
def test_every_statistic_equals_a_count_by_hand(
    fmt: str, shape: tuple[int, ...], dim: int, seed: int, dtype: torch.dtype, odd: bool
):
    x, form = drawn(shape, seed, dtype, odd), Format.parse(fmt)
    amax = ops.largest(x) if form.two_level else None
    qdata, scale = encode(x, dim, fmt, *(seeds(fmt) or [None]), 0, None, amax)
    value, stored = (ops.decode(qdata, s, dim, fmt, torch.float32, amax) for s in (scale, None))
    expected = counted(x, value, stored, form.elem.max)
    tally = measured(x, dim, fmt)
    assert tally.sums == pytest.approx(expected, rel=1e-12)
    if form.two_level:
        scale = scale.float() * ops.known_scale(amax, 0, fmt, 1)
    exponents = scale if scale.dtype is torch.uint8 else scale.view(torch.int32) >> 23 & 0xFF
    assert tally.histogram == dict(Counter(exponents.flatten().tolist()))


@pytest.mark.parametrize("elem", ["e4m3", "e5m2"])
@pytest.mark.parametrize("rounding", ["rceil", "floor", "ceil", "even"])
def test_statistics_equal_a_reference_by_the_ocp_standard(elem: str, rounding: str):
    x = drawn((9, 70), 3, torch.float32, odd=True)
    elements, scales = quantize(x.numpy(), elem, rounding)
    factors = torch.from_numpy(scales).to(torch.float64).sub(127).exp2().repeat_interleave(32, 1)[:, :70]
    stored = torch.from_numpy(elements)
    expected = counted(x, stored * factors, stored, Format.parse(f"{elem} 1x32 {rounding}").elem.max)
    tally = measured(x, -1, f"{elem} 1x32 {rounding}")
    assert tally.sums == pytest.approx(expected, rel=1e-12)
    assert tally.histogram == dict(Counter(scales.flatten().tolist()))


def test_statistics_follow_from_the_sums_of_a_tally():
    x = drawn((64, 64), 5, torch.float32, odd=False)
    value = round_trip(x, -1)
    statistics = measured(x, -1, "e4m3 1x32 rceil").statistics()
    error = (value.double() - x.double()).norm() / x.double().norm()
    assert statistics["error"] == pytest.approx(float(error), rel=1e-9)
    assert statistics["sqnr"] == pytest.approx(-20 * math.log10(error), rel=1e-9)
    assert statistics["underflow"] == float(((value == 0) & (x != 0)).sum() / (x != 0).sum().double())
    assert statistics["amax"] == float(x.abs().max())
    assert statistics["scale_min"] < statistics["scale_median"] < statistics["scale_max"]


def test_parts_join_to_the_whole():
    """Calls and ranks are joined from their sums, also as they travel."""
    x = drawn((64, 96), 6, torch.float32, odd=True)
    whole = measured(x, -1, "e4m3 1x32 rceil")
    joined = measured(x[:32], -1, "e4m3 1x32 rceil")
    rest = measured(x[32:], -1, "e4m3 1x32 rceil")
    joined.add(Tally.from_json(json.loads(json.dumps(asdict(rest)))))
    assert joined.calls == 2
    assert joined.sums == pytest.approx(whole.sums, rel=1e-12)
    assert joined.histogram == whole.histogram
    assert joined.statistics()["sqnr"] == pytest.approx(whole.statistics()["sqnr"], rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_statistics_without_cast_lose_nothing(dtype: torch.dtype):
    """Results of products are not cast: what is in them is counted, and nothing is lost."""
    x = drawn((9, 70), 3, dtype, odd=True)
    tally = measured(x, -1, "")
    assert tally.sums == pytest.approx(counted(x, x.float(), x.float(), math.inf), rel=1e-12)
    assert tally.histogram == {}
    assert tally.statistics() == {"amax": float(x[x.isfinite()].abs().max()), "nan": 1, "inf": 2} | {
        "smallest": float(x[x.isfinite() & (x != 0)].abs().min())
    }


def test_statistics_of_zeros_have_no_sqnr():
    statistics = measured(torch.zeros(4, 40), -1, "e4m3 1x32 rceil").statistics()
    expected = {"amax": 0.0, "smallest": None, "underflow": 0.0, "error": 0.0, "sqnr": None}
    assert {name: statistics[name] for name in expected} == expected


def test_statistics_of_empty_tensor_are_zero():
    statistics = measured(torch.zeros(0, 40), -1, "e4m3 1x32 rceil").statistics()
    assert (statistics["amax"], statistics["scale_median"], statistics["nan"]) == (0.0, None, 0)


def test_the_kept_part_is_spread_evenly():
    x = torch.arange(1.0, 4097.0).view(64, 64)
    _, kept = ops.cast_statistics(x, -1, "e4m3 1x32 rceil", 16)
    assert torch.equal(kept, round_trip(x, -1).flatten()[::256])
