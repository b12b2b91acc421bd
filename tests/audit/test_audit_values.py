"""What an audit measures, against the integer reference and FP64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers import reference
from helpers.casts import quantize
from torch import Tensor, nn

from mxcompile import ops
from mxcompile.analysis.audit import Audit, audit
from mxcompile.analysis.audit.collect import _tensor
from mxcompile.analysis.study.sites import CastSite
from mxcompile.analysis.study.stats import PIECE, CastStats, ProductStats, Sums
from mxcompile.formats import Format
from mxcompile.formats.encoding import encode_tensors, tensor_amax
from mxcompile.graph.tags import GemmTag, Kind
from mxcompile.policy import Gemm
from mxcompile.report import GemmNumerics, TensorNumerics
from mxcompile.watch.tally import Tally

M, N, K = 37, 40, 50


class Linear(nn.Module):
    """One layer whose output gradient is `direction`."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.lin = nn.Linear(K, N, bias=bias)
        self.register_buffer("direction", torch.randn(M, N) * torch.logspace(-3, 3, N))

    def forward(self, x: Tensor) -> Tensor:
        return (self.lin(x) * self.direction).sum()


def everything(**use: Any) -> dict[str, Any]:
    return {"version": 1, "rules": [{"match": {"name": "*"}, "use": {"precision": "mxfp8", **use}}]}


def layer(bias: bool = True) -> tuple[Linear, Tensor]:
    """A layer and its input, with magnitudes over many binades and some zeros."""
    model = Linear(bias)
    with torch.no_grad():
        model.lin.weight.mul_(torch.exp2(torch.randint(-12, 12, (N, K)).float()))
    x = torch.randn(M, K) * torch.exp2(torch.randint(-40, 3, (M, K)).float())
    x[:, 3] = 0
    return model, x.requires_grad_()


def tensor(result: Audit, operand: str, layout: str) -> TensorNumerics:
    (row,) = (t for t in result.numerics.tensors if (t.operand, t.layout) == (operand, layout))
    return row


def gemm(result: Audit, which: str) -> GemmNumerics:
    (row,) = (g for g in result.numerics.gemms if g.gemm == which)
    return row


def expected(x: Tensor, elem: str, rounding: str) -> dict[str, Any]:
    """Measures of the cast of `x` [rows, n] along n, from the integer reference."""
    source = x.detach().numpy()
    values, scales = reference.quantize(source, elem, rounding)
    exponents = np.repeat(scales.astype(np.float64) - 127, 32, axis=1)[:, : source.shape[1]]
    wide, back = source.astype(np.float64), values * 2.0**exponents
    noise, signal = np.square(back - wide).sum(), np.square(wide).sum()
    bytes_, counts = np.unique(scales, return_counts=True)
    return {
        "numel": source.size,
        "amax": float(np.abs(source).max()),
        "sqnr_db": 10 * math.log10(signal / noise),
        "cosine": float((wide * back).sum() / math.sqrt(signal * np.square(back).sum())),
        "mse": noise / source.size,
        "rel_error": math.sqrt(noise / signal),
        "underflow": float((back == 0)[wide != 0].mean()),
        "lost": float(np.abs(wide)[back == 0].sum() / np.abs(wide).sum()),
        "saturation": float((np.abs(wide) > reference.FP8[elem][0] * 2.0**exponents).mean()),
        "scale_histogram": tuple(zip(map(int, bytes_), map(int, counts), strict=True)),
    }


def test_a_row_of_rounding_noise_does_not_lead() -> None:
    """The gradient of one row is noise beside the others': casts along the rows lose it, without harm."""
    model, x = Linear(bias=False), torch.randn(64, K, requires_grad=True)
    direction = torch.randn(64, N)
    direction[0] *= 1e-7
    model.direction = direction
    result = audit(model, x, policy=everything())
    noisy = tensor(result, "dy", "columnwise")
    assert noisy.underflow > 0.01
    assert noisy.lost < 1e-6
    others = [row.harm / row.flops for row in result.numerics.tensors if row is not noisy]
    assert noisy.harm / noisy.flops == pytest.approx(sum(others) / len(others), rel=0.3)


