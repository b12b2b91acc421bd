"""A mix of precisions: every layer has the cheapest of those that meet the bound, and the file says why."""

from __future__ import annotations

import dataclasses
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.made import Made
from helpers.one_linear import policy as everything
from torch import Tensor, nn

from mxcompile.analysis.audit import audit
from mxcompile.analysis.tune import tune
from mxcompile.cli import main
from mxcompile.errors import OptionError
from mxcompile.lowering.chips.target import shares
from mxcompile.lowering.targets import TARGETS
from mxcompile.policy import Policy

WORDS = ("mxfp4", "mxfp8", "fp8_tensor")


class Net(nn.Module):
    """Three layers: one of values that four bits hold, an ordinary one, one spread over many binades."""

    def __init__(self) -> None:
        super().__init__()
        self.coarse, self.fine, self.spread = (nn.Linear(64, 64, bias=False) for _ in range(3))
        values = torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        with torch.no_grad():
            self.coarse.weight.copy_(values[torch.randint(7, (64, 64))])
            self.spread.weight.mul_(torch.logspace(-7, 3, 64)[torch.randperm(64)][:, None])

    def forward(self, x: Tensor, exact: Tensor) -> Tensor:
        parts = self.coarse(exact), self.fine(x), self.spread(x)
        return sum(part.square().mean() for part in parts)  # type: ignore[return-value]


def example() -> tuple[nn.Module, tuple[Tensor, Tensor], dict[str, Any]]:
    torch.manual_seed(0)
    return Net(), (torch.randn(48, 64), torch.randint(-6, 7, (48, 64)).float().clamp(-4, 4)), {}


def measured(use: Any) -> dict[tuple[str, str], float]:
    model, args, _ = example()
    return {(g.name, g.gemm): g.sqnr_db for g in audit(model, *args, policy=everything(use)).numerics.gemms}


@torch.no_grad()
def test_every_layer_has_the_fewest_bytes_that_meet_the_bound(tmp_path: Path):
    """Without a target bytes decide: held to all choices of the layers, each measured alone."""
    tensor = {"precision": "fp8", "grad_dtype": "e5m2"}
    alone = {"mxfp4": measured("mxfp4"), "mxfp8": measured("mxfp8"), "fp8_tensor": measured(tensor)}
    size = {"mxfp4": 4 + 8 / 32, "fp8_tensor": 8, "mxfp8": 8 + 8 / 32, "bf16": 16}  # bits an element
    model, args, _ = example()
    result = tune(model, *args, policy=everything("mxfp8"), among=WORDS, min_sqnr=26.0)
    assert result.met
    for chosen in result.chosen:
        gemms = [gemm for name, gemm in alone["mxfp8"] if name == chosen.name]
        cost = {
            word: sum(size[word if alone[word][chosen.name, gemm] >= 26 else "bf16"] for gemm in gemms)
            for word in WORDS
        }
        assert chosen.use == min(cost, key=lambda word: cost[word])
        failing = [gemm for gemm in gemms if alone[chosen.use][chosen.name, gemm] < 26]
        assert list(chosen.kept) == failing
    assert [chosen.use for chosen in result.chosen] == ["mxfp4", "fp8_tensor", "fp8_tensor"]
    assert all(g.sqnr_db >= 26 for g in result.audit.numerics.gemms)
    result.dump(tmp_path / "mixed.yaml")
    assert Policy.load(tmp_path / "mixed.yaml") == result.policy
    text = (tmp_path / "mixed.yaml").read_text()
    assert "chosen by bytes of operands" in text
    for chosen in result.chosen:
        assert chosen.reason in " ".join(line.strip(" #") for line in text.splitlines())


