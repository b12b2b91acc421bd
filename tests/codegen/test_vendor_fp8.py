"""Products put on `_scaled_mm`: layouts, scales and results, on the CPU's form of that operator."""

from __future__ import annotations

import dataclasses
from typing import ClassVar
from unittest import mock

import pytest
import torch
from helpers.casts import encode
from helpers.graphs import calls, lowered, traced
from helpers.spread import spread
from torch import Tensor

from mxcompile import ops
from mxcompile.graph.tags import tags_of
from mxcompile.lowering import optional
from mxcompile.lowering.graph.vendor_fp8 import VendorFP8
from mxcompile.lowering.targets import TARGETS

CHIP = dataclasses.replace(TARGETS["cpu_bf16"], name="cpu", fp8_tiles=frozenset({"tensor", "channel"}))
HOPPER = dataclasses.replace(CHIP, fp8_tiles=CHIP.fp8_tiles | {"1x128", "128x128"})
FNUZ = dataclasses.replace(CHIP, fp8_fnuz=True)
BLOCKS = "e4m3 1x128 nearest", "e4m3 128x128 nearest"


class Checked(torch.fx.Interpreter):
    """Runs a graph whose `_scaled_mm` does as CUDA's or ROCm's: its checks, then the product in FP64."""

    types: ClassVar[set[torch.dtype]] = {torch.float8_e4m3fn, torch.float8_e5m2}

    def run_node(self, n):
        if n.target is not torch.ops.aten._scaled_mm.default:
            return super().run_node(n)
        a, b, sa, sb, bias, _, dtype, fast = self.fetch_args_kwargs_from_env(n)[0]
        assert not fast
        assert {a.dtype, b.dtype} <= self.types
        assert a.stride()[1] == b.stride()[0] == 1
        assert sa.dtype is sb.dtype is torch.float32
        result = self.scaled(a, sa) @ self.scaled(b.t(), sb.t()).t()
        return (result if bias is None else result + bias.double()).to(dtype)

    def scaled(self, matrix: Tensor, scale: Tensor) -> Tensor:
        """`matrix`, contracted along its rows, in FP64; its scale in one of the layouts that are taken."""
        rows, blocks = matrix.shape[0], -(-matrix.shape[1] // 128)
        if scale.numel() == 1:
            return matrix.double() * scale.double().reshape(1, 1)
        if tuple(scale.shape) == (rows, 1) and blocks > 1:
            assert scale.is_contiguous()
            return matrix.double() * scale.double()
        if tuple(scale.shape) == (rows, blocks):
            assert scale.stride()[0] == 1
            assert blocks == 1 or scale.stride()[1] == rows
        else:
            assert tuple(scale.shape) == (-(-rows // 128), blocks)
            assert scale.stride() == (blocks, 1)
            scale = scale.repeat_interleave(128, 0)[:rows]
        return matrix.double() * scale.double().repeat_interleave(128, 1)[:, : matrix.shape[1]]


class CheckedFnuz(Checked):
    types: ClassVar[set[torch.dtype]] = {torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}


def applied(function, *inputs, chip=CHIP):
    """The graph of `function` with its products on the vendor's GEMM, without templates, and the reasons."""
    with mock.patch.object(optional, "obstacle", return_value="no templates"):
        return lowered([VendorFP8], chip, traced(function, *inputs))


def product(x, w, words, bias=None, left_swapped=False, right_swapped=False, dtype=torch.bfloat16):
    """x · w, each cast along the contraction, in the memory layout asked for."""
    words = (words, words) if isinstance(words, str) else words
    sides = []
    for side, dim, word, swapped in zip((x, w), (-1, -2), words, (left_swapped, right_swapped), strict=True):
        parts = encode(side.t().contiguous(), -3 - dim, word) if swapped else encode(side, dim, word)
        sides += [part.t() for part in parts] if swapped else parts
    return ops.matmul(*sides, bias, dtype, *words)


def check(function, *inputs, chip=CHIP, run=None):
    """The graph of `function`, whose products the vendor's GEMM takes, and which has its values."""
    module, reasons = applied(function, *inputs, chip=chip)
    assert reasons == []
    computed = run(module).run(*inputs) if run else module(*inputs)
    torch.testing.assert_close(computed, function(*inputs), rtol=2**-7, atol=1e-4)
    return module


def strides_of_product(module):
    """The one product, and the strides of its operands."""
    (node,) = calls(module, torch.ops.aten._scaled_mm.default)
    return node, tuple(argument.meta["val"].stride() for argument in node.args[:2])


def _cpu_takes_channels() -> bool:
    """Whether this PyTorch multiplies by a scale for each row and each column on a CPU."""
    codes, scale = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(codes, codes.t(), scale, scale.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


CHANNEL = pytest.param(
    "e4m3 channel nearest",
    marks=pytest.mark.skipif(
        not _cpu_takes_channels(), reason="this PyTorch has one scale a tensor on a CPU"
    ),
)


@pytest.mark.parametrize("right_swapped", [False, True])
@pytest.mark.parametrize("left_swapped", [False, True])
@pytest.mark.parametrize("word", ["e4m3 tensor nearest", CHANNEL])
def test_vendor_fp8_product_keeps_values_in_every_layout(word: str, left_swapped: bool, right_swapped: bool):
    x, w = spread(40, 64, binades=9, tile=(1, 64)), spread(64, 48, binades=9, tile=(64, 1))
    module = check(lambda x, w: product(x, w, word, None, left_swapped, right_swapped), x, w)
    node, strides = strides_of_product(module)
    assert strides == ((64, 1), (1, 64))
    assert [tag.kernel for tag in tags_of(node)] == [f"aten._scaled_mm ({word.split()[1]} scales)"]


@pytest.mark.parametrize("right", [False, True])
def test_rows_that_begin_between_multiples_of_16_bytes_are_copied(right: bool):
    """Elements that are a part of a wider matrix, as a weight stored in FP8 may be."""
    word = "e4m3 tensor nearest"
    whole = torch.randn(48, 65).to(torch.float8_e4m3fn)
    half = torch.full((1, 1), 0.5)

    def function(x, whole, scale):
        part = whole[:, :64]
        x_codes, own_scale = encode(x, -1, word)
        sides = (x_codes, own_scale, part.t(), scale) if right else (part, scale, x_codes.t(), own_scale.t())
        return ops.matmul(*sides, None, torch.bfloat16, word, word)

    module = check(function, torch.randn(32, 64), whole, half)
    assert strides_of_product(module)[1] == ((64, 1), (1, 64))


@pytest.mark.parametrize("right_swapped", [False, True])
@pytest.mark.parametrize("left_swapped", [False, True])
@pytest.mark.parametrize("right", ["1x128", "128x128"])
def test_scales_of_blocks_lie_as_the_gemm_reads_them(right: str, left_swapped: bool, right_swapped: bool):
    """Hopper's: [m, k/128] with m innermost; [k/128, n] with n, or [k/128, n/128] with k/128 innermost."""
    x, w = spread(36, 512, binades=20), spread(512, 272, binades=20)
    how = ("e4m3 1x128 nearest", f"e4m3 {right} nearest"), None, left_swapped, right_swapped
    module = check(lambda x, w: product(x, w, *how), x, w, chip=HOPPER, run=Checked)
    assert not calls(module, ops.matmul)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("word", ["e4m3 tensor nearest", "e4m3 channel nearest", "e5m2 tensor nearest"])
def test_elements_with_the_other_bias(word: str, swapped: bool):
    """MI300's: half the value for the same bits. Every code there is, by torch's conversion of its types."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(0.0)
    x = torch.cat([codes.reshape(4, 64), torch.randn(36, 64)])
    x[:, 0] = 448.0  # scale 1: each row has the largest
    how = (word, word.replace("e5m2", "e4m3")), None, swapped, not swapped
    inputs = x, torch.randn(64, 48)
    check(lambda x, w: product(x, w, *how), *inputs, chip=FNUZ, run=CheckedFnuz)


def test_nonfinite_elements_surface_in_fnuz_formats():
    """In elements, under a scale that does not know of it, NaN has a code of its own."""
    form = "e4m3 tensor nearest delayed:1:0"
    scale = torch.ones(1, 1)
    x, w = torch.ones(16, 32), torch.ones(32, 16)
    x[3, 4], x[5, 6] = torch.nan, torch.inf

    def function(x, w, s):
        (a, sa), (b, sb) = encode(x, -1, form, None, 0, s), encode(w, -2, form, None, 0, s)
        return ops.matmul(a, sa, b, sb, None, torch.bfloat16, form, form)

    module, reasons = applied(function, x, w, scale, chip=FNUZ)
    assert reasons == []
    outputs = CheckedFnuz(module).run(x, w, scale)
    assert outputs.isnan().all(1).nonzero().flatten().tolist() == [3, 5]
    assert (outputs[[0, 1, 2, 4]] == 32).all()


def test_scales_of_blocks_need_a_cuda_that_has_them(monkeypatch: pytest.MonkeyPatch):
    inputs = torch.randn(36, 512), torch.randn(512, 256)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    _, (reason,) = applied(lambda x, w: product(x, w, BLOCKS), *inputs, chip=HOPPER)
    assert "from CUDA 12.9 on (this is 12.8)" in reason
    for version in ("12.9", "12.10"):
        monkeypatch.setattr(torch.version, "cuda", version)
        assert applied(lambda x, w: product(x, w, BLOCKS), *inputs, chip=HOPPER)[1] == []


@pytest.mark.parametrize(
    ("shape", "words", "dtype", "cause"),
    [
        ((34, 512, 256), ("e4m3 1x128 nearest",) * 2, torch.bfloat16, "takes multiples of 4 rows (m=34)"),
        ((36, 256, 256), BLOCKS, torch.bfloat16, "multiples of 4 blocks along k (2)"),
        ((40, 60, 48), "e4m3 tensor nearest", torch.bfloat16, "takes multiples of 16 (k=60)"),
        ((40, 64, 50), "e4m3 channel nearest", torch.bfloat16, "takes multiples of 16 (n=50)"),
        ((0, 64, 48), "e4m3 tensor nearest", torch.bfloat16, "(empty)"),
        ((40, 64, 48), "e5m2 tensor nearest", torch.bfloat16, "no E5M2 on the right"),
        ((40, 64, 48), "e4m3 channel nearest", torch.float32, "gives BF16"),
        ((40, 128, 128), "e4m3 1x128 nearest", torch.bfloat16, "no FP8 GEMM of cpu for scales 1x128"),
    ],
)
def test_products_unsupported_by_the_vendor_have_a_reason(shape, words, dtype: torch.dtype, cause: str):
    m, k, n = shape
    inputs, chip = (torch.randn(m, k), torch.randn(k, n)), CHIP if "of cpu" in cause else HOPPER
    module, (reason,) = applied(lambda x, w: product(x, w, words, dtype=dtype), *inputs, chip=chip)
    assert cause in reason
    assert calls(module, ops.matmul)


@pytest.mark.parametrize(
    ("shape", "dtype", "out", "taken"),
    [
        ((48,), torch.bfloat16, torch.bfloat16, True),
        ((1, 48), torch.bfloat16, torch.bfloat16, False),
        ((48,), torch.float32, torch.bfloat16, False),
        ((48,), torch.float32, torch.float32, False),
    ],
    ids=str,
)
def test_a_bias_is_a_vector_of_the_results_half_precision(
    shape: tuple[int, ...], dtype: torch.dtype, out: torch.dtype, taken: bool
):
    inputs = torch.randn(40, 64), torch.randn(64, 48), torch.randn(shape).to(dtype)
    _, reasons = applied(lambda x, w, b: product(x, w, "e4m3 tensor nearest", b, dtype=out), *inputs)
    assert reasons == ([] if taken else ["the FP8 GEMM takes a vector bias in its result's half precision"])


@pytest.mark.parametrize(
    ("target", "word", "others"),
    [
        ("sm_100", "e4m3 1x128 nearest", True),
        ("sm_100", "e4m3 1x128 pow2", False),  # multiplied already
        ("sm_120", "e4m3 channel nearest", False),  # one scale for other blocks than a multiple of 32
    ],
)
def test_reason_names_powers_of_two_where_an_mx_gemm_multiplies_them(target: str, word: str, others: bool):
    inputs = torch.randn(40, 128), torch.randn(128, 128)
    _, (reason,) = applied(lambda x, w: product(x, w, word), *inputs, chip=TARGETS[target])
    assert f"no FP8 GEMM of {target} for scales {word.split()[1]}" in reason
    assert ("multiplies powers of two" in reason) == others


def test_mx_products_have_no_reason_against_the_vendor_gemm():
    inputs = torch.randn(40, 64), torch.randn(64, 48)
    assert applied(lambda x, w: product(x, w, "e2m1 1x32 rceil"), *inputs)[1] == []
