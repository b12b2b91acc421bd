"""The C++ product with stored weights, in every form this machine can run, against FP64."""

from __future__ import annotations

import ctypes
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from cpp_forms import exported, fixture_of, integer, pointer
from emulated import Library
from every_product import ELEMS, FORMATS, SOURCE, differing, every_byte, first_codes, scale_numbers
from helpers.casts import quantize
from helpers.needs import pretend_cpu
from helpers.stored_weights import LEAST_DB, FeedForward, binades, expected, with_stored_weights
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.testing import FileCheck

import mxcompile
from mxcompile import ops
from mxcompile.formats.encoding import element_values, encode_stored
from mxcompile.lowering import cpu

TYPES = {"Bfloat16": torch.bfloat16, "float": torch.float32}
F32, BF16 = torch.float32, torch.bfloat16

Product = Callable[..., Tensor]
"""x, codes, scales, bias, format, result type, global scales of rows if any → result."""


def _functions() -> Iterator[str]:
    weight, sizes = "const uint8_t* q, const uint8_t* s, const float* g", "int64_t m, int64_t n, int64_t k"
    for elem, x, out in itertools.product(ELEMS, TYPES, TYPES):
        body = f"weight_only_mm(x, Weight<{elem}>{{q, s, k, g, 1}}, b, m, n, 2, out);"
        arguments = f"const {x}* x, {weight}, const float* b, {sizes}, {out}* out"
        yield exported(f"mm_{elem}_{x}_{out}", arguments, body)
    yield SOURCE


functions = fixture_of("weight_only_mm.h", _functions())


@pytest.fixture(scope="module")
def product(functions: ctypes.CDLL) -> Product:
    words = {dtype: word for word, dtype in TYPES.items()}

    def call(x, codes, scales, bias: Tensor | None, elem: str, dtype: torch.dtype, whole=None) -> Tensor:
        out = torch.full((x.shape[0], codes.shape[0]), 3.0, dtype=dtype)
        function: Callable[..., None] = getattr(functions, f"mm_{elem}_{words[x.dtype]}_{words[dtype]}")
        sizes = map(integer, (x.shape[0], codes.shape[0], x.shape[1]))
        parts = codes.view(torch.uint8), scales, whole
        function(*map(pointer, (x, *parts, bias)), *sizes, pointer(out))
        return out

    return call


def values(codes: Tensor, scales: Tensor, elem: str, dtype: torch.dtype) -> Tensor:
    """What a stored weight stands for, without a global scale."""
    form = FORMATS[elem]
    packed = form.elem.packed is not None
    typed = codes if packed else codes.view(form.elem.dtype)
    word = str(replace(form, packed=packed))
    return ops.decode(typed, scales.view(form.scale.dtype), -1, word, dtype)


def check_single_products(product: Product, x: Tensor, codes: Tensor, scales: Tensor, elem: str):
    """Rows of one activation times columns of one byte: nothing is summed, so nothing may be lost."""
    rows = torch.stack([x, *[torch.zeros_like(x)] * (ELEMS[elem].per_byte - 1)], 1)
    products = product(rows, codes[:, None].contiguous(), scales[:, None].contiguous(), None, elem, F32)
    weight = element_values(first_codes(codes, elem), ELEMS[elem]).double() * scale_numbers(scales, elem)
    exact = (x.double()[:, None] * weight).float()
    # the reference's weight is infinite where FP32 has no such number, and so may the kernel's be
    beyond = ~weight.float().isfinite() & weight.isfinite()
    same = (products == exact) | (products.isnan() & exact.isnan()) | (beyond & ~products.isfinite())
    assert bool(same.all())


EVERY = torch.arange(256, dtype=torch.uint8)


@pytest.mark.parametrize("elem", ELEMS)
def test_every_activation_times_every_code(functions: ctypes.CDLL, elem: str):
    """Under some scales; `every_product.py` as a program takes all."""
    emulated = isinstance(functions, Library)  # a call takes seconds then
    for scale in (0, 254) if emulated else (0, 100, 254, 255):
        assert differing(functions, elem, scale, step=31 if emulated else 1) == 0