@pytest.mark.parametrize(
    ("target", "quick"),
    [("sm_90", {"fp8_tensor"}), ("sm_100", {"mxfp8"}), ("sm_80", set())],
)
def test_mix_avoids_formats_that_the_target_emulates(
    target: str, quick: set[str], monkeypatch: pytest.MonkeyPatch
):
    """What is emulated costs more than BF16, so a chip gets what it multiplies itself, or nothing."""
    chip = TARGETS[target]
    assert chip.peak is not None
    rates = {**chip.peak.rates, **shares("no launches", launch_us=(0.0, 0.0, 0.0))}
    wide = 10 * chip.peak.bandwidth_gbs  # so FLOPs bound small layers
    peak = dataclasses.replace(chip.peak, bandwidth_gbs=wide, rates=rates)
    monkeypatch.setitem(TARGETS, target, dataclasses.replace(chip, peak=peak))

    class Wide(Made, up=(256, 256, False)):
        def forward(self, x: Tensor) -> Tensor:
            return self.up(x).square().mean()

    torch.manual_seed(0)
    x = torch.randn(256, 256)
    result = tune(
        Wide(), x, policy=everything("mxfp8"), among=["mxfp8", "fp8_tensor"], target=target, min_sqnr=20.0
    )
    words = {gemm.precision for gemm in result.audit.report.gemms}
    assert {chosen.use for chosen in result.chosen} == (quick or {"bf16"})
    assert words == {"fp8" if word == "fp8_tensor" else word for word in quick or {"bf16"}}
    assert result.met
    text = " ".join(str(result).split())
    assert f"estimated on {target}" in text
    if not quick:
        assert f"everything in BF16, which is estimated to be fastest on {target}" in text
        (chosen,) = result.chosen
        (least,) = re.findall(r"(?:mxfp8|fp8_tensor) would take (\S+) of BF16's time", chosen.reason)
        assert float(least) > 1
        assert chosen.reason in " ".join(line.strip(" #") for line in result.to_yaml().splitlines())


def test_a_bound_that_nothing_meets_is_not_met_by_bf16():
    class Plain(Made, up=(64, 64)):
        def forward(self, x: Tensor) -> Tensor:
            return self.up(x).square().mean()

    result = tune(Plain(), torch.randn(48, 64), policy=everything("mxfp8"), among=WORDS, min_sqnr=200.0)
    assert {chosen.use for chosen in result.chosen} == {"bf16"}
    assert not result.met
    assert "CANNOT BE FULFILLED" in str(result)


@pytest.mark.slow
def test_a_bound_on_the_loss_gives_up_as_little_as_it_can():
    model, args, _ = example()
    words = ("mxfp4", "mxfp8")
    bits = {"mxfp4": 4 + 8 / 32, "mxfp8": 8 + 8 / 32, "bf16": 16}
    names = [name for name, _ in model.named_children()]
    gaps = {}
    for uses in product(bits, repeat=3):
        rules = [{"match": {"name": name}, "use": use} for name, use in zip(names, uses, strict=True)]
        if set(uses) != {"bf16"}:
            gap = audit(model, *args, policy={"version": 1, "rules": rules}).numerics.loss_gap
            gaps[uses] = abs(gap or 0.0)
    bound = gaps["mxfp4", "mxfp4", "mxfp4"] / 3
    result = tune(model, *args, policy=everything("mxfp8"), among=words, max_loss_gap=bound)
    assert result.met
    uses = tuple(chosen.use for chosen in result.chosen)
    assert gaps[uses] <= bound
    for index, use in enumerate(uses):  # no layer could have been cheaper, the others as they are
        for cheaper in (word for word in bits if bits[word] < bits[use]):
            assert gaps[(*uses[:index], cheaper, *uses[index + 1 :])] > bound


def test_presets_are_whole_under_another_preset():
    model, args, _ = example()
    start = {**everything("mxfp8"), "preset": "fp8_delayed"}
    result = tune(model, *args, policy=start, among=["fp8_rowwise"], min_sqnr=-300.0)
    formats = {str(form) for gemm in result.audit.report.gemms for form in gemm.formats}
    assert {form.partition(":")[2] for form in formats} == {"e4m3 channel nearest"}


def test_tune_command_writes_a_mix_of_precisions(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "mixed.yaml"
    start = tmp_path / "start.yaml"
    start.write_text("version: 1\nrules:\n- match: {name: '*'}\n  use: mxfp8\n")
    command = ["tune", f"{__name__}:example", "--policy", str(start), "--min-sqnr", "26"]
    assert main([*command, "--among", "mxfp4, mxfp8", "-o", str(out)]) == 0
    assert "coarse" in capsys.readouterr().out
    assert main(["policy", "check", str(out)]) == 0
    capsys.readouterr()
    assert main([*command, "--among", "mxfp4,mxfp9"]) == 2
    assert "unknown precision or preset 'mxfp9'" in capsys.readouterr().err
    assert main([*command, "--target", "sm_90"]) == 2
    assert "for a mix of precisions: name them in --among" in capsys.readouterr().err


def test_mix_of_unknown_precision_raises():
    with pytest.raises(OptionError, match="unknown precision or preset 'bf16'"):
        tune(nn.Linear(3, 3), torch.randn(2, 3), among=["bf16"], min_sqnr=1.0)
