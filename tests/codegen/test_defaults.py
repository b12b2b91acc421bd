"""Which kernel runs a product that nobody has timed: the table, its page, and what graphs get."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from generating import assert_clean, generate
from helpers.casts import quantize, scaled_mm
from helpers.needs import SPECIALIZED_WARPS
from helpers.written import Written
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from mxcompile.lowering import optional
from mxcompile.lowering.choices import defaults
from mxcompile.lowering.choices.defaults import (
    ALONG_K,
    BATCHED,
    DENSE,
    MXFP4,
    NVFP4,
    PERSISTENT,
    POINTERS,
    ROWS,
    SPECIALIZED,
    VENDOR,
    MXProduct,
)
from mxcompile.lowering.choices.epilogue import has_epilogue
from mxcompile.lowering.targets import TARGETS
from mxcompile.offline.rates import Rates

SM_100 = TARGETS["sm_100"]
PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"
OURS = (PERSISTENT, SPECIALIZED, POINTERS)


def big(**others: Any) -> MXProduct:
    """A product of large matrices, but for what `others` says."""
    return MXProduct(**{"kind": DENSE, "m": 8192, "n": 4096, "k": 4096} | others)


@pytest.mark.parametrize(
    ("product", "runs", "form"),
    [
        (big(), (*OURS, VENDOR), VENDOR),
        (big(epilogue=True), (*OURS, VENDOR), VENDOR),
        (big(k=2048, epilogue=True), (*OURS, VENDOR), SPECIALIZED),
        (big(k=2048, epilogue=True), (PERSISTENT, POINTERS, VENDOR), PERSISTENT),
        (big(n=4104), OURS, SPECIALIZED),  # which the library's does not take
        (big(m=1024, n=1024), (*OURS, VENDOR), PERSISTENT),
        (big(n=4097, k=4097), (POINTERS,), POINTERS),
        (big(kind=BATCHED, groups=8), (POINTERS,), POINTERS),
        (big(kind=ROWS), (*OURS, VENDOR), VENDOR),
        (big(kind=ROWS, epilogue=True), (*OURS, VENDOR), PERSISTENT),
        (MXProduct(kind=ROWS, m=300, n=256, k=4096), (*OURS, VENDOR), PERSISTENT),
        (MXProduct(kind=ROWS, m=300, n=257, k=4096), (POINTERS,), POINTERS),
        (MXProduct(kind=ALONG_K, m=4096, n=4096, k=8192, groups=8), OURS, PERSISTENT),
        (MXProduct(kind=ALONG_K, m=4096, n=4097, k=8192, groups=8), (POINTERS,), POINTERS),
        (big(precision=NVFP4), (*OURS, VENDOR), VENDOR),
        (big(precision=NVFP4, epilogue=True), (*OURS, VENDOR), SPECIALIZED),
        (big(precision=NVFP4, k=8192, epilogue=True), (*OURS, VENDOR), VENDOR),
        (big(precision=NVFP4, m=1024, n=1024, k=4096), (*OURS, VENDOR), PERSISTENT),
        (big(precision=MXFP4), (*OURS, VENDOR), SPECIALIZED),
        (big(kind=ROWS, precision=NVFP4), OURS, PERSISTENT),
        (MXProduct(kind=ALONG_K, precision=NVFP4, m=4096, n=4096, k=8192, groups=8), (POINTERS,), POINTERS),
    ],
    ids=str,
)
def test_default_row_of_each_product_has_a_reason(product, runs, form):
    row = defaults.default(product, SM_100, runs)
    assert (row.kind, row.form) == (product.kind, form)
    assert row.reason


@pytest.mark.parametrize(
    ("cuda", "flags", "built"),
    [(True, "-DUSE_FBGEMM -DUSE_MSLK -O2", True), (True, "-DUSE_FBGEMM -O2", False), (False, "", True)],
)
def test_a_pytorch_may_be_built_without_products_of_groups(monkeypatch, cuda, flags, built):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: cuda)
    monkeypatch.setattr(torch.__config__, "show", lambda: f"CXX_FLAGS= {flags}")
    assert optional.has_mslk() == built


@pytest.mark.parametrize(
    ("product", "target", "runs", "form"),
    [
        (big(kind=ROWS), "sm_103", {*OURS, VENDOR}, PERSISTENT),
        (big(precision=NVFP4), "sm_120", {POINTERS, VENDOR}, VENDOR),
        (big(precision=NVFP4, m=512, n=512, k=4096), "sm_120", {POINTERS, VENDOR}, POINTERS),
    ],
    ids=["experts", "nvfp4 without tensor memory", "small nvfp4 without tensor memory"],
)
def test_default_form_on_another_chip(product, target, runs, form):
    assert defaults.default(product, TARGETS[target], runs).form == form


@pytest.mark.parametrize(("target", "ours"), [("sm_100", 1 / 2.25), ("sm_103", 1 / 3.375), ("sm_120", 1.0)])
def test_where_the_library_of_nvfp4_overtakes_an_epilogue(target, ours):
    """By the rates of estimates: between an activation behind it and a residual, 4 and 6 bytes an element.

    ours: what shared memory lets a tile of 128×128 reach.
    """
    peak, rates = TARGETS[target].peak, Rates.for_target(TARGETS[target])
    lost_us = 2 / (peak.dense_tflops["fp4"] * 1e6) * (1 / min(ours, rates["own_fp4"]) - 1 / rates["fp4"])
    activation, residual = (
        num_bytes / (rates["memory"] * peak.bandwidth_gbs * 1e3) / lost_us for num_bytes in (4, 6)
    )
    assert activation < TARGETS[target].long_k < residual


def test_last_row_of_every_kind_accepts_every_precision():
    last = {row.kind: row for row in defaults.TABLE}
    assert {(row.form, row.precisions) for row in last.values()} == {(POINTERS, defaults.EVERY)}
    assert set(last) == {DENSE, BATCHED, ROWS, ALONG_K}


def test_the_page_has_every_row_with_its_reason():
    page = re.sub(r"\s+", " ", PAGE.read_text(encoding="utf-8"))
    for row in defaults.TABLE:
        names = ", ".join(name.upper() for name in sorted(row.precisions))
        operands = "all" if row.precisions == defaults.EVERY else names
        assert f"| {row.kind} | {operands} | {row.when} | {row.form} | {row.reason} |" in page


@pytest.fixture(scope="module")
def large():
    """Nothing behind the first product, a sum behind the second; every processor has several tiles."""
    with torch.device("meta"):
        alone, added = (nn.Linear(2048, 4096, bias=False) for _ in range(2))
    both = Written(lambda model, x, y: (model.alone(x), y + model.added(x)), alone=alone, added=added)
    return generate(both, (8192, 2048), (8192, 4096))


@SPECIALIZED_WARPS
def test_large_products_alone_are_the_vendors(large):
    (alone,) = (launch for launch in large.launches if launch.gemms == ("alone fprop",))
    assert alone.kernel == "extern_kernels.mx_vendor_scaled_mm"
    records = {gemm.name: gemm.kernel for gemm in large.report.gemms}
    assert records["alone"] == "torch._scaled_mm"
    assert records["added"] == "mx_scaled_mm_tiled 128x128x128 (tcgen05.mma block_scale)"


@SPECIALIZED_WARPS
def test_an_epilogue_runs_beside_the_products_of_the_next_tile(large):
    """Between two tiles the matrix units wait for 8 % of a tile's time at most, as the model reckons."""
    (added,) = (launch for launch in large.launches if launch.gemms == ("added fprop",))
    assert "aten.add.Tensor" in added.operators
    kernel = large.kernel(added)
    assert "WARP_SPECIALIZE : tl.constexpr = True" in kernel.source
    assert "ttng.tmem_alloc : () -> !ttg.memdesc<2x128x128xf32" in kernel.binary.text["ttgir"]
    assert added.facts.understood
    assert added.facts.between <= 0.08
    assert_clean(large)


