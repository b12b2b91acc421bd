"""The C++ casts in every form this machine can run, bit for bit against the definition."""

from __future__ import annotations

import ctypes
import platform
import re
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from cpp_forms import assembly, exported, fixture_of, integer, pointer, unit
from helpers.bits import assert_same_bits, same_bits
from helpers.casts import encode, quantize, values
from helpers.policies import every
from torch import Tensor, nn
from torch._inductor import config, cpp_builder
from torch._inductor.utils import run_and_get_code

import mxcompile
from mxcompile import ops
from mxcompile.formats import Rounding, stored_form
from mxcompile.formats.encoding import decode_tensors
from mxcompile.lowering.cpu import kernel
from mxcompile.lowering.graph import pipeline
from mxcompile.lowering.inductor import copies as copies  # registers the lowerings
from mxcompile.lowering.inductor import decode as decode
from mxcompile.lowering.targets import TARGETS

ELEMS = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2, "INT8": torch.int8}

SOURCES = {"Bfloat16": torch.bfloat16, "float": torch.float32}


def decoded(codes: Tensor, scales: Tensor, dim: int, elem: str, dtype: torch.dtype) -> Tensor:
    """The values of stored elements, by the definition."""
    if elem == "E2M1":
        return ops.decode(codes, scales, dim, "e2m1 1x32 rceil packed", dtype)
    form = stored_form(ELEMS[elem])
    return decode_tensors(codes.view(form.elem.dtype), scales, dim, form, dtype)


def _functions() -> Iterator[str]:
    sizes = "int64_t number, int64_t m, int64_t n"
    for elem, source, rounding in product(ELEMS, SOURCES, Rounding):
        arguments = f"const {source}* x, {sizes}, Results<{source}> a, Results<{source}> b"
        cast = f"Cast<{elem}, Rounding::{rounding}, {source}, {source}>"
        for name, call in (
            ("both", "matrices<false>(x, number, m, n, 2, a, b)"),
            ("square", "matrices<true>(x, number, m, n, 2, a, b)"),
            ("rows", "rows(x, number * m, n, 2, b)"),
        ):
            yield exported(f"{name}_{elem}_{source}_{rounding}", arguments, f"{cast}::{call};")
    for elem, source in product((*ELEMS, "E2M1", "NVFP4"), SOURCES):
        back = f"const uint8_t* q, const uint8_t* s, const float* g, {sizes}, {source}* v"
        body = f"dequantize_rows(Weight<{elem}>{{q, s, n, g, 1}}, number * m, 2, v);"
        yield exported(f"rows_back_{elem}_{source}", back, body)
        if elem != "NVFP4":
            body = f"dequantize_columns<{elem}>(q, s, number, m, n, 2, v);"
            yield exported(f"columns_back_{elem}_{source}", back, body)


functions = fixture_of("casts.h", _functions())


