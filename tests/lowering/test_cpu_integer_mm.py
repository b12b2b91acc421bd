"""The C++ product of matrices in MXINT8, in every form this machine can run, against FP64; and its choice."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from cpp_forms import assembly, exported, fixture_of, integer, pointer, unit
from helpers.needs import pretend_cpu
from helpers.policies import every
from helpers.stored_weights import FeedForward
from torch import Tensor

import mxcompile
from mxcompile.lowering.cpu import INT16, kernel

BF16 = torch.bfloat16
TYPES = {torch.float32: "float", BF16: "Bfloat16"}
POLICY = every("mxint8", preset="inference")


def _functions() -> Iterator[str]:
    rows, weight = "const Bfloat16* x", "const uint8_t* w, const uint8_t* t"
    for word in TYPES.values():
        rest, layouts = (
            f"const {word}* bias, int64_t m, int64_t n, int64_t k",
            "int64_t x_across, int64_t w_across",
        )
        sides = "Codes{x, s, m, k, x_across != 0}, Codes{w, t, n, k, w_across != 0}"
        codes = f"const uint8_t* x, const uint8_t* s, {weight}, {rest}, {layouts}, {word}* out"
        yield exported(f"mm_{word}", codes, f"integer_mm({sides}, bias, 2, out);")
        call = "many_rows_mm(x, Weight<INT8>{w, t, k}, bias, m, n, 2, out);"
        yield exported(f"many_{word}", f"{rows}, {weight}, {rest}, {word}* out", call)


Product = Callable[..., Tensor]
"""Codes and scales of both sides, bias, dtype → result."""

ROWS, ACROSS = (False, False), [(False, True), (True, False), (True, True)]
"""Whether x and w lie transposed in memory; of the products of training these are fprop, dgrad, and wgrad."""


functions = fixture_of("integer_mm.h", _functions())


@pytest.fixture(scope="module")
def product(functions: ctypes.CDLL) -> Product:
    def call(x, s, w, t, bias: Tensor | None, dtype: torch.dtype, across: tuple[bool, bool] = ROWS) -> Tensor:
        out = torch.full((len(x), len(w)), 3.0, dtype=dtype)
        sizes = map(integer, (len(x), len(w), x.shape[1], *map(int, across)))
        sides = zip(
            (x.view(torch.uint8), s, w.view(torch.uint8), t), (across[0], *across, across[1]), strict=True
        )
        laid_out = [part.t().contiguous() if is_across else part for part, is_across in sides]
        getattr(functions, f"mm_{TYPES[dtype]}")(*map(pointer, (*laid_out, bias)), *sizes, pointer(out))
        return out

    return call


def many_rows(functions: ctypes.CDLL, x: Tensor, w: Tensor, t: Tensor, bias: Tensor) -> Tensor:
    """Rows of BF16 times rows of codes `w` with scales `t`, in the dtype of `bias`."""
    out = torch.full((len(x), len(w)), 3.0, dtype=bias.dtype)
    sizes = [integer(size) for size in (len(x), len(w), x.shape[1])]
    parts = (x, w.view(torch.uint8), t, bias)
    getattr(functions, f"many_{TYPES[bias.dtype]}")(*map(pointer, parts), *sizes, pointer(out))
    return out


def operand(rows: int, k: int, least: int, most: int) -> tuple[Tensor, Tensor]:
    """Codes, −128 among them, and scale bytes from `least` to `most`."""
    codes = torch.randint(-128, 128, (rows, k), dtype=torch.int8)
    return codes, torch.randint(least, most + 1, (rows, -(-k // 32)), dtype=torch.uint8)


def values(codes: Tensor, scales: Tensor) -> Tensor:
    numbers = torch.where(scales == 255, torch.nan, torch.exp2(scales.double() - 133))
    return codes.double() * numbers.repeat_interleave(32, 1)[:, : codes.shape[1]]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("scales", [(117, 137), (0, 254)], ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(17, 33, 96), (7, 1, 31), (40, 70, 1100), (1, 5, 64), (1100, 3, 40)]
)
def test_sums_are_within_the_rounding_of_fp32(
    product: Product, m: int, n: int, k: int, scales: tuple[int, int], dtype: torch.dtype
):
    torch.manual_seed(0)
    x, w = operand(m, k, *scales), operand(n, k, *scales)
    bias = torch.randn(n).to(dtype)
    left, right = values(*x), values(*w)
    exact = left @ right.t() + bias.double()
    most = left.abs() @ right.abs().t() + bias.double().abs()
    sums = product(*x, *w, bias, dtype).double()
    rounding = 2.0**-8 if dtype is BF16 else 2.0**-24
    inside = exact.abs() < 3e38
    error = (sums - exact).abs() - rounding * exact.abs() - (k / 32 + 3) * 2.0**-24 * most
    assert bool((error <= 2.0**-126)[inside & (most < 3e38)].all())
    assert not sums[~inside & (exact.abs() > 4e38)].isfinite().any()


INSTRUCTIONS = {
    "avx2": "vpmaddwd",
    "avx2 vnni": "vpdpwssd",
    "neon dot": "sdot",
    "neon bf16 i8mm": "smmla",
}


@pytest.mark.parametrize("form", INSTRUCTIONS)
def test_sums_are_made_by_the_instructions_of_the_form(form: str):
    """Loops would have the same values."""
    code = assembly(form, unit("integer_mm.h", _functions()))
    assert code.count(f"{INSTRUCTIONS[form]}\t") >= 48


def test_sums_of_blocks_are_exact(product: Product):
    """Under one scale FP32 has every sum, so that nothing may be lost."""
    torch.manual_seed(0)
    (x, _), (w, _) = operand(20, 480, 127, 127), operand(37, 480, 127, 127)
    ones = torch.full((37, 15), 127, dtype=torch.uint8)
    sums = product(x, ones[:20], w, ones, None, torch.float32)
    assert torch.equal(sums.double(), values(x, ones[:20]) @ values(w, ones).t())


@pytest.mark.parametrize("across", ACROSS, ids=str)
@pytest.mark.parametrize("scales", [(117, 137), (0, 254)], ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(17, 33, 96), (7, 1, 31), (40, 70, 1100), (1100, 3, 40)])
def test_transposed_operands_give_the_same_bits(
    product: Product, m: int, n: int, k: int, scales: tuple[int, int], across: tuple[bool, bool]
):
    torch.manual_seed(0)
    x, w = operand(m, k, *scales), operand(n, k, *scales)
    rows, transposed = (product(*x, *w, None, torch.float32, layout) for layout in (ROWS, across))
    assert torch.equal(rows.view(torch.int32), transposed.view(torch.int32))


def test_nan_and_zero_blocks_stay_in_their_row(product: Product):
    x, s = torch.ones(18, 64, dtype=torch.int8), torch.full((18, 2), 133, dtype=torch.uint8)
    w, t = torch.ones(40, 64, dtype=torch.int8), torch.full((40, 2), 133, dtype=torch.uint8)
    s[3, 1], t[35, 0] = 255, 255
    x[5, :32], s[5, 0] = 0, 0  # what a cast gives zeros
    output = product(x, s, w, t, None, torch.float32)
    expected = torch.full((18, 40), 64.0)
    expected[5] = 32
    expected[3], expected[:, 35] = torch.nan, torch.nan
    assert torch.equal(output.nan_to_num(-1), expected.nan_to_num(-1))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(17, 33, 512), (7, 1, 1000), (40, 70, 1100), (1100, 3, 545)])
def test_bf16_rows_are_rounded_to_16_bits_of_their_block(
    functions: ctypes.CDLL, m: int, n: int, k: int, dtype: torch.dtype
):
    """Numbers of any size in a block: each may lose 2^-15 of the largest, besides the rounding of sums."""
    torch.manual_seed(0)
    x = (torch.randn(m, k) * torch.exp2(torch.randint(-90, 6, (m, k)).float())).to(BF16)
    x[:, ::32] = torch.randn(m, -(-k // 32)).to(BF16).abs() + 1
    w, bias = operand(n, k, 117, 137), torch.randn(n).to(dtype)
    right = values(*w)
    blocks = torch.nn.functional.pad(x.double(), (0, -k % 32)).reshape(m, -1, 32)
    largest = blocks.abs().amax(-1, keepdim=True).expand_as(blocks).reshape(m, -1)[:, :k]
    exact, most = x.double() @ right.t() + bias, x.double().abs() @ right.abs().t() + bias.double().abs()
    rounding = 2.0**-8 if dtype is BF16 else 2.0**-24
    allowed = rounding * exact.abs() + (k / 32 + 3) * 2.0**-24 * most + 2.0**-15 * largest @ right.abs().t()
    error = (many_rows(functions, x, *w, bias).double() - exact).abs()
    assert bool((error <= allowed).all())


def test_bf16_rows_that_mxint8_has_are_exact(functions: ctypes.CDLL):
    torch.manual_seed(0)
    x, (w, _) = torch.randint(-127, 128, (20, 600)), operand(37, 600, 127, 127)
    ones = torch.full((37, 19), 127, dtype=torch.uint8)
    sums = many_rows(functions, x.to(BF16), w, ones, torch.zeros(37))
    assert torch.equal(sums.double(), x.double() @ values(w, ones).t())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2.0**100, 2.0**-120])
def test_bf16_rows_with_a_block_that_has_no_integers(functions: ctypes.CDLL, value: float):
    x, ones = torch.ones(18, 512, dtype=BF16), torch.full((40, 16), 127, dtype=torch.uint8)
    x[5, 32:64] = value
    sums = many_rows(functions, x, torch.full((40, 512), 64, dtype=torch.int8), ones, torch.zeros(40))
    expected = torch.full((18, 40), 512.0)
    expected[5] = 480.0 + 32 * value
    assert torch.equal(sums.nan_to_num(-1), expected.nan_to_num(-1))


def set_target(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    """Makes this machine a CPU that multiplies MXINT8 in integers, or for `reason` does not."""
    reasons = {BF16: reason} if reason else {}
    pretend_cpu(
        monkeypatch, integers="AVX-512 VNNI", no_integers=reasons, many_rows="", slow_dtypes=frozenset()
    )


def assert_near(results: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    for ours, plain in zip(results, expected, strict=True):
        assert (plain - ours).norm() < 1e-2 * plain.norm()


@pytest.mark.parametrize("dynamic", [False, True])
def test_many_rows_of_a_stored_weight_run_in_integers(dynamic: bool, monkeypatch: pytest.MonkeyPatch):
    """The model's values are those of the products of dequantized operands; few rows read the codes alone."""
    model = FeedForward(160, 330).bfloat16()
    rows = (70, 41) if dynamic else (70,)
    xs = [torch.randn(count, 160, dtype=BF16) for count in rows]
    mxcompile.quantize_weights_(model, POLICY, args=(xs[0],))
    outputs = {}
    for reason in ("another is faster", ""):
        set_target(monkeypatch, reason)
        torch._dynamo.reset()
        with torch.no_grad():
            compiled = torch.compile(model, backend="mxfp8", dynamic=dynamic, options={"policy": POLICY})
            outputs[reason] = [compiled(x).float() for x in xs]
        kernels = {gemm.kernel.removeprefix("aten.") for gemm in mxcompile.reports()[-1].gemms}
        dequantized = {f"{name} (bfloat16, dequantized); another is faster" for name in ("mm", "addmm")}
        assert kernels == (dequantized if reason else {"mx_integer_mm C++ (AVX-512 VNNI)"})
    assert_near(*reversed(outputs.values()))


