"""The C++ product of many BF16 rows with a stored weight, by AMX where it is, and its choice."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from cpp_forms import HEADERS, exported, fixture_of, integer, pointer
from helpers.needs import pretend_cpu
from helpers.policies import every
from helpers.stored_weights import FeedForward
from torch import Tensor

import mxcompile
from mxcompile.lowering.cpu import AMX, COMPILED_FOR
from mxcompile.lowering.cpu import kernel as cpp

BF16 = torch.bfloat16
TYPES = {torch.float32: "float", BF16: "Bfloat16"}
FP4 = {"elem_dtype": torch.float4_e2m1fn_x2}
STORED = {
    "E4M3": {"elem_dtype": torch.float8_e4m3fn},
    "E5M2": {"elem_dtype": torch.float8_e5m2},
    "INT8": {"elem_dtype": torch.int8},
    "E2M1": FP4,
    "NVFP4": {**FP4, "rounding": "two-level"},
}
"""Arguments of `mxcompile.quantize`, by the C++ type of elements."""

SHAPES = [(0, 5, 64), (17, 33, 96), (33, 1, 64), (40, 70, 1120), (600, 100, 160), (20, 1100, 1376)]
"""Sizes of one and of several tiles, steps of K, stretches of steps, and parts of rows; whole and in part."""


def _functions() -> Iterator[str]:
    for elem, word in product(STORED, TYPES.values()):
        sides = "const Bfloat16* x, const uint8_t* w, const uint8_t* s, const float* whole"
        rest = f"const {word}* bias, int64_t m, int64_t n, int64_t k, {word}* out"
        call = f"tile_weight_mm(x, Weight<{elem}>{{w, s, k, whole}}, bias, m, n, 2, out);"
        yield exported(f"mm_{elem}_{word}", f"{sides}, {rest}", call)


ALL_HEADERS = " ".join(path.name for path in sorted(HEADERS.glob("*.h")))  # as those of a package are
functions = fixture_of(ALL_HEADERS, _functions())


def multiply(
    functions: ctypes.CDLL, elem: str, x: Tensor, weight: mxcompile.MXTensor, bias: Tensor
) -> Tensor:
    m, k = x.shape
    out = torch.full((m, len(weight) + 1), 3.0, dtype=bias.dtype).view(-1)  # with room that nobody may write
    codes, scales, *whole = (part.contiguous() for part in weight.parts)
    parts = [x, codes.view(torch.uint8), scales.view(torch.uint8), *(whole or [None]), bias]
    sizes = [integer(size) for size in (m, len(weight), k)]
    getattr(functions, f"mm_{elem}_{TYPES[bias.dtype]}")(*map(pointer, parts), *sizes, pointer(out))
    count = m * len(weight)
    assert bool((out[count:] == 3).all())
    return out[:count].view(m, len(weight))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("elem", STORED)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_sums_are_those_of_values_in_bf16(
    functions: ctypes.CDLL, m: int, n: int, k: int, elem: str, dtype: torch.dtype
):
    """Against sums in FP64 of the weight's values, which two levels round to BF16."""
    torch.manual_seed(0)
    x, bias = torch.randn(m, k).to(BF16), torch.randn(n).to(dtype)
    weight = mxcompile.quantize(torch.randn(n, k), **STORED[elem])
    values = weight.dequantize().double()
    exact, most = x.double() @ values.t() + bias.double(), x.double().abs() @ values.abs().t()
    rounding = 2.0**-8 if dtype is BF16 else 2.0**-24
    of_values = 2.0**-9 if elem == "NVFP4" else 0.0
    allowed = rounding * exact.abs() + (of_values + (k + 3) * 2.0**-24) * (most + bias.double().abs())
    error = (multiply(functions, elem, x, weight, bias).double() - exact).abs()
    assert bool((error <= allowed).all())