@pytest.mark.parametrize(("elem", "rounding"), [("e4m3", "rceil"), ("e4m3", "floor"), ("e5m2", "even")])
def test_every_cast_is_measured(elem: str, rounding: str) -> None:
    model, x = layer()
    result = audit(model, x, policy=everything(elem_dtype=elem, grad_dtype=elem, rounding=rounding))
    w, dy = model.lin.weight, model.direction
    assert len(result.numerics.tensors) == 6
    for operand, value in (("x", x), ("w", w), ("dy", dy)):
        for layout, stored in (("rowwise", value), ("columnwise", value.T)):
            row = tensor(result, operand, layout)
            measures = expected(stored, elem, rounding)
            assert row.scale_histogram == measures.pop("scale_histogram")
            for name, number in measures.items():
                assert getattr(row, name) == pytest.approx(number, rel=1e-9), (operand, layout, name)
            assert (row.elem, row.rounding, row.calls, row.name) == (elem, rounding, 1, "lin")
    if rounding == "floor":
        assert tensor(result, "w", "rowwise").saturation > 0
    assert tensor(result, "x", "rowwise").underflow > 0
    assert {t.gemms for t in result.numerics.tensors} == {("fprop",), ("dgrad",), ("wgrad",)}


@pytest.mark.parametrize("bias", [True, False])
def test_every_gemm_is_held_to_its_operands_before_the_casts(bias: bool) -> None:
    model, x = layer(bias)
    result = audit(model, x, policy=everything(rounding="floor"))
    w, dy = model.lin.weight, model.direction
    added = model.lin.bias.detach().double() if bias else 0
    cases = {"fprop": (x, w.T, added), "dgrad": (dy, w, 0), "wgrad": (dy.T, x, 0)}
    assert len(result.numerics.gemms) == 3
    for which, (a, b, constant) in cases.items():
        exact = a.detach().double() @ b.detach().double() + constant
        left = reference.round_trip(a, -1, rounding="floor").double()
        right = reference.round_trip(b, -2, rounding="floor").double()
        cast = left @ right + constant
        row = gemm(result, which)
        assert row.sqnr_db == pytest.approx(reference.sqnr_db(exact, cast), abs=1e-3)
        assert row.mse == pytest.approx(float((exact - cast).square().mean()), rel=1e-3)
        assert (row.m, row.n, row.k) == (a.shape[0], b.shape[1], a.shape[1])


