"""Few rows of BF16 times a weight that is not quantized: the C++ kernel against FP64, and its choice."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cpp_forms import exported, fixture_of, integer, pointer
from helpers.needs import pretend_cpu
from helpers.stored_weights import FeedForward
from torch import Tensor, nn

import mxcompile
from mxcompile.lowering.cpu import kernel

BF16, F32 = torch.bfloat16, torch.float32
TYPES = {F32: "float", BF16: "Bfloat16"}


def keeping(name: str, preset: str = "inference") -> dict[str, Any]:
    """The policy that keeps the layer called `name` in BF16."""
    return {"version": 1, "preset": preset, "rules": [{"match": {"name": name}, "use": "bf16"}]}


Product = Callable[..., Tensor]
"""x, w, bias → result in the dtype of the bias."""

functions = fixture_of(
    "few_rows_mm.h",
    [
        exported(
            f"mm_{word}",
            "const Bfloat16* x, const Bfloat16* w,"
            f" const {word}* bias, int64_t m, int64_t n, int64_t k, {word}* out",
            "few_rows_mm(x, w, bias, m, n, k, 2, out);",
        )
        for word in TYPES.values()
    ],
)


@pytest.fixture(scope="module")
def product(functions: ctypes.CDLL) -> Product:
    def call(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        out = torch.full((len(x), len(w)), 3.0, dtype=bias.dtype)
        sizes = map(integer, (*x.shape[:1], *w.shape))
        getattr(functions, f"mm_{TYPES[bias.dtype]}")(*map(pointer, (x, w, bias)), *sizes, pointer(out))
        return out

    return call


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("m", [*range(1, 10), 16, 19])
@pytest.mark.parametrize(("n", "k"), [(9, 70), (70, 1100), (2057, 33), (1, 1)])
def test_sums_are_within_the_rounding_of_fp32(product: Product, m: int, n: int, k: int, dtype: torch.dtype):
    torch.manual_seed(0)
    x, w, bias = torch.randn(m, k).to(BF16), torch.randn(n, k).to(BF16), torch.randn(n).to(dtype)
    exact = x.double() @ w.double().t() + bias.double()
    most = x.double().abs() @ w.double().abs().t() + bias.double().abs()
    rounding = 2.0**-8 if dtype is BF16 else 2.0**-24
    error = (product(x, w, bias).double() - exact).abs()
    assert bool((error <= rounding * exact.abs() + (k + 3) * 2.0**-24 * most).all())


@pytest.mark.parametrize("k", [*range(1, 70), 545])
def test_sums_of_integers_are_exact_for_every_length(product: Product, k: int):
    """What lies behind the end of a row counts for nothing."""
    x, w = (torch.randint(-8, 9, (rows, k)).to(BF16) for rows in (2, 9))
    assert torch.equal(product(x, w, torch.zeros(9)).double(), x.double() @ w.double().t())


def test_nan_and_infinity_stay_in_their_rows(product: Product):
    x, w = torch.ones(3, 70, dtype=BF16), torch.ones(20, 70, dtype=BF16)
    x[1, 5], w[7, 69] = float("nan"), float("inf")
    out = product(x, w, torch.zeros(20))
    expected = torch.full((3, 20), 70.0)
    expected[:, 7], expected[1] = float("inf"), float("nan")
    assert torch.equal(out.nan_to_num(-1, 1e9), expected.nan_to_num(-1, 1e9))


def kernels(model: nn.Module, *inputs: Tensor, policy: object, dynamic: bool = False) -> set[str]:
    """The kernels of the products that stay in BF16; outputs are compared with those of the vendor's GEMM."""
    outputs = []
    for few_rows in (0, 16):
        with pytest.MonkeyPatch.context() as patch:
            pretend_cpu(patch, few_rows=few_rows, slow_dtypes=frozenset())
            torch._dynamo.reset()
            compiled = torch.compile(model, backend="mxfp8", dynamic=dynamic, options={"policy": policy})
            with torch.no_grad():
                outputs.append([compiled(x) for x in inputs])
    for ours, vendor in zip(*outputs, strict=True):
        torch.testing.assert_close(ours, vendor, rtol=2.0**-7, atol=1e-2)
    return {gemm.kernel for gemm in mxcompile.reports()[-1].gemms if gemm.precision == "bf16"}


@pytest.mark.parametrize("name", ["down", "gate"], ids=["bias", "no bias"])
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_a_kept_layer_of_few_rows_runs_the_kernel(name: str, rows: int):
    torch.manual_seed(0)
    model, policy, x = FeedForward(160, 330).bfloat16(), keeping(name), torch.randn(rows, 160, dtype=BF16)
    mxcompile.quantize_weights_(model, policy, args=(x,))
    assert kernels(model, x, policy=policy) == {"mx_weight_only_mm C++ (bfloat16)"}


class Computed(nn.Module):
    """Its last weight is a result of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(160, 64, bias=False), nn.Linear(64, 160, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.first(x).relu(), self.last.weight * 2)


@pytest.mark.parametrize(
    ("model", "rows", "dtype"),
    [(FeedForward(160, 330), 17, BF16), (FeedForward(160, 330), 3, F32), (Computed(), 3, BF16)],
    ids=["many rows", "fp32", "a computed weight"],
)
def test_other_kept_layers_are_left_to_the_vendor(model: nn.Module, rows: int, dtype: torch.dtype):
    policy = keeping("gate" if isinstance(model, FeedForward) else "last", preset="nvidia")
    assert kernels(model.to(dtype), torch.randn(rows, 160, dtype=dtype), policy=policy) == {"aten.mm"}


def test_a_symbolic_number_of_rows_is_left_to_the_vendor():
    """It may be large in a later call."""
    model, xs = FeedForward(160, 330).bfloat16(), [torch.randn(rows, 160, dtype=BF16) for rows in (3, 5)]
    assert kernels(model, *xs, policy=keeping("gate", "nvidia"), dynamic=True) == {"aten.mm"}


def test_without_a_compiler_the_record_has_the_reason(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernel, "obstacle", lambda: "no C++ compiler")
    x = torch.randn(3, 160, dtype=BF16)
    names = kernels(FeedForward(160, 330).bfloat16(), x, policy=keeping("gate", "nvidia"))
    assert names == {"aten.mm; no C++ compiler"}


def test_without_quantized_operands_products_stay_those_of_inductor():
    model, x = FeedForward(160, 330).bfloat16(), torch.randn(3, 160, dtype=BF16)
    assert kernels(model, x, policy="bf16") == {"aten.mm", "aten.addmm"}