@pytest.mark.parametrize("elem", ELEMS)
def test_every_code_under_every_scale(product: Product, elem: str):
    codes, scales = every_byte(elem).repeat(256), EVERY.repeat_interleave(256)
    ordinary, odd = [1.0, -1.5, 2.0**50, 2.0**-59], [2.0**-133, 2.0**-100, 3e38, float("nan")]
    for activations in (ordinary, odd, [float("-inf")]):
        check_single_products(product, torch.tensor(activations).to(BF16), codes, scales, elem)


@pytest.mark.parametrize("elem", ELEMS)
@pytest.mark.parametrize("dtype", TYPES.values(), ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (1, 7, 4096),
        (2, 101, 96),  # rows decoded together lie apart, and some are left over
        (1, 2057, 40),
        (3, 5, 100),
        (4, 1, 31),
        (5, 9, 65),
        (1, 6, 8300),
        (3, 4, 2800),
        (8, 5, 1100),
        (16, 33, 1000),
        (0, 3, 64),
    ],
)
def test_weight_only_sums_are_within_fp32_accumulation(
    product: Product, m: int, n: int, k: int, dtype: torch.dtype, elem: str
):
    """Within what FP32 accumulation may lose, whatever the exponents; a bias before the one rounding."""
    torch.manual_seed(0)
    k += k % ELEMS[elem].per_byte
    qdata, scales, whole = encode_stored(binades(n, k), -1, FORMATS[elem])
    weight = values(qdata, scales, elem, torch.float64)
    if whole is not None:
        whole = (whole * torch.rand(n, 1)).contiguous()  # one for each row
        weight /= whole
    bias = torch.randn(n)
    for magnitude in (1.0, 2.0**-90, 2.0**80):
        x = (binades(m, k) * magnitude).to(dtype)
        exact = x.double() @ weight.t()
        most = x.double().abs() @ weight.abs().t()
        sums = product(x, qdata, scales, None, elem, F32, whole)
        assert bool(((sums.double() - exact).abs() <= (k + 2) * 2.0**-24 * most).all())
        sums = product(x, qdata, scales, bias, elem, BF16, whole)
        error = (sums.double() - (exact + bias)).abs()
        allowed = 2.0**-8 * (exact + bias).abs() + (k + 3) * 2.0**-24 * (most + bias.abs())
        assert bool((error <= allowed).all())


