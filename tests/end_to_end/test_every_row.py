"""Every row of the table and every choice of scales: dynamic sizes in one graph, any shape, NaN and Inf."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.eager_backend import EagerBackend
from helpers.one_linear import cast, expected, policy, run
from helpers.reference import sqnr_db
from torch import nn
from torch._dynamo.testing import CompileCounter

import mxcompile
from mxcompile.formats import PRECISIONS
from mxcompile.formats.hadamard import SIGNS

K, N = 45, 37
"""Multiples of no block."""

USES: dict[str, dict[str, Any]] = {
    f"{row.name} {word}": {"precision": row.name, **({row.tiles_key: _plain} if row.tiles_key else {})}
    for row in PRECISIONS.values()
    for word in row.tiles
    if word != "delayed"  # of calls before: tests of histories have it
    for _plain in [int(word) if word.isdecimal() else word]
} | {
    "mxfp8 stochastic": {"precision": "mxfp8", "grad_rounding": "stochastic"},
    "mxint8 fp8 gradients": {"precision": "mxint8", "grad_dtype": "e4m3"},
    "fp8 block pow2": {"precision": "fp8", "scaling": "block", "scale": "pow2"},
    "fp8 percentile": {"precision": "fp8", "scaling": "channel", "amax": {"percentile": 95}},
    "mxfp4 percentile": {"precision": "mxfp4", "amax": {"percentile": 90}},
    "nvfp4 squares": {"precision": "nvfp4", "weight_block": "16x16"},
    "nvfp4 transcode": {"precision": "nvfp4", "saved": "transcode"},
    "nvfp4 hadamard": {"precision": "nvfp4", "hadamard": SIGNS},
    "nvfp4 hadamard transcode": {"precision": "nvfp4", "hadamard": 0, "saved": "transcode"},
    "nvfp4 4 over 6": {"precision": "nvfp4", "four_over_six": {"x": 256, "w": 448, "dy": 256}},
    "nvfp4 4 over 6 squares": {
        "precision": "nvfp4", "weight_block": "16x16", "four_over_six": {"w": 256, "error": "mse"},
    },
    "nvfp4 row-scaled": {"precision": "nvfp4", "row_scaled": ["x", "dy"], "hadamard": SIGNS},
    "nvfp4 row-scaled transcode": {
        "precision": "nvfp4", "row_scaled": "x", "four_over_six": {"x": 256}, "saved": "transcode",
    },
}  # fmt: skip
COMPILED = [
    "fp8 block pow2",
    "mxfp6_e2m3 32",
    "mxint8 fp8 gradients",
    "fp8 percentile",
    "mxfp4 percentile",
    "nvfp4 squares",
    "nvfp4 hadamard",
    "nvfp4 4 over 6 squares",
    "nvfp4 row-scaled transcode",
]


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(K, N, bias=False)


@pytest.mark.parametrize("name", USES)
def test_sizes_change_in_one_graph_and_nonfinite_values_surface(name: str):
    use, layer, counter = USES[name], linear(), CompileCounter()
    backend = EagerBackend(policy=policy(use))

    def count(gm: Any, inputs: Any) -> Any:
        counter.frame_count += 1
        return backend(gm, inputs)

    call = torch.compile(layer, backend=count, dynamic=True, fullgraph=True)
    for tokens in (17, 5, 130):
        x, dy = torch.randn(tokens, K), torch.randn(tokens, N)
        results = run(call, layer.weight, x, dy)
        if "stochastic" in name:
            use = {"precision": "mxfp8"}
            assert sqnr_db(expected(x, layer.weight.detach(), dy, use)[0], results[0]) > 100
            continue
        for tensor, other in zip(results, expected(x, layer.weight.detach(), dy, use), strict=True):
            assert sqnr_db(other, tensor) > 100
    for bad in (torch.nan, torch.inf):
        x = torch.randn(9, K)
        x[3, 5] = bad
        y, _, dw = run(call, layer.weight, x, torch.randn(9, N))
        assert y[3].isnan().all()
        assert dw[:, 5].isnan().all()
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_code_gives_the_same(name: str):
    use, layer = USES[name], linear()
    call = torch.compile(layer, backend="mxfp8", dynamic=True, options={"policy": policy(use)})
    for tokens in (17, 130):
        x, dy = torch.randn(tokens, K), torch.randn(tokens, N)
        results = run(call, layer.weight, x, dy)
        for tensor, other in zip(results, expected(x, layer.weight.detach(), dy, use), strict=True):
            assert sqnr_db(other, tensor) > 100
    (report,) = mxcompile.reports()
    assert {gemm.precision for gemm in report.gemms} == {use["precision"]}
    assert report.summary.graph_breaks == 0


def test_layers_in_every_precision_train_together_as_the_reference_does():
    """Backward reads what forward has cast and saved, which no cast in its own graph makes."""
    rows = [row.name for row in PRECISIONS.values() if row.tiles]
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in rows))
    rules = [{"match": {"name": str(index)}, "use": name} for index, name in enumerate(rows)]
    options = {"policy": {"version": 1, "rules": rules}}
    x, steps = torch.randn(40, 64), []
    for backend, arguments in (("mxfp8", options), (EagerBackend(**options), None)):
        torch._dynamo.reset()
        mxcompile.clear_reports()
        model.zero_grad()
        y = torch.compile(model, backend=backend, options=arguments)(x)
        y.square().sum().backward()
        steps.append([y.detach(), *(parameter.grad for parameter in model.parameters())])
        (report,) = mxcompile.reports()
        assert {gemm.precision for gemm in report.gemms} == set(rows)
    for compiled, reference in zip(*steps, strict=True):
        assert sqnr_db(reference, compiled) > 40


@pytest.mark.parametrize("kind", ["matrix", "batch", "groups"])
@pytest.mark.parametrize("name", ["mxfp8 32", "fp8 channel", "nvfp4 hadamard"])
def test_product_without_rows_has_zero_gradients(name: str, kind: str):
    """Experts that no token chose give nothing and have gradients of 0."""
    dtype, offs = torch.bfloat16, torch.zeros(2, dtype=torch.int32)
    functions: dict[str, Any] = {
        "matrix": torch.matmul,
        "batch": torch.bmm,
        "groups": lambda x, w: torch._grouped_mm(x, w, offs),
    }
    lead = (2,) if kind == "batch" else ()
    weight = nn.Parameter(torch.randn(*(() if kind == "matrix" else (2,)), 48, 32, dtype=dtype))
    x, dy = torch.empty(*lead, 0, 48, dtype=dtype), torch.empty(*lead, 0, 32, dtype=dtype)
    mxcompile.clear_reports()
    torch._dynamo.reset()
    call = torch.compile(
        lambda x: functions[kind](x, weight), backend="mxfp8", options={"policy": policy(USES[name])}
    )
    y, dx, dw = run(call, weight, x, dy)
    assert (y.shape, dx.shape) == (dy.shape, x.shape)
    assert torch.equal(dw, torch.zeros_like(weight))
    (report,) = mxcompile.reports()
    assert {gemm.precision for gemm in report.gemms} == {USES[name]["precision"]}


def test_the_scale_of_experts_tokens_is_of_those_in_groups():
    """Rows past the last group may hold anything, and the scale of the tensor does not follow them."""
    use, offs = {"precision": "nvfp4", "hadamard": SIGNS}, torch.tensor([5, 12], dtype=torch.int32)
    weight = nn.Parameter(torch.randn(2, 48, 32, dtype=torch.bfloat16))
    x, dy = torch.randn(20, 48, dtype=torch.bfloat16), torch.randn(20, 32, dtype=torch.bfloat16)
    backend = EagerBackend(policy=policy(use))
    call = torch.compile(lambda x: torch._grouped_mm(x, weight, offs), backend=backend, fullgraph=True)
    x[12:] = dy[12:] = 0.0
    wanted = [
        cast(x, -1, "x", use)[rows] @ cast(weight.detach(), -2, "w", use)[expert]
        for expert, rows in enumerate((slice(0, 5), slice(5, 12)))
    ]
    clean = run(call, weight, x, dy)
    assert sqnr_db(torch.cat(wanted), clean[0][:12].double()) > 40
    reasons = {gemm.gemm: gemm.reason for gemm in mxcompile.reports()[-1].gemms}
    assert "no Hadamard transform: groups of tokens may end" in reasons["wgrad"]
    assert "no Hadamard transform" not in reasons["fprop"]
    x[12:] = dy[12:] = 1e30
    for tensor, other in zip(run(call, weight, x, dy), clean, strict=True):
        assert torch.equal(tensor[:12], other[:12])


@pytest.mark.parametrize(
    "use", [*USES.values(), {"precision": "fp8", "scaling": "delayed"}], ids=[*USES, "fp8 delayed"]
)
def test_rows_past_the_last_group_change_nothing(use):
    """In training, and without gradients, where nothing else has them at 0."""
    offs = torch.tensor([40, 70], dtype=torch.int32)
    weight = nn.Parameter(torch.randn(2, 48, 32, dtype=torch.bfloat16))
    x, dy = torch.randn(80, 48, dtype=torch.bfloat16), torch.randn(80, 32, dtype=torch.bfloat16)
    call = torch.compile(
        lambda x: torch._grouped_mm(x, weight, offs), backend=EagerBackend(policy=policy(use)), fullgraph=True
    )
    steps = []
    for rest in (0.0, 1e30, torch.nan):
        x[70:] = dy[70:] = rest
        torch.manual_seed(1)
        y, dx, dw = run(call, weight, x, dy)
        with torch.no_grad():
            steps.append((y[:70], dx[:70], dw, call(x)[:70]))
    for clean, large, nan in zip(*steps, strict=True):
        assert torch.equal(clean, large)
        assert torch.equal(clean, nan)


def test_batched_products_have_one_scale_for_all_matrices():
    use = {"precision": "nvfp4"}
    weight, x, dy = nn.Parameter(torch.randn(3, K, N)), torch.randn(3, 17, K), torch.randn(3, 17, N)
    backend = EagerBackend(policy=policy(use))
    call = torch.compile(lambda x: torch.bmm(x, weight), backend=backend, fullgraph=True)
    w = weight.detach()
    expected = (
        cast(x, -1, "x", use) @ cast(w, -2, "w", use),
        cast(dy, -1, "dy", use) @ cast(w, -1, "w", use).mT,
        cast(x, -2, "x", use).mT @ cast(dy, -2, "dy", use),
    )
    for tensor, other in zip(run(call, weight, x, dy), expected, strict=True):
        assert sqnr_db(other, tensor) > 100