class Experts(nn.Module):
    """Products with the matrices that each sample picks of a stack, as they lie or transposed."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.transposed = transposed
        self.stack = nn.Parameter(torch.randn(4, K, N).mT if transposed else torch.randn(4, K, N))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        picked = self.stack[chosen]
        return torch.bmm(x, picked.mT if self.transposed else picked)


@pytest.mark.parametrize("transposed", [False, True])
def test_the_error_of_a_matrix_that_is_picked_from_a_stack_counts(transposed: bool) -> None:
    model, x = Experts(transposed), torch.randn(6, M, K)
    chosen = torch.tensor([3, 0, 1, 2, 0, 3])
    result = audit(model, x, chosen, policy=everything(rounding="floor"))
    stack = model.stack.detach().mT if transposed else model.stack.detach()
    assert {row.operand for row in result.numerics.tensors} == {"x", "w"}
    cast = torch.stack([reference.round_trip(matrix, -2, rounding="floor") for matrix in stack])
    (weight,) = (row for row in result.numerics.tensors if row.operand == "w")
    assert weight.numel == stack.numel()
    assert weight.sqnr_db == pytest.approx(reference.sqnr_db(stack.double(), cast.double()), abs=1e-9)
    x_cast = torch.stack([reference.round_trip(row_cast, -1, rounding="floor") for row_cast in x])
    exact, actual = x.double() @ stack.double()[chosen], x_cast.double() @ cast.double()[chosen]
    (product,) = (row for row in result.numerics.gemms if row.name == "stack")
    assert product.sqnr_db == pytest.approx(reference.sqnr_db(exact, actual), abs=1e-3)
    assert result.numerics.logits_sqnr_db == pytest.approx(product.sqnr_db, abs=1e-2)


def test_the_loss_is_held_to_the_models_own() -> None:
    model, x = layer()
    result = audit(model, x, policy=everything()).numerics
    eager_loss = float(model(x).detach())
    assert result.loss_reference == pytest.approx(eager_loss, rel=1e-6)
    product = reference.round_trip(x, -1).double() @ reference.round_trip(model.lin.weight.T, -2).double()
    loss = float(((product + model.lin.bias) * model.direction).sum().detach())
    assert result.loss == pytest.approx(loss, rel=1e-5)
    assert result.loss_gap == pytest.approx(loss / eager_loss - 1, rel=1e-3)


def test_nan_in_the_input_is_reported_and_does_not_hide_the_rest() -> None:
    model, x = layer()
    with torch.no_grad():
        x[2, 7] = float("nan")
    result = audit(model, x, policy=everything())
    row = tensor(result, "x", "rowwise")
    assert math.isnan(row.sqnr_db)
    assert row.not_finite == 32  # the whole block
    assert dict(row.scale_histogram)[255] == 1
    assert result.numerics.worst_tensors()[0].operand == "x"
    assert math.isfinite(tensor(result, "w", "rowwise").sqnr_db)
    assert math.isfinite(gemm(result, "dgrad").sqnr_db)
    assert gemm(result, "fprop").not_finite == N


@pytest.mark.parametrize(
    "word", ["e4m3 1x32 rceil", "e5m2 1x32 floor", "e4m3 tensor nearest", "e2m1 1x16 two-level"]
)
def test_an_audit_counts_as_a_watch_does(word: str) -> None:
    """Shares are of the elements that can be lost: zeros, as behind a ReLU, and NaN are none of them."""
    x = torch.randn(64, 64).relu() * torch.exp2(torch.randint(-30, 12, (64, 64)).float())
    fmt = Format.parse(word)
    if fmt.is_mx:  # others lose the whole tensor to them
        x[3, 5], x[9, 40] = torch.nan, torch.inf
    amax = tensor_amax(x) if fmt.two_level else None
    stats = CastStats()
    stats.add(x, *encode_tensors(x, -1, fmt, amax=amax), -1, fmt)
    numbers, _ = ops.cast_statistics(x, -1, word, 0)
    watched = Tally.from_numbers("", word, numbers.tolist()).statistics()
    names = {"layer": "a", "name": "a", "module": "Linear", "source": ""}
    tag = GemmTag(**names, gemm=Gemm.FPROP, kind=Kind.LINEAR, tensors=("x", "w"))
    audited = _tensor(CastSite(block_dim=1, rowwise=True, fmt=fmt, readers=[(tag, "x")]), stats)
    assert 0 < audited.underflow == watched["underflow"]
    assert audited.saturation == watched["saturated"]


@pytest.mark.parametrize("shape", [(3, 2 * PIECE // 3 + 17), (2 * PIECE // 64 + 5, 70), (5, 1100, 260)])
@pytest.mark.parametrize("dim", [0, -1])
def test_large_casts_are_measured_in_pieces(shape: tuple[int, ...], dim: int) -> None:
    x = torch.randn(shape)
    dim %= x.ndim
    qdata, scale = quantize(x, dim, torch.float8_e4m3fn, "floor")
    stats = CastStats()
    stats.add(x, qdata, scale, dim, Format())
    back = reference.round_trip(x.movedim(dim, -1).reshape(-1, shape[dim]), -1, rounding="floor")
    source = x.movedim(dim, -1).reshape(-1, shape[dim])
    assert stats.sums.numel == x.numel()
    assert stats.sums.sqnr_db == pytest.approx(reference.sqnr_db(source, back), abs=1e-9)
    assert sum(stats.histogram) == scale.numel()


def test_large_gemms_are_measured_in_slices() -> None:
    a, b, bias = torch.randn(2, 700, 3000), torch.randn(2, 3000, 40), torch.randn(40)
    exact = a.double() @ b.double() + bias
    out = (exact + 1e-2 * torch.randn(exact.shape)).bfloat16()
    stats = ProductStats()
    stats.add(out, a, b, bias)
    assert stats.sums.sqnr_db == pytest.approx(reference.sqnr_db(exact, out), abs=1e-2)
    assert stats.sums.numel == out.numel()


def test_edge_cases_of_the_measures() -> None:
    exact, nothing, lost = Sums(), Sums(), Sums()
    exact.add(torch.ones(3), torch.ones(3))
    nothing.add(torch.zeros(3), torch.zeros(3))
    lost.add(torch.zeros(3), torch.ones(3))
    assert (exact.sqnr_db, exact.rel_error) == (math.inf, 0.0)
    assert (nothing.sqnr_db, nothing.cosine, nothing.rel_error) == (math.inf, 1.0, 0.0)
    assert (lost.sqnr_db, lost.cosine, lost.rel_error) == (-math.inf, 0.0, math.inf)
