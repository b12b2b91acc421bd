"""Chips of one target are told apart: by what they are called, and by the memory of a device."""

from __future__ import annotations

import pytest
import torch

from mxcompile.errors import TargetError
from mxcompile.lowering.targets import CHIPS, TARGETS, of_chip, of_device
from mxcompile.offline.standin import stand_in


@pytest.mark.parametrize(
    ("name", "chip", "bandwidth_gbs"),
    [("h100", "H100", 3350), ("H200", "H200", 4800), ("sm_90", "H200", 4800), ("a100", "A100 80GB", 2039)],
)
def test_a_chip_has_its_own_peaks(name: str, chip: str, bandwidth_gbs: float):
    target = of_chip(name)
    assert target.peak is not None
    assert (target.peak.chip, target.peak.bandwidth_gbs) == (chip, bandwidth_gbs)


def test_an_unknown_chip_is_an_error():
    with pytest.raises(TargetError, match="h300"):
        of_chip("h300")


def test_every_gpu_has_a_data_sheet_and_a_name():
    gpus = [target for target in TARGETS.values() if target.device == "cuda"]
    assert all(target.peak is not None and target.peaks for target in gpus)
    assert len(CHIPS) == sum(len(target.peaks) for target in gpus)
    assert [*TARGETS][:4] == ["cpu", "cpu_bf16", "cpu_fp32", "sm_80"]
    assert [*TARGETS][-2:] == ["gfx942", "gfx950"]


@pytest.mark.parametrize(("gib", "chip"), [(79.1, "H100"), (93.1, "H100"), (139.8, "H200")])
def test_chip_of_device_follows_from_total_memory(gib: float, chip: str, monkeypatch: pytest.MonkeyPatch):
    with stand_in(TARGETS["sm_90"]):
        properties = torch.cuda.get_device_properties(0)
        monkeypatch.setattr(properties, "total_memory", int(gib * 2**30))
        peak = of_device(torch.device("cuda")).peak
    assert peak is not None
    assert peak.chip == chip


@pytest.mark.parametrize("name", ["h100", "h200", "b200", "mi300x"])
def test_the_stand_in_of_a_chip_is_the_chip(name: str):
    with stand_in(of_chip(name)):
        assert of_device(torch.device("cuda")) == of_chip(name)
