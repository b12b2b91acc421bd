"""Rates of chips, estimates with a range, and files of measured rates."""

from __future__ import annotations

import json

import pytest
import torch

from mxcompile.errors import OptionError
from mxcompile.lowering.targets import TARGETS
from mxcompile.offline.estimate import Work, library_work, ratio, total
from mxcompile.offline.rates import KINDS, Range, Rate, Rates, as_data

GPUS = [target for target in TARGETS.values() if target.peak is not None]
B200 = TARGETS["sm_100"]


@pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)
def test_every_chip_has_every_rate_with_its_source(target):
    rates = Rates.for_target(target)
    assert set(rates.table) == set(KINDS)
    for kind, rate in rates.table.items():
        assert rate.source, kind
        slow, fast = (rate.high, rate.low) if kind.endswith("_us") else (rate.low, rate.high)
        assert 0 < slow <= rate.centre <= fast <= 1.2 or kind.endswith("_us"), kind
        assert slow <= rate.centre <= fast, kind
        assert rates[kind] == rate.centre


def test_range_adds_changes_of_rates_in_squares():
    """Two rates move one time each; moves are added as squares."""
    work = Work(num_bytes=8e9 * 0.78)
    rates = Rates.for_target(B200)
    sum_of_works = Range.from_rates(lambda moved: work.estimate(moved).us, rates)
    assert sum_of_works.centre == pytest.approx(1000 + 3)
    low, high = 1000 - 0.78 / 0.81 * 1000, 0.78 / 0.74 * 1000 - 1000
    assert sum_of_works.low == pytest.approx(1003 - (low**2 + 1.5**2) ** 0.5)
    assert sum_of_works.high == pytest.approx(1003 + (high**2 + 1.5**2) ** 0.5)
    assert sum_of_works.text(",.0f") == "1,003 (966–1,057)"


def test_range_of_ratio_covers_only_work_that_sides_do_not_share():
    memory = [Work(num_bytes=1e9)]
    same = ratio(memory * 3, memory, Rates.for_target(B200))
    assert (same.low, same.high) == (pytest.approx(3.0), pytest.approx(3.0))
    bf16, mxfp8 = (
        [library_work(num_bytes=0.0, flops=1e12, product=kind, target=B200)] for kind in ("bf16", "mxfp8")
    )
    ratio_range = ratio(mxfp8, bf16, Rates.for_target(B200))
    assert ratio_range.low < 0.67 / 0.60 / 2 < ratio_range.high
    assert total(mxfp8, Rates.for_target(B200)) == pytest.approx(1e12 / (4500e6 * 0.60) + 3)


def test_measured_rates_replace_those_of_the_table(tmp_path):
    path = tmp_path / "rates.json"
    measured = Rate(low=0.85, centre=0.9, high=0.92, source="measured")
    path.write_text(json.dumps(as_data("sm_100", {"memory": measured}, gpu="NVIDIA B200")))
    rates, table = Rates.for_target(B200, path), Rates.for_target(B200)
    assert (rates["memory"], rates.table["memory"]) == (0.9, measured)
    assert rates["bf16"] == table["bf16"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "FileNotFoundError"),
        ("{", "JSONDecodeError"),
        ('{"target": "sm_100"}', "KeyError: 'rates'"),
        ('{"target": "sm_90", "rates": {}}', "found rates of sm_90"),
        (
            '{"target": "sm_100", "rates": {"speed": {"low": 1, "centre": 1, "high": 1, "source": ""}}}',
            "unknown kind 'speed'",
        ),
        ('{"target": "sm_100", "rates": {"memory": {"low": 1}}}', "TypeError"),
    ],
)
def test_a_file_that_holds_no_rates(tmp_path, text, words):
    path = tmp_path / "rates.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(OptionError, match=words):
        Rates.for_target(B200, path)