@pytest.mark.parametrize("dynamic", [False, True])
def test_many_rows_of_bf16_run_in_integers_on_avx2(dynamic: bool, monkeypatch: pytest.MonkeyPatch):
    """A weight in MXINT8 whose activations stay in BF16; short rows keep FP32 products of the vendor."""
    torch.manual_seed(0)
    model = FeedForward(600, 330).bfloat16()
    xs = [torch.randn(count, 600, dtype=BF16) for count in ((70, 41) if dynamic else (70,))]
    mxcompile.quantize_weights_(model, POLICY, args=(xs[0],))
    slow = frozenset({BF16, torch.float16})
    pretend_cpu(monkeypatch, integers="AVX2", no_integers={}, many_rows=INT16, slow_dtypes=slow)
    monkeypatch.setattr(kernel, "instructions", lambda: {"avx2"})
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, backend="mxfp8", dynamic=dynamic, options={"policy": "bf16"})
        outputs = [compiled(x).float() for x in xs]
        eager = [model(x).float() for x in xs]
    kernels = [gemm.kernel for gemm in mxcompile.reports()[-1].gemms]
    assert kernels == ["mx_weight_only_mm C++ (int16)"] * 2 + ["aten.addmm (float32)"]
    assert_near(outputs, eager)


@pytest.mark.parametrize("picked", [False, True], ids=["all rows", "rows that a mask picks"])
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_products_of_training_run_in_integers(picked: bool, monkeypatch: pytest.MonkeyPatch):
    """Gradients and outputs are those of the products of dequantized operands.

    Of an unknown number of rows, only the gradient of the weight has the integers.
    """
    model, x = FeedForward(160, 330).bfloat16(), torch.randn(70, 160, dtype=BF16)
    mask = torch.rand(70) > 0.2
    results = {}
    for reason in ("another is faster", ""):
        set_target(monkeypatch, reason)
        torch._dynamo.reset()
        model.zero_grad()
        x = x.detach().requires_grad_()
        call = (lambda x: model(x[mask])) if picked else model
        out = torch.compile(call, backend="mxfp8", options={"policy": "mxint8"}, fullgraph=True)(x)
        out.square().mean().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        results[reason] = [tensor.float() for tensor in (out.detach(), x.grad, *gradients)]
        kernels = {gemm.gemm: gemm.kernel for gemm in mxcompile.reports()[-1].gemms}
        assert set(kernels) == {"fprop", "dgrad", "wgrad"}
        integers = {gemm for gemm, name in kernels.items() if name.startswith("mx_integer_mm C++")}
        assert integers == (set() if reason else {"wgrad"} if picked else set(kernels)), kernels
    assert_near(*reversed(results.values()))
