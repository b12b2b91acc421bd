"""The generated casts and products on the GPU of this machine: casts bit for bit, products against FP64."""

from __future__ import annotations

import pytest
import torch
from helpers.bits import assert_same_bits
from helpers.casts import encode_packed, quantize, quantize_both, quantize_operands, scaled_mm
from helpers.operands import assert_within, operand, product, values
from helpers.packed_operands import MXFP4, NVFP4
from helpers.spread import spread

import mxcompile
from mxcompile import ops
from mxcompile.formats import ELEM_TYPES, Format, Rounding, ScaleLayout, ScaleType
from mxcompile.lowering import targets
from mxcompile.lowering.chips.tiles import Unsupported
from mxcompile.lowering.choices import configs as choices
from mxcompile.lowering.choices.configs import tiled_configs
from mxcompile.lowering.graph import pipeline
from mxcompile.lowering.targets import Target
from mxcompile.lowering.templates import scaled_mm_tiled, vendor

pytestmark = pytest.mark.gpu

BF16, F32 = torch.bfloat16, torch.float32
SHAPES = [(1, 4096, 4096), (16, 1000, 1040), (33, 130, 100), (300, 520, 4096), (2048, 4096, 512)]


@pytest.fixture
def chip():
    """What the device is; tensors are made there."""
    target = targets.of_device(torch.device("cuda"))
    assert not pipeline.obstacles(target)
    torch.set_default_device("cuda")
    yield target
    torch.set_default_device(None)


def native(chip: Target) -> None:
    if not chip.native:
        pytest.skip(f"{chip.name} has no MX GEMM: products are the vendor's, of dequantized operands")


def generated(operator, *arguments):
    """What Inductor's code for one operator gives."""
    torch._dynamo.reset()
    return torch.compile(lambda *arguments: operator(*arguments), dynamic=False, fullgraph=True)(*arguments)


def by_blocks(m: int, n: int) -> torch.Tensor:
    return spread(m, n, binades=60, tile=(32, 32))


def special(x: torch.Tensor) -> torch.Tensor:
    """`x` with NaN, Inf, negative zeros and subnormals in it."""
    x[0, 0], x[40, 40], x[70, 100] = float("nan"), float("inf"), -float("inf")
    x[32:64, 96:128] = -0.0
    x[96:128, 32:64] *= 2.0**-126
    return x


CASTS = {
    "rowwise": lambda x, *how: quantize(x, -1, *how[:2], False, how[2]),
    "columnwise": lambda x, *how: quantize(x, -2, *how[:2], False, how[2]),
    "both": quantize_both,
}