def test_rates_are_measured_in_the_same_form(benchmark, monkeypatch, tmp_path):
    """Everything runs, small and on the CPU, its time made up; what this machine cannot run is left out."""
    gpu_rates = benchmark("gpu_rates")
    monkeypatch.setattr(gpu_rates.gpu_common, "DEVICE", "cpu")
    monkeypatch.setattr(gpu_rates, "_captured", lambda run: run)
    monkeypatch.setattr(gpu_rates, "COPIED", (1 << 10, 1 << 11))
    monkeypatch.setattr(gpu_rates, "SHAPES", [(32, 64, 128)])
    monkeypatch.setattr(gpu_rates, "TOKENS", 64)
    monkeypatch.setattr(gpu_rates, "HEADS", 1)

    def time(run):
        run()
        return 2.0

    monkeypatch.setattr(gpu_rates, "timer", lambda _: time)
    monkeypatch.setattr(gpu_rates.common, "folder", lambda: tmp_path)
    monkeypatch.setattr(gpu_rates.gpu_common, "device", dict)
    monkeypatch.setattr(torch, "_scaled_mm", _refused)
    rates: dict[str, Rate] = {}
    kinds = [kind for kind in gpu_rates.KINDS if gpu_rates.runs_on(kind, B200)]
    programs = [gpu_rates.RateProgram(part="rates", kernel=kind, shape="", measured=rates) for kind in kinds]
    rows = [row for program in programs for row in program.measure(Rates.for_target(B200), 1)]
    left_out = {row["kernel"]: row["left_out"] for row in rows if "left_out" in row}
    assert list(left_out.values()).count("not on this chip") == 3, "FP8 and MXFP8"
    assert left_out["fp4"], "PyTorch's own words, which change"
    assert rates["memory"].low == pytest.approx(2 * 1024 / 2e3 / 8000)
    assert rates["memory"].high == pytest.approx(2 * 2048 / 2e3 / 8000)
    assert rates["bf16"].centre == pytest.approx(2 * 32 * 64 * 128 / 2e6 / 2250)
    assert rates["launch_us"].centre == pytest.approx(2.0 / 100)
    path = tmp_path / "rates_sm_100.json"
    assert Rates.for_target(B200, path)["memory"] == rates["memory"].centre


@pytest.mark.parametrize(
    ("name", "fp8"),
    [
        ("sm_80", set()),
        ("sm_90", {"tensor", "channel", "block"}),
        ("sm_100", {"tensor", "channel"}),
        ("sm_120", {"tensor"}),
    ],
)
def test_measured_kinds_match_the_fp8_scales_of_each_chip(benchmark, monkeypatch, name, fp8):
    """Scales of each extent where the vendor's product takes them, each matrix with as many as it wants."""
    gpu_rates = benchmark("gpu_rates")
    target = TARGETS[name]
    kinds = {kind for kind in gpu_rates.KINDS if gpu_rates.runs_on(kind, target)}
    assert {kind.removeprefix("fp8_") for kind in kinds if kind.startswith("fp8_")} == fp8
    assert set(gpu_rates.KINDS) <= set(KINDS)
    monkeypatch.setattr(gpu_rates.gpu_common, "DEVICE", "cpu")
    monkeypatch.setattr(gpu_rates, "SHAPES", [(256, 384, 512)])
    scales = []
    monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, *s, out_dtype: scales.append(s))
    for extent in fp8:
        list(gpu_rates.KINDS[f"fp8_{extent}"](target.peak, lambda run: run() or 1.0))
    layouts = {(tuple(a.shape), tuple(b.shape), b.dim() and b.stride(0)) for a, b in scales}
    wanted = {
        "tensor": ((), (), 0),
        "channel": ((256, 1), (1, 384), 1),
        "block": ((256, 4), (4, 3), 1),
    }
    assert layouts == {wanted[extent] for extent in fp8}


def _refused(*_, **__):
    raise RuntimeError("not on this chip\nand more")