def _products(forward) -> list[bool]:
    """Of the products of a graph as it is lowered, in order, whether something is fused behind them."""

    def scaled(x):
        return scaled_mm(*quantize(x, -1, E4M3, "rceil"), CODES, SCALE, None, x.dtype)

    traced = make_fx(lambda x: forward(scaled, x))(torch.randn(64, 64))
    products = traced.graph.find_nodes(op="call_function", target=torch.ops.mx.matmul.default)
    return [has_epilogue(node) for node in products]


E4M3 = torch.float8_e4m3fn
CODES, SCALE = torch.zeros(64, 64).to(E4M3), torch.zeros(2, 64, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        (lambda mm, x: mm(x), [False]),
        (lambda mm, x: x + mm(x), [True]),
        (lambda mm, x: x + mm(x).view(8, 8, 64).flatten(0, 1), [True]),
        (lambda mm, x: (lambda y: y * y.sum(-1, keepdim=True))(x + mm(x)), [False]),  # a row's sum reads it
        (lambda mm, x: mm(torch.nn.functional.silu(mm(x))), [False, False]),  # the cast computes it
        (lambda mm, x: mm(torch.relu(mm(x))) + x, [False, True]),
        (lambda mm, x: mm(x) + mm(x.exp()), [False, True]),  # the last computes the sum
        (lambda mm, x: mm(x).exp().neg() * mm(x.exp()), [False, True]),  # the product too
        (lambda mm, x: (lambda y: (y, y * mm(x.exp())))(mm(x).exp()), [True, True]),  # stored anyway
        (lambda mm, x: (lambda y: (y.exp(), y.sum()))(mm(x)), [False]),  # stored anyway
        (lambda mm, x: (lambda y: (y + x, mm(y + x)))(mm(x)), [True, False]),
    ],
)
def test_operators_behind_a_product_are_its_epilogue(forward, expected):
    assert _products(forward) == expected