class _Forms:
    """The compiled functions, called with tensors."""

    def __init__(self, functions: Any) -> None:
        self._library = functions

    def cast(self, name: str, x: Tensor, elem: str, rounding: str) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Values, codes and scales along columns, then along rows."""
        number, m, n = x.shape
        source = next(word for word, dtype in SOURCES.items() if dtype is x.dtype)
        copies = []
        for shape in ((number, -(-m // 32), n), (number, m, -(-n // 32))):
            codes = torch.zeros_like(x, dtype=torch.uint8)
            copies.append((torch.zeros_like(x), codes, torch.zeros(shape, dtype=torch.uint8)))
        structs = [_Results(*map(pointer, pointers)) for pointers in copies]
        if name == "square":
            structs[1] = _Results(pointer(None), pointer(None), pointer(copies[1][2]))
        function = getattr(self._library, f"{name}_{elem}_{source}_{rounding}")
        function(pointer(x), *map(integer, x.shape), *structs)
        return copies

    def back(
        self,
        form: str,
        codes: Tensor,
        scales: Tensor,
        elem: str,
        dtype: torch.dtype,
        shape: tuple[int, ...] = (),
        whole: Tensor | None = None,
    ) -> Tensor:
        source = next(word for word, source_dtype in SOURCES.items() if source_dtype is dtype)
        values = torch.zeros(shape or codes.shape, dtype=dtype)
        function = getattr(self._library, f"{form}_back_{elem}_{source}")
        parts = map(pointer, (codes, scales, whole))
        function(*parts, *map(integer, values.shape), pointer(values))
        return values


class _Results(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("values", "codes", "scales")]


@pytest.fixture(scope="module")
def forms(functions: Any) -> _Forms:
    return _Forms(functions)


def sources(dtype: torch.dtype) -> Iterator[Tensor]:
    """Every BF16 value by neighbours, whole binades in a block, wild bits with NaN and Inf, odd sizes."""
    torch.manual_seed(0)
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[every.isfinite()].view(1, -1, 510).to(dtype)
    yield every.contiguous()
    yield every.mT.contiguous()
    integers = torch.int16 if dtype is torch.bfloat16 else torch.int32
    info = torch.iinfo(integers)
    wild = torch.randint(info.min, info.max, (3, 70, 330), dtype=integers).view(dtype)
    yield torch.where(wild.isfinite() | (torch.rand(wild.shape) < 0.002), wild, torch.ones((), dtype=dtype))
    binades = torch.exp2(torch.randint(-130, 120, (2, 33, 1)).float())
    yield (torch.randn(2, 33, 97) * binades).to(dtype)
    yield (torch.randn(1, 1, 31) * torch.tensor([0.0, -0.0, 1.0])[torch.randint(3, (1, 1, 31))]).to(dtype)


def check(copies: tuple[Tensor, Tensor, Tensor], x: Tensor, dim: int, elem: str, rounding: str, square: bool):
    values, codes, scales = copies
    if elem == "INT8":
        qdata, expected = encode(x, dim, f"int8 1x32 {rounding}")
    else:
        qdata, expected = quantize(x, dim, ELEMS[elem], rounding, square)
    assert torch.equal(scales, expected)
    assert same_bits(codes.view(ELEMS[elem]), qdata)
    assert same_bits(values, decoded(qdata, expected, dim, elem, x.dtype))


@pytest.mark.parametrize("rounding", list(Rounding))
@pytest.mark.parametrize("elem", ELEMS)
@pytest.mark.parametrize("dtype", SOURCES.values(), ids=str)
def test_casts_of_every_instruction_set_equal_reference(
    forms: _Forms, dtype: torch.dtype, elem: str, rounding: str
):
    for x in sources(dtype):
        down, along = forms.cast("both", x, elem, rounding)
        check(down, x, -2, elem, rounding, False)
        check(along, x, -1, elem, rounding, False)
        check(forms.cast("rows", x, elem, rounding)[1], x, -1, elem, rounding, False)
        if elem == "INT8":  # loops make its square tiles
            continue
        down, along = forms.cast("square", x, elem, rounding)
        check(down, x, -2, elem, rounding, True)
        check((*down[:2], along[2]), x, -1, elem, rounding, True)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the compiler is one for x86-64")
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("elem", ELEMS)
def test_loops_over_elements_are_vectors_in_avx2(elem: str, source: str):
    """Which takes an option that Inductor's options turn off."""
    cast = f"Cast<{elem}, Rounding::rceil, {source}, {source}>"
    signature = f"const {source}* x, const float* inverse, {source}* values, uint8_t* codes"
    body = f"{cast}::write_values(x, 256, inverse, inverse, values);"
    body += f" {cast}::write_codes(x, 256, inverse, codes);"
    instructions = assembly("avx2", unit("casts.h", [exported("f", signature, body)]))
    assert re.search(r"vmulps.*%ymm", instructions)
    assert "vmulss" not in instructions


