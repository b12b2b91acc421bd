"""The data of an audit: to plain dicts, through JSON, and back; what is not such data is refused by key."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from mxcompile.analysis.study.stats import Sums
from mxcompile.errors import OptionError
from mxcompile.report import GemmNumerics, Numerics, ParameterNumerics, TensorNumerics
from mxcompile.report.data.numerics import by_block, by_role


def tensor(**changes: Any) -> TensorNumerics:
    fields: dict[str, Any] = {
        "name": "layers.0.up", "role": "ffn_in", "operand": "x", "layout": "rowwise",
        "gemms": ("fprop", "wgrad"), "elem": "e4m3", "rounding": "rceil",
        "shared_with": ("layers.0.gate",), "numel": 64, "amax": 3.5,
        "sqnr_db": 31.5, "cosine": 0.999, "mse": 1e-4, "rel_error": 0.02, "underflow": 0.25,
        "saturation": 0.0, "scale_histogram": ((118, 1), (120, 1)),
    }  # fmt: skip
    return TensorNumerics(**{**fields, **changes})


def gemm(**changes: Any) -> GemmNumerics:
    fields: dict[str, Any] = {
        "name": "layers.0.up", "role": "ffn_in", "gemm": "fprop", "m": 8, "n": 16, "k": 32,
        "sqnr_db": 29.0, "cosine": 0.99, "mse": 1e-3, "rel_error": 0.03,
    }  # fmt: skip
    return GemmNumerics(**{**fields, **changes})


def sample() -> Numerics:
    return Numerics(
        tensors=(tensor(), tensor(name="layers.1.up", sqnr_db=math.inf, gemms=("fprop",), shared_with=())),
        gemms=(gemm(), gemm(gemm="dgrad", sqnr_db=12.0)),
        policy="preset nvidia",
        gradients=True,
        loss=2.5,
        loss_reference=2.0,
        loss_gap=0.25,
        logits_sqnr_db=-math.inf,
        notes=("a note",),
    )


def test_through_strict_json_and_back() -> None:
    assert Numerics.from_dict(json.loads(json.dumps(sample().to_dict(), allow_nan=False))) == sample()


def test_nan_comes_back_as_nan() -> None:
    back = Numerics.from_dict(json.loads(json.dumps(Numerics(gemms=(gemm(sqnr_db=math.nan),)).to_dict())))
    assert math.isnan(back.gemms[0].sqnr_db)


def test_most_harm_first_with_nan_before_all() -> None:
    values = (0.03, 0.0, math.nan, 0.2)
    worst = Numerics(gemms=tuple(gemm(rel_error=v) for v in values)).worst_gemms()
    assert [str(row.rel_error) for row in worst] == ["nan", "0.2", "0.03", "0.0"]


def test_an_error_counts_by_the_arithmetic_it_gets_into() -> None:
    small, large = gemm(name="small", rel_error=0.1), gemm(name="large", m=800, rel_error=0.03)
    assert [row.name for row in Numerics(gemms=(small, large)).worst_gemms()] == ["large", "small"]


def test_cast_with_underflow_ranks_worst_despite_high_sqnr() -> None:
    """Half of the elements become zero, and SQNR is as good as any. Noise that becomes zero does no harm."""
    usual, lost, noise = (
        measured(name, scale, small)
        for name, scale, small in (("usual", 1.03, 1.0), ("lost", 1.02, 2.0**-8), ("noise", 1.02, 2.0**-19))
    )
    assert usual.underflow == 0
    assert lost.underflow == noise.underflow == 0.5
    assert lost.sqnr_db > usual.sqnr_db
    worst = Numerics(tensors=(noise, usual, lost)).worst_tensors()
    assert [row.name for row in worst] == ["lost", "usual", "noise"]


def measured(name: str, scale: float, small: float) -> TensorNumerics:
    """A cast of ones and as many elements of the size `small`: off by `scale`, and to zero below 2⁻⁷."""
    x = torch.cat([torch.ones(500), torch.full((500,), small)])
    q = torch.where(x < 2.0**-7, torch.zeros(()), x * scale)
    sums = Sums()
    sums.add(x, q)
    gone = (q == 0).double()
    return tensor(
        name=name,
        flops=100,
        sqnr_db=sums.sqnr_db,
        rel_error=sums.rel_error,
        underflow=gone.mean().item(),
        lost=((gone * x).sum() / x.sum()).item(),
    )


def test_gradients_are_weighted_by_flops() -> None:
    def parameter(name: str, flops: int, error: float, cosine: float) -> ParameterNumerics:
        return ParameterNumerics(
            name=name, flops=flops, numel=1, sqnr_db=1.0, cosine=cosine, mse=0.0, rel_error=error
        )

    numerics = Numerics(
        parameters=(parameter("a", 3, 0.1, 0.9), parameter("b", 1, 0.5, 0.5), parameter("norm", 0, 9.0, 0.0))
    )
    assert numerics.gradient_error == pytest.approx(0.2)
    assert numerics.gradient_cosine == pytest.approx(0.8)
    assert Numerics().gradient_error is None


def test_keys_of_later_versions_are_passed_over() -> None:
    data = sample().to_dict()
    for level in (data, data["tensors"][0], data["gemms"][0]):
        level["of_a_later_version"] = [1]
    assert Numerics.from_dict(data) == sample()


def test_groups_by_role_and_block() -> None:
    numerics = Numerics(
        gemms=(
            gemm(name="layers.0.up", rel_error=0.3, sqnr_db=10.0),
            gemm(name="layers.0.up", gemm="dgrad", rel_error=0.1, sqnr_db=20.0),
            gemm(name="layers.1.q", role="qkv", rel_error=0.2, sqnr_db=14.0),
            gemm(name="head", role="qkv", m=16, rel_error=0.2, sqnr_db=14.0),
        ),
        tensors=(tensor(underflow=0.2, flops=3), tensor(underflow=0.0, flops=1)),
    )
    by = {group.name: group for group in by_block(numerics)}
    assert list(by) == ["layers.0", "layers.1", "outside blocks"]
    assert by["layers.0"].rel_error == pytest.approx(math.sqrt((0.09 + 0.01) / 2))
    assert by["layers.0"].underflow == pytest.approx(0.15)
    assert by["layers.0"].flop_share == pytest.approx(2 / 5)
    assert (by["layers.0"].lowest_sqnr_db, by["layers.0"].worst.gemm) == (10.0, "fprop")
    assert by["layers.1"].underflow is None
    assert [(group.name, group.num_gemms) for group in by_role(numerics)] == [("qkv", 2), ("ffn_in", 2)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(loss="high"), "$.numerics.loss: expected a number, found 'high'"),
        (lambda d: d.update(tensors={}), "$.numerics.tensors: expected an array, found an object"),
        (lambda d: d["tensors"][1].pop("numel"), "$.numerics.tensors[1]: key 'numel' is missing"),
        (
            lambda d: d["gemms"][0].update(k=True),
            "$.numerics.gemms[0].k: expected a whole number, found True",
        ),
        (
            lambda d: d["tensors"][0].update(scale_histogram=[[1, 2, 3]]),
            "$.numerics.tensors[0].scale_histogram[0]: expected 2 items, found 3",
        ),
    ],
)
def test_other_data_is_refused_by_key(change: Any, message: str) -> None:
    data = sample().to_dict()
    change(data)
    with pytest.raises(OptionError) as caught:
        Numerics.from_dict(data)
    assert str(caught.value) == message


def test_a_list_is_not_numerics() -> None:
    with pytest.raises(OptionError, match="numerics: expected an object, found an array"):
        Numerics.from_dict([])