@pytest.mark.parametrize("elem", ["E4M3", "INT8", "E2M1"])
def test_sums_of_small_integers_are_exact(functions: ctypes.CDLL, elem: str):
    """FP32 has every sum, so that no element of any tile may be lost or counted twice."""
    torch.manual_seed(0)
    x = torch.randint(-4, 5, (550, 704)).to(BF16)
    weight = mxcompile.quantize(torch.randint(-2, 3, (530, 704)).float(), **STORED[elem])
    sums = multiply(functions, elem, x, weight, torch.zeros(530))
    assert torch.equal(sums.double(), x.double() @ weight.dequantize().double().t())


@pytest.mark.parametrize("elem", ["E4M3", "E5M2", "INT8", "E2M1"])
def test_what_is_not_finite_stays_in_its_row(functions: ctypes.CDLL, elem: str):
    """NaN scales, activations that are not finite, and blocks of zeros."""
    x, values = torch.ones(40, 96, dtype=BF16), torch.ones(50, 96)
    x[3, 70], x[5, 0] = torch.nan, torch.inf
    values[7, :32], values[35, 40] = 0, torch.nan
    weight = mxcompile.quantize(values, **STORED[elem])
    sums = multiply(functions, elem, x, weight, torch.zeros(50))
    expected = torch.full((40, 50), 96.0)
    expected[:, 7] = 64
    expected[5], expected[3] = torch.inf, torch.nan
    expected[5, 7] = torch.nan  # infinity times 0
    expected[:, 35] = torch.nan
    assert torch.equal(sums.nan_to_num(-1, posinf=-2), expected.nan_to_num(-1, posinf=-2))


@pytest.mark.parametrize("precision", ["mxfp8", "mxint8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("quantizes_activations", [False, True])
def test_many_rows_of_bf16_read_the_stored_weight(
    precision: str, quantizes_activations: bool, monkeypatch: pytest.MonkeyPatch
):
    """The model's values are those of the vendor's products of dequantized weights."""
    torch.manual_seed(0)
    model, xs = FeedForward(160, 330).bfloat16(), [torch.randn(count, 160, dtype=BF16) for count in (70, 41)]
    policy = every(precision, preset="inference")
    mxcompile.quantize_weights_(model, policy, args=(xs[0],))
    outputs = {}
    monkeypatch.setattr(cpp, "instructions", lambda: {COMPILED_FOR[AMX]})
    for kernel in ("", AMX):
        pretend_cpu(monkeypatch, integers="", many_rows=kernel, slow_dtypes=frozenset())
        torch._dynamo.reset()
        with torch.no_grad():
            options = {"policy": policy if quantizes_activations else "bf16"}
            compiled = torch.compile(model, backend="mxfp8", dynamic=True, options=options)
            outputs[kernel] = [compiled(x).float() for x in xs]
        kernels = {gemm.kernel.split(";")[0] for gemm in mxcompile.reports()[-1].gemms}
        if not quantizes_activations or not precision.endswith("fp4"):  # those are cast in another format
            assert {name for name in kernels if not name.startswith("aten.")} == (
                {f"mx_weight_only_mm {kernel}"} if kernel else set()
            )
    for plain, ours in zip(*outputs.values(), strict=True):
        assert (plain - ours).norm() < 1e-2 * plain.norm()


@pytest.mark.parametrize("kernel", COMPILED_FOR)
def test_many_rows_are_dequantized_if_inductor_compiles_for_other_instructions(
    kernel: str, monkeypatch: pytest.MonkeyPatch
):
    """Such as under `config.cpp.simdlen`: the record names what runs."""
    model, x = FeedForward(640, 330).bfloat16(), torch.randn(70, 640, dtype=BF16)
    mxcompile.quantize_weights_(model, "mxint8", args=(x,))
    pretend_cpu(monkeypatch, many_rows=kernel, slow_dtypes=frozenset())
    monkeypatch.setattr(cpp, "instructions", lambda: {"avx512"})
    with torch.no_grad():
        torch.compile(model, backend="mxfp8", options={"policy": "bf16"})(x)
    assert all(gemm.kernel.startswith("aten.") for gemm in mxcompile.reports()[-1].gemms)