@pytest.mark.parametrize("scales", [ScaleLayout.ROW_MAJOR, ScaleLayout.TILED_128X4])
@pytest.mark.parametrize("layout", CASTS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", [(128, 160), (4096, 4096), (333, 1031)], ids=str)
def test_generated_mx_casts_equal_reference_on_the_gpu(shape, dtype, layout, scales, chip):
    kinds = [(elem.dtype, str(rounding)) for elem in ELEM_TYPES.values() for rounding in Rounding]

    def every(x):
        return [result for kind in kinds for result in CASTS[layout](x, *kind, str(scales))]

    x = special(by_blocks(*shape)).to(dtype)
    assert_same_bits(generated(every, x), every(x))


FORMS = ["values/values", "values/codes", "codes/values", "none/codes", "squares/none"]


@pytest.mark.parametrize("forms", FORMS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", [(128, 160), (2048, 4096), (333, 1031)], ids=str)
def test_casts_of_emulated_products_equal_reference_on_the_gpu(shape, dtype, forms, chip):
    """What products that are emulated read and keep, every element type and rounding."""
    if chip.native:
        pytest.skip(f"{chip.name} has an MX GEMM: another test has its casts")
    kinds = [(elem.dtype, str(rounding)) for elem in ELEM_TYPES.values() for rounding in Rounding]

    def every(x):
        how = dtype, *forms.split("/")
        casts = [part for kind in kinds for part in quantize_operands(x, None, *kind, *how)]
        return [part for part in casts if part.numel()]

    x = special(by_blocks(*shape)).to(dtype)
    assert_same_bits(generated(every, x), every(x.cpu()))


def test_casts_of_two_matrices_are_those_of_each(chip):
    if chip.native:
        pytest.skip(f"{chip.name} has an MX GEMM: another test has its casts")
    how = torch.float8_e4m3fn, "rceil", BF16, "values", "codes"

    def both(x, y):
        return [part for part in quantize_operands(x, y, *how) if part.numel()]

    x, y = special(by_blocks(320, 416)).to(BF16), by_blocks(320, 416).to(BF16)
    assert_same_bits(generated(both, x, y), both(x.cpu(), y.cpu()))


FP8_WORDS = [
    *(f"{elem} {extent} nearest" for elem in ("e4m3", "e5m2") for extent in ("tensor", "channel", "1x128")),
    *("e4m3 1x128 pow2", "e4m3 128x128 nearest", "e4m3 tensor nearest delayed:4:0"),
]


@pytest.mark.parametrize("word", FP8_WORDS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", [(128, 256), (2048, 4096), (333, 1040)], ids=str)
def test_generated_fp8_casts_equal_reference_on_the_gpu(shape, dtype, word, chip):
    """Elements in both layouts, their scales, and the largest magnitude, of casts with FP32 scales."""
    if not chip.fp8_tiles:
        pytest.skip(f"{chip.name} has no FP8 GEMM")

    def every(x, scale):
        copies = [f"{word} @-1 elements", f"{word} @-2 elements transposed"]
        if "128" not in word:
            copies.append(f"{word} @-1 largest")
        if "delayed" in word:
            return ops.cast(x, copies, None, 0, [scale, scale, None])
        return ops.cast(x, [*copies, f"{word} @-1 scales", f"{word} @-2 scales"])

    x, scale = by_blocks(*shape).to(dtype), torch.full((1, 1), 0.37)
    assert_same_bits(generated(every, x, scale), every(x.cpu(), scale.cpu()))


@pytest.mark.parametrize("majorness", [(True, True), (True, False), (False, False)], ids=str)
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_generated_scaled_mm_matches_fp64_on_the_gpu(shape, tiled, majorness, chip, monkeypatch):
    native(chip)
    monkeypatch.setattr(scaled_mm_tiled, "fits", lambda _: False)
    monkeypatch.setattr(vendor, "fits_fp8", lambda *_: False)
    m, n, k = shape
    a, b = operand(m, k, k_major=majorness[0], tiled=tiled), operand(n, k, k_major=majorness[1], tiled=tiled)
    bias = torch.randn(n).to(BF16)
    out = generated(scaled_mm, *a.left, *b.right, bias, BF16)
    assert_within(out, *product(a.values, b.values, bias), k)


@pytest.mark.parametrize("majorness", [(True, True), (True, False), (False, False)], ids=str)
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_every_tiled_config_matches_fp64_on_the_gpu(shape, majorness, chip, monkeypatch):
    """Every config, of operands that the accelerator can read; the pointer form else."""
    if isinstance(row := chip.tiles.scaled_mm_tiled, Unsupported):
        pytest.skip(f"scaled_mm_tiled is not for {chip.name}: {row.reason}")
    m, n, k = shape
    a, b = operand(m, k, k_major=majorness[0], tiled=True), operand(n, k, k_major=majorness[1], tiled=True)
    for config in tiled_configs(chip):
        monkeypatch.setattr(choices, "tiled_products", lambda *_, config=config: [config])
        monkeypatch.setattr(vendor, "fits_fp8", lambda *_: False)
        assert_within(generated(scaled_mm, *a.left, *b.right, None, BF16), *product(a.values, b.values), k)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_generated_quantize_mm_matches_fp64_on_the_gpu(shape, chip):
    native(chip)
    m, n, k = shape
    x, w, how = by_blocks(m, k).to(BF16), operand(n, k, spread=20), (torch.float8_e4m3fn, "rceil")
    out = generated(ops.quantize_mm, x, *w.right, None, F32, str(Format()), str(Format()))
    assert_within(out, *product(values(*quantize(x, -1, *how)), w.values), k)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_weight_only_mm_is_exact_and_reproducible_on_the_gpu(shape, dtype, chip):
    m, n, k = shape
    x, w = torch.randn(m, k).to(dtype), operand(n, k)
    out = generated(ops.weight_only_mm, x, *w.left, None, F32, "e4m3 1x32 rceil")
    assert_within(out, *product(x, w.values), k)
    second = generated(ops.weight_only_mm, x, *w.left, None, F32, "e4m3 1x32 rceil")
    assert torch.equal(out, second)  # the parts of a split K are summed in one order


@pytest.mark.parametrize("rounding", ["rceil", "two-level"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("m", [1, 20])
def test_weight_only_mm_of_packed_codes(m, dtype, rounding, chip):
    fp4 = torch.float4_e2m1fn_x2
    x, weight = torch.randn(m, 4160).to(dtype), torch.randn(200, 4160)
    w = mxcompile.quantize(weight, elem_dtype=fp4, rounding=rounding)
    scale = w.scale_bytes.view(w.form.scale.dtype)
    whole = [] if w.global_scale is None else [w.global_scale]
    out = generated(ops.weight_only_mm, x, w.qdata, scale, None, F32, f"{w.form} packed", *whole)
    assert_within(out, *product(x.cpu(), w.dequantize(torch.float64).cpu()), 4160)


@pytest.mark.parametrize("word", [NVFP4, MXFP4])
@pytest.mark.parametrize("shape", [(33, 64, 48), (70, 131, 77), (300, 4096, 512)])
def test_fp4_casts_and_products_match_reference_on_the_gpu(chip, shape, word):
    """Ours; of NVFP4 the vendor's too, where it takes the sizes."""
    if Format.parse(word).scale not in chip.fp4_scales:
        pytest.skip(f"{chip.name} does not multiply {word}")
    m, k, n = shape
    layout = str(chip.scale_layout)

    def packed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        amax = ops.largest(x) if word == NVFP4 else None
        return encode_packed(x, -1, word, None, 0, amax, layout)

    sides, tensors = [], []
    for rows in (m, n):
        x = torch.randn(rows, k, dtype=BF16)
        cast, reference = torch.compile(packed)(x), packed(x.cpu())
        assert_same_bits(cast, reference)
        sides.append(cast)
        tensors += [ops.known_scale(ops.largest(x), 0, word, 1)] if word == NVFP4 else []
    (a, scale_a), (b, scale_b) = sides
    operands = a, scale_a, b.t(), scale_b if scale_b.ndim == 1 else scale_b.t()
    on_cpu = [tensor.cpu() for tensor in (*operands, *tensors)]
    words, several = (f"{word} packed",) * 2, on_cpu[4:] or None
    expected = ops.matmul(*on_cpu[:4], None, F32, *words, several)
    bound = {"rtol": 2**-7, "atol": 1e-3 * float(expected.abs().max())}
    out = generated(ops.matmul, *operands, None, BF16, *words, tensors or None)
    torch.testing.assert_close(out.cpu().float(), expected, **bound)
    if word == NVFP4 and ScaleType.E4M3 in chip.library_fp4 and k % 32 == n % 16 == 0:
        result = vendor.mx_vendor_nvfp4_mm(*operands, *tensors, out_dtype=BF16)
        torch.testing.assert_close(result.cpu().float(), expected, **bound)
