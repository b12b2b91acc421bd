"""What generated weight-only products compute: run in Triton's interpreter, against FP64."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from generating import assert_clean
from helpers.casts import rounded_tensors
from helpers.operands import assert_within, product, values
from helpers.paces import mostly_slow
from helpers.packed_operands import MXFP4, NVFP4
from helpers.policies import every
from helpers.reference import round_trip, sqnr_db
from helpers.stored_weights import LEAST_DB, FeedForward, StoredLinear, binades, expected, with_stored_weights
from interpreted import interpret
from torch import Tensor, nn

import mxcompile
from mxcompile import MXTensor
from mxcompile.formats import Format
from mxcompile.offline import CodegenResult, codegen

BF16, F32 = torch.bfloat16, torch.float32
E4M3, E5M2, FP4_PAIRS = torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2


@dataclass(frozen=True, kw_only=True)
class Case:
    """One linear layer. kernel: what its record says."""

    target: str
    rows: int
    k: int
    n: int
    kernel: str
    dtype: torch.dtype = BF16
    elem: torch.dtype = E4M3
    bias: bool = True


CASES = {
    "one_row": Case(target="sm_90", rows=1, k=300, n=70, kernel="gemv 1x8x512"),
    "one_row_split": Case(target="sm_90", rows=1, k=4100, n=21, kernel="gemv 1x8x512 split 3", bias=False),
    "rows_split": Case(target="sm_90", rows=5, k=1100, n=40, kernel="dot 16x64x128 split 3"),
    "rows_by_integers": Case(target="sm_80", rows=20, k=260, n=130, kernel="dot 32x64x128"),
    "rows_in_fp32": Case(target="sm_90", rows=3, k=200, n=40, kernel="gemv 1x8x512", dtype=F32),
    "amd_e5m2": Case(target="gfx942", rows=2, k=96, n=33, kernel="dot 16x64x128", elem=E5M2),
}


def generate(model: nn.Module, x: Tensor, target: str, elem: str, folder: Path) -> CodegenResult:
    policy = every({"precision": "mxfp8", "elem_dtype": elem})
    return codegen(model, x, target=target, training=False, policy=policy, out_dir=folder)


@pytest.mark.parametrize("name", mostly_slow(CASES, "one_row", "rows_in_fp32"))
def test_generated_weight_only_layer_matches_fp64(name, tmp_path):
    case = CASES[name]
    linear = nn.Linear(case.k, case.n, bias=case.bias)
    with torch.no_grad():
        linear.weight.copy_(binades(case.n, case.k))
    model = StoredLinear(linear.to(case.dtype), case.elem)
    x = binades(case.rows, case.k).to(case.dtype)
    elem = {E4M3: "e4m3", E5M2: "e5m2"}[case.elem]
    result = generate(model, x, case.target, elem, tmp_path)
    (gemm,) = result.report.gemms
    assert gemm.kernel == f"mx_weight_only_mm {case.kernel}"

    bias = [model.bias] if case.bias else []
    (out,) = interpret(tmp_path, [model.qdata, model.scale, *bias, x])
    wanted = product(round_trip(x.float(), 1, elem), values(model.qdata, model.scale), model.bias)
    assert out.dtype is case.dtype
    assert_within(out, *wanted, case.k)


def packed_linear(n: int, k: int, rounding: str) -> tuple[nn.Linear, MXTensor]:
    """A layer whose weight is stored in packed FP4, and that weight."""
    layer = nn.Linear(k, n, dtype=BF16).requires_grad_(False)
    stored = mxcompile.quantize(binades(n, k).to(BF16), elem_dtype=FP4_PAIRS, rounding=rounding)
    layer.weight = nn.Parameter(stored, requires_grad=False)
    return layer, stored


PACKED = mostly_slow(
    [
        (target, rows, rounding)
        for target in ("sm_90", "sm_100", "gfx942")
        for rows in (1, 3)
        for rounding in ("rceil", "two-level")
    ],
    ("sm_90", 1, "two-level"),
    ("sm_100", 3, "rceil"),
    rows=True,
)


@pytest.mark.parametrize(("target", "rows", "rounding"), PACKED)
def test_packed_weights_are_read_as_they_are(target, rows, rounding, tmp_path):
    """Stored in MXFP4 or NVFP4; chips with an MX GEMM, which takes no BF16, run the same kernel."""
    layer, stored = packed_linear(40, 70, rounding)
    x = binades(rows, 70).to(BF16)
    result = codegen(layer, x, target=target, training=False, policy="bf16", out_dir=tmp_path)
    (gemm,) = result.report.gemms
    form = "gemv 1x16x1024" if rows == 1 else "dot 16x32x256"
    assert gemm.kernel == f"mx_weight_only_mm {form}"
    assert not any("mx.decode.default" in launch.operators for launch in result.launches)
    (out,) = interpret(tmp_path, [*stored.parts, layer.bias, x])
    assert_within(out, *product(x.float(), stored.dequantize(F32), layer.bias), 70)


FP4 = {"mxfp4": MXFP4, "nvfp4": NVFP4}
NATIVE_FP4 = [
    (target, word, rows)
    for target in ("sm_100", "sm_120", "gfx950")
    for word in ("mxfp4", "nvfp4")
    for rows in (3, 150)
    if (target, word) != ("gfx950", "nvfp4")
]


@pytest.mark.parametrize(
    ("target", "word", "rows"), mostly_slow(NATIVE_FP4, ("sm_100", "nvfp4", 3), rows=True)
)
def test_packed_weights_are_multiplied_as_they_are(target, word, rows, tmp_path):
    """If the rule casts activations to the same precision; few rows and more, K that ends inside a step."""
    layer, stored = packed_linear(72, 176, FP4[word].rpartition(" ")[2])
    x = binades(rows, 176).to(BF16)
    result = codegen(layer, x, target=target, training=False, policy=every(word), out_dir=tmp_path)
    assert_clean(result)
    (gemm,) = result.report.gemms
    assert (gemm.precision, gemm.kernel.split()[0]) == (word, "mx_scaled_mm")
    assert {form.rounding for form in gemm.formats if form.operand == "w"} == {"stored"}
    assert not any(name.startswith("mx.decode") for launch in result.launches for name in launch.operators)
    (out,) = interpret(tmp_path, [*stored.parts, layer.bias, x])
    cast = rounded_tensors(x.float(), -1, Format.parse(FP4[word]))
    assert_within(out, *product(cast, stored.dequantize(F32), layer.bias), 180)


@pytest.mark.slow
def test_codes_of_nvfp4_meet_activations_of_nvfp4(tmp_path):
    """On a chip without a GEMM of them the kernel takes the codes, and the scales of tensors come after."""
    layer, stored = packed_linear(48, 80, "two-level")
    x = binades(3, 80).to(BF16)
    result = codegen(layer, x, target="sm_90", training=False, policy=every("nvfp4"), out_dir=tmp_path)
    (gemm,) = result.report.gemms
    assert gemm.kernel == "mx_weight_only_mm dot 16x32x256"
    (out,) = interpret(tmp_path, [*stored.parts, layer.bias, x])
    cast = mxcompile.quantize(x, elem_dtype=FP4_PAIRS, rounding="two-level")
    values = cast.dequantize(torch.float64)
    assert_within(out, *product(values, stored.dequantize(F32), layer.bias), 80 + 4)


@pytest.mark.parametrize("rows", mostly_slow([1, 7], 1))
def test_fused_weight_only_feed_forward_matches_the_reference(rows, tmp_path):
    model = with_stored_weights(FeedForward(88, 650).to(BF16))
    x = binades(rows, 88).to(BF16)
    result = generate(model, x, "sm_90", "e4m3", tmp_path)
    assert all("mx_weight_only_mm" in gemm.kernel for gemm in result.report.gemms)
    gate, up, down = model.gate, model.up, model.down
    inputs = [gate.qdata, gate.scale, x, up.qdata, up.scale, down.qdata, down.scale, down.bias]
    (out,) = interpret(tmp_path, inputs)
    assert sqnr_db(expected(model, x), out) > LEAST_DB