@pytest.mark.parametrize("elem", [*ELEMS, "E2M1"])
@pytest.mark.parametrize("dtype", SOURCES.values(), ids=str)
def test_every_code_under_every_scale(forms: _Forms, dtype: torch.dtype, elem: str):
    """Along rows and columns, in whole blocks and short ones; of packed codes every pair."""
    every = torch.arange(256, dtype=torch.uint8)
    for num_bytes in (256, 214):
        codes = every[:num_bytes].expand(1, 256, num_bytes).contiguous()
        width = num_bytes * (2 if elem == "E2M1" else 1)
        scales = every[None, :, None].expand(1, 256, -(-width // 32)).contiguous()
        for form, dim in (("rows", -1), ("columns", -2)):
            if dim == -2:
                codes, scales = codes.mT.contiguous(), scales.mT.contiguous()
            expected = decoded(codes, scales, dim, elem, dtype)
            assert same_bits(forms.back(form, codes, scales, elem, dtype, tuple(expected.shape)), expected)


@pytest.mark.parametrize("width", [512, 472])
@pytest.mark.parametrize("dtype", SOURCES.values(), ids=str)
def test_every_pair_of_packed_codes_under_every_scale_of_two_levels(
    forms: _Forms, dtype: torch.dtype, width: int
):
    """Rows have global scales of their own, some of which leave subnormal numbers or infinite ones."""
    every = torch.arange(256, dtype=torch.uint8)
    codes = every[: width // 2].expand(1, 256, width // 2).contiguous()
    scales = every[None, :, None].expand(1, 256, -(-width // 16)).contiguous()
    for power in (0, 7, -120, 120, 127):
        whole = torch.full((256, 1), 1.7 * 2.0**power)
        stored = codes[0], scales[0].view(torch.float8_e4m3fn), -1, "e2m1 1x16 two-level packed"
        (expected,) = [ops.decode(*stored, dtype, None, whole)]
        read_back = forms.back("rows", codes, scales, "NVFP4", dtype, (1, *expected.shape), whole)
        assert same_bits(read_back[0], expected)


@pytest.mark.parametrize("width", [64, 200])
@pytest.mark.parametrize("elem", ELEMS)
def test_neighbours_have_scales_of_their_own(forms: _Forms, elem: str, width: int):
    """Ordinary scales and those at the ends of the range side by side, and rows that end within a block."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(256, (1, 500, width), dtype=torch.uint8, generator=generator)
    scales = torch.randint(256, (1, 500, -(-width // 32)), dtype=torch.uint8, generator=generator)
    scales[:, :300] = scales[:, :300] % 3 * 20 + 100
    expected = decoded(codes, scales, -1, elem, torch.bfloat16)
    assert same_bits(forms.back("rows", codes, scales, elem, torch.bfloat16), expected)


@pytest.mark.parametrize(("word", "cpp_wrapper"), [("e4m3", False), ("e4m3", True), ("int8", False)])
def test_both_layouts_of_a_matrix_are_one_kernel(word: str, cpp_wrapper: bool):
    """Whatever they give, after a producer, for any number of tokens, called from Python or C++."""

    def casts(x: Tensor) -> tuple[Tensor, ...]:
        x = x.relu() - x
        (value,) = ops.cast(x, [f"{word} 1x32 rceil @-1 bfloat16"])
        return value, *encode(x, -2, f"{word} 1x32 rceil")

    compiled = torch.compile(casts, fullgraph=True, dynamic=True, options={"cpp_wrapper": cpp_wrapper})
    x = torch.randn(40, 100, dtype=torch.bfloat16)
    _, (code,) = run_and_get_code(compiled, x)
    assert len(re.findall(r"Cast<.*>::[\w<>]+\(re", code)) == 1
    for other in (x, torch.randn(65, 100, dtype=torch.bfloat16)):
        assert_same_bits(compiled(other), casts(other))


@pytest.mark.parametrize("cpp_wrapper", [False, True])
def test_casts_to_all_results_of_several_shapes_share_one_kernel(cpp_wrapper: bool):
    """Sizes and the choice of results are arguments: a C++ compiler starts once for all casts."""

    def results(x: Tensor, dim: int) -> list[Tensor]:
        value = values(x, dim, torch.float8_e4m3fn, "rceil", False, torch.bfloat16)
        return [value, *encode(x + 1, dim, "e4m3 1x32 rceil")]

    def casts(*xs: Tensor) -> list[Tensor]:
        a, b, c, d, e, f, g = xs
        along_both = [*results(a, -1), *results(a, -2), *results(b, -1), *results(b, -2), *results(g, -2)]
        along_either = [*results(c, -2), *results(d, -2), *results(e, -1), *results(f, -3)]
        return [*along_both, *encode(g, -1, "e4m3 1x32 rceil"), *along_either]

    shapes = ((33, 70), (2, 40, 100), (70, 33), (64, 64), (50,), (2, 33, 5), (3, 70))
    xs = [torch.randn(*shape).bfloat16() for shape in shapes]
    compiled = torch.compile(casts, fullgraph=True, dynamic=False, options={"cpp_wrapper": cpp_wrapper})
    outputs, (code,) = run_and_get_code(compiled, *xs)
    assert len(re.findall(r"Cast<.*>::[\w<>]+\(re", code)) == 1
    assert_same_bits(outputs, casts(*xs))


def test_where_there_can_be_no_kernels(monkeypatch: pytest.MonkeyPatch):
    assert kernel.obstacle() == ""
    with config.patch(cpu_backend="triton"):
        assert kernel.obstacle() == "no C++ kernels: Inductor generates triton for CPUs"
    with config.patch("cpp.enable_unsafe_math_opt_flag", True):
        assert "enable_unsafe_math_opt_flag is set" in kernel.obstacle()
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", lambda: "/nowhere/g++")
    monkeypatch.setattr(kernel, "_no_compiler", kernel._no_compiler.__wrapped__)
    assert kernel.obstacle() == "no C++ compiler: /nowhere/g++ is not found"


def test_unsafe_math_flags_are_disabled_with_a_message(caplog: pytest.LogCaptureFixture):
    settings = {"cpp.enable_unsafe_math_opt_flag": True}
    with config.patch(settings), config.patch(pipeline.config_patches(TARGETS["cpu"], "", print, settings)):
        flags = cpp_builder._get_ffast_math_flags()
    written = {*" -".join(flags).replace(" -", " ").split()}
    assert {"fno-unsafe-math-optimizations", "ffp-contract=off"} <= written
    assert caplog.messages == [
        "mxfp8 sets config.cpp.enable_unsafe_math_opt_flag to False for its graphs, because their casts round"
        " by exact additions"
    ]


def test_kernel_that_transposes_two_matrices_keeps_all_elements():
    """GCC 12 for AVX-512 drops most of them without a flag."""
    x = torch.randn(64, 96, dtype=torch.bfloat16).t()

    def transposed(x):
        return x.contiguous(), (-x).contiguous()

    with config.patch("cpp.enable_floating_point_contract_flag", "off"):
        results = torch.compile(transposed, backend="mxfp8")(x)
    assert_same_bits(results, transposed(x))


@pytest.mark.slow
def test_compiled_casts_round_exactly_under_unsafe_math_option():
    """In FP16, for which Inductor's loops cast."""
    layer, x = nn.Linear(40, 24, bias=False).half(), torch.randn(33, 40).half()
    options = {"policy": every("mxfp8"), "inductor": {"cpp.enable_unsafe_math_opt_flag": True}}
    with torch.no_grad():
        output = torch.compile(layer, backend="mxfp8", options=options)(x)
        rows = [mxcompile.quantize(tensor).dequantize(torch.float32) for tensor in (x, layer.weight)]
    torch.testing.assert_close(output, (rows[0] @ rows[1].t()).half(), rtol=2**-10, atol=2**-12)


@pytest.mark.parametrize("sibling", [False, True])
def test_cast_with_given_scales_uses_them(sibling: bool):
    """The kernel computes scales itself, and makes the copies along both dimensions in one pass."""
    rows, columns = "e4m3 1x32 rceil @-1 codes", "e4m3 1x32 rceil @-2 codes"
    x = torch.randn(64, 64)
    (_, scale) = ops.cast(8 * x, [columns])

    def cast(x: Tensor, scale: Tensor) -> list[Tensor]:
        first = ops.cast(x, [rows]) if sibling else []
        return [*first, *ops.cast(x, [columns], None, 0, [scale])]

    assert_same_bits(torch.compile(cast)(x, scale), cast(x, scale))


def test_both_tensors_of_a_cast_use_given_scales():
    """No template for GPUs takes the two tensors here, so that each has loops of its own."""
    x, y, scale = torch.randn(64, 64), torch.randn(64, 64), torch.tensor([[0.037]])

    def cast(x: Tensor, y: Tensor, scale: Tensor) -> list[Tensor]:
        return ops.cast(x, ["e4m3 tensor nearest @-1 codes"], None, 0, [scale], None, y)

    assert_same_bits(torch.compile(cast)(x, y, scale), cast(x, y, scale))
