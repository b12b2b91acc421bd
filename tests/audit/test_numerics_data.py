"""The data of an audit: to plain dicts, through JSON, and back; what is not such data is refused by key."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from mxcompile.errors import OptionError
from mxcompile.report import GemmNumerics, Numerics, TensorNumerics


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
    text = json.dumps(sample().to_dict(), allow_nan=False)
    assert Numerics.from_dict(json.loads(text)) == sample()


def test_nan_comes_back_as_nan() -> None:
    back = Numerics.from_dict(json.loads(json.dumps(Numerics(gemms=(gemm(sqnr_db=math.nan),)).to_dict())))
    assert math.isnan(back.gemms[0].sqnr_db)


def test_worst_first_with_nan_before_all() -> None:
    values = (30.0, math.inf, math.nan, 12.5)
    found = Numerics(gemms=tuple(gemm(sqnr_db=v) for v in values)).worst_gemms()
    assert [str(one.sqnr_db) for one in found] == ["nan", "12.5", "30.0", "inf"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(los=1.0), "numerics: unknown key 'los' (did you mean 'loss'?)"),
        (lambda d: d.update(loss="high"), "numerics.loss: expected float, found str"),
        (lambda d: d.update(tensors={}), "numerics.tensors: expected a list, found dict"),
        (lambda d: d["tensors"][1].pop("numel"), "numerics.tensors[1]: key 'numel' is missing"),
        (lambda d: d["gemms"][0].update(k=True), "numerics.gemms[0].k: expected int, found bool"),
        (
            lambda d: d["tensors"][0].update(scale_histogram=[[1, 2, 3]]),
            "numerics.tensors[0].scale_histogram: expected pairs [byte, number of blocks]",
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
    with pytest.raises(OptionError, match="numerics: expected an object, found list"):
        Numerics.from_dict([])