@pytest.mark.parametrize("dtype", TYPES.values(), ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 9, 70), (3, 5, 1100), (16, 17, 64)])
def test_sums_of_integers_are_exact(product: Product, m: int, n: int, k: int, dtype: torch.dtype):
    """Both operands in MXINT8, under scales that differ by so little that FP32 has every sum."""
    torch.manual_seed(0)
    blocks = torch.exp2(torch.randint(-1, 2, (m, -(-k // 32))).float()).repeat_interleave(32, 1)
    x = torch.randint(-127, 128, (m, k)) * blocks[:, :k]
    codes = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    scales = torch.randint(126, 128, (n, -(-k // 32)), dtype=torch.uint8)
    exact = x.double() @ values(codes, scales, "INT8", torch.float64).t()
    assert torch.equal(product(x.to(dtype), codes, scales, None, "INT8", F32).double(), exact)


@pytest.mark.parametrize("k", [64, 544])
@pytest.mark.parametrize("dtype", TYPES.values(), ids=str)
def test_activations_of_16_bits_are_exact(product: Product, k: int, dtype: torch.dtype):
    """Beside the largest and the smallest numbers of 16 bits, where two signed bytes end."""
    edges = [16384, 32512, 32639, 32640, 32641, 32767]
    numbers = torch.tensor([sign * edge for edge in edges for sign in (1, -1)], dtype=torch.float32).to(dtype)
    x = torch.ones(len(numbers), k, dtype=dtype)
    x[:, 5] = numbers.clamp(-32767, 32767) if dtype is F32 else numbers.clamp(-32640, 32640)
    codes, scales = torch.zeros(9, k, dtype=torch.int8), torch.full((9, k // 32), 133, dtype=torch.uint8)
    codes[:, 5], codes[:, 6] = torch.arange(-4, 5), -128
    sums = product(x, codes, scales, None, "INT8", F32)
    assert torch.equal(sums.double(), x.double() @ codes.double().t())


def test_a_nan_block_and_a_short_last_block(product: Product):
    """NaN stays in its row; what lies behind the end of a row counts for nothing."""
    qdata, scales = quantize(torch.ones(3, 70), -1, torch.float8_e4m3fn, "rceil")
    scales[1, 2] = 255
    row_sums = product(torch.ones(1, 70, dtype=BF16), qdata, scales, None, "E4M3", F32)
    assert row_sums[0, [0, 2]].tolist() == [70.0, 70.0]
    assert row_sums[0, 1].isnan()


@pytest.mark.parametrize("elem", ELEMS)
@pytest.mark.parametrize("dtype", TYPES.values(), ids=str)
def test_weight_rows_of_every_length_have_exact_sums(
    functions: ctypes.CDLL, product: Product, dtype: torch.dtype, elem: str
):
    """A row of any length beside others, for every length that a step of the kernel may leave over."""
    torch.manual_seed(0)
    step, most = ELEMS[elem].per_byte, 520 * ELEMS[elem].per_byte
    for k in range(step, most, step * (29 if isinstance(functions, Library) else 1)):
        qdata, scales, _ = encode_stored(torch.randint(-2, 3, (9, k)).float(), -1, FORMATS[elem])
        x = torch.randint(-8, 9, (2, k)).to(dtype)
        exact = x.double() @ values(qdata, scales, elem, torch.float64).t()
        sums = product(x, qdata, scales.view(torch.uint8), None, elem, F32)
        rounded = 2.0**-20 if FORMATS[elem].two_level else 0.0  # other scales leave integers
        assert bool(((sums - exact).abs() <= rounded * exact.abs().max()).all())


def test_one_global_scale_divides_exactly_once(product: Product):
    """A single product is the exact one, rounded once; scales that are negative or NaN among them."""
    codes, scales = every_byte("NVFP4").repeat(256), EVERY.repeat_interleave(256)
    rows = torch.tensor([[1.5, 0.0], [-(2.0**20), 0.0]], dtype=BF16)
    whole = torch.full((len(codes), 1), 2688 / 3.7)
    parts = (part[:, None].contiguous() for part in (codes, scales))
    products = product(rows, *parts, None, "NVFP4", F32, whole)
    elements = element_values(first_codes(codes, "NVFP4"), ELEMS["NVFP4"]).double()
    weight = elements * scale_numbers(scales, "NVFP4")
    exact = rows[:, :1].double() * weight / whole[0].double()
    near = (products - exact).abs() <= 2.0**-23 * exact.abs()
    assert bool((near | (products.isnan() & exact.isnan())).all())


@pytest.mark.parametrize("elem", ELEMS)
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_every_code_at_every_place(functions: ctypes.CDLL, product: Product, rows: int, elem: str):
    """Also codes that are no numbers: infinities and NaN reach their row of the weight and no other."""
    codes = EVERY.repeat(2).unfold(0, 100 // ELEMS[elem].per_byte, 1)[:256].contiguous()
    blocks = -(-100 // FORMATS[elem].tile.along)
    scales = torch.arange(80, 120, dtype=torch.uint8).repeat(46)[: 256 * blocks].view(256, blocks)
    weight = values(codes, scales, elem, F32)
    finite = weight.isfinite().all(1)
    assert 0 < finite.sum() < 256 or ELEMS[elem].is_coded
    for column in range(0, 100, 11 if isinstance(functions, Library) else 1):
        x = torch.zeros(rows, 100, dtype=BF16)
        x[:, column] = 3.0
        products = product(x, codes, scales, None, elem, F32)
        assert torch.equal(products[:, finite], (3 * weight[finite, column]).expand(rows, -1))
        assert not products[:, ~finite].isfinite().any()


def test_subnormal_elements_where_threads_flush_them(functions: ctypes.CDLL, product: Product):
    """`torch.set_flush_denormal` is not to change what a weight is."""
    if isinstance(functions, Library):
        pytest.skip("an emulator's process has modes of its own")
    codes, scales = torch.tensor([[1, 2, 131]], dtype=torch.uint8), torch.tensor([[127]], dtype=torch.uint8)
    x = torch.tensor([[1.0, 4.0, 64.0]], dtype=BF16)
    assert torch.set_flush_denormal(True)
    try:
        output = product(x, codes, scales, None, "E4M3", F32)
    finally:
        torch.set_flush_denormal(False)
    assert output.item() == 2.0**-9 * (1 + 8 - 3 * 64)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_model_decodes_its_stored_weights(dynamic: bool):
    model = with_stored_weights(FeedForward(160, 330).bfloat16())
    compiled = torch.compile(model, backend="mxfp8", dynamic=dynamic)
    with torch.no_grad():
        for rows in (3, 5) if dynamic else (3,):
            x = torch.randn(rows, 160, dtype=BF16)
            output, right = compiled(x).float(), expected(model, x).float()
            assert 20 * torch.log10(right.norm() / (output - right).norm()) >= LEAST_DB
    kernels = [gemm.kernel for gemm in mxcompile.reports()[-1].gemms]
    assert kernels == ["mx_weight_only_mm C++"] * 3


@pytest.mark.slow
def test_a_profile_of_kernels_names_those_in_cpp():
    """Inductor's setting writes a record into every kernel."""
    model, x = with_stored_weights(FeedForward(160, 330).bfloat16()), torch.randn(3, 160, dtype=BF16)
    with torch._inductor.config.patch({"cpp.enable_kernel_profile": True}), torch.no_grad():
        compiled = torch.compile(model, backend="mxfp8", dynamic=False)
        compiled(x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            compiled(x)
    counts = [event.count for event in profile.key_averages() if event.key.endswith("_weight_only_mm")]
    assert counts == [3]


def test_large_weights_are_dequantized_in_parts(monkeypatch: pytest.MonkeyPatch):
    """For many rows, by one kernel for all parts; the last part is a short one."""
    monkeypatch.setattr(cpu, "PART_BYTES", 2 * 64 * 160)
    pretend_cpu(monkeypatch, many_rows="")
    model = with_stored_weights(FeedForward(160, 330).bfloat16())
    x = torch.randn(40, 160, dtype=BF16)
    with torch.no_grad():
        output, (code,) = run_and_get_code(torch.compile(model, backend="mxfp8", dynamic=False), x)
        right = expected(model, x).float()
    assert 20 * torch.log10(right.norm() / (output.float() - right).norm()) >= LEAST_DB
    kernels = [gemm.kernel for gemm in mxcompile.reports()[-1].gemms]
    assert kernels == [f"mx_weight_only_mm dequantized in {parts} parts, mm" for parts in (6, 6, 3)]
    FileCheck().check_count("extern_kernels.mm(", 6 + 6 + 3, exactly=True).run(code)
    assert len(set(re.findall(r"cpp_fused_\w+(?=\()", code))) < 6


def test_weight_only_product_without_compiler_records_the_reason(monkeypatch: pytest.MonkeyPatch):
    from mxcompile.lowering.cpu import kernel

    monkeypatch.setattr(kernel, "obstacle", lambda: "no C++ compiler: none is found")
    mxcompile.clear_reports()
    model = with_stored_weights(FeedForward(96, 64).bfloat16())
    with torch.no_grad():
        torch.compile(model, backend="mxfp8", dynamic=False)(torch.randn(2, 96, dtype=BF16))
    for gemm in mxcompile.reports()[-1].gemms:
        assert gemm.kernel.endswith("; no C++ compiler: none is found")
