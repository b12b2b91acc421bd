"""Formats that an MX GEMM multiplies though they are not MXFP8: the same values, by its own instruction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.casts import encode
from helpers.graphs import calls, lowered, traced
from helpers.policies import every
from helpers.reference import sqnr_db
from helpers.spread import spread
from interpreted import interpret
from torch import Tensor, nn
from torch.library import opcheck

import mxcompile
from mxcompile import ops
from mxcompile.formats import E4M3, E5M2, ElemType, Format
from mxcompile.formats.elements import E2M1, E2M3, E3M2, INT8
from mxcompile.formats.encoding import decode_tensors, encode_tensors
from mxcompile.lowering.graph.promote_to_mx import PromoteToMX
from mxcompile.lowering.targets import TARGETS
from mxcompile.ops.view import Product

BLOCKS = "e4m3 1x128 pow2", "e4m3 128x128 pow2"


def values(elem: ElemType) -> set[float]:
    """Every finite value of `elem`, from its definition."""
    steps = range(2**elem.mantissa_bits)
    small = {step * 2.0 ** (elem.min_exponent - elem.mantissa_bits) for step in steps}
    normal = {
        (1 + step / len(steps)) * 2.0**exponent
        for step in steps
        for exponent in range(elem.min_exponent, elem.emax + 1)
    }
    return {value for value in small | normal if value <= elem.max}


def test_which_elements_are_values_of_which():
    elems = [E4M3, E5M2, E3M2, E2M3, E2M1, INT8]
    for elem in elems:
        for other in elems:
            assert elem.is_in(other) == (values(elem) <= values(other)), (elem, other)


@pytest.mark.parametrize(
    ("word", "elem"),
    [
        ("e2m1 1x32 rceil", E4M3),
        ("e5m2 1x64 floor", E5M2),
        ("e4m3 128x128 pow2", E4M3),
        ("e4m3 1x128 nearest", None),
        ("e4m3 1x16 rceil", None),
        ("int8 1x32 rceil", None),
        ("e4m3 channel pow2", None),
        ("e4m3 tensor pow2", None),
    ],
)
def test_format_with_power_of_two_scales_has_an_mx_element(word: str, elem: ElemType | None):
    assert Format.parse(word).mx_elem is elem


def by_blocks(*shape: int, along: int) -> Tensor:
    """Magnitudes over 40 binades, by blocks of 32 along a dimension of the matrix."""
    return spread(*shape, binades=20, tile=(1, 32) if along == -1 else (32, 1))


def applied(function: Any, *inputs: Tensor, target: str = "sm_100") -> torch.fx.GraphModule:
    module, _ = lowered([PromoteToMX], target, traced(function, *inputs))
    return module


@pytest.mark.parametrize("target", ["sm_100", "gfx950"])  # tiled scales, and row-major ones
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(
    "words",
    [
        BLOCKS,
        ("e5m2 1x128 pow2", "e4m3 1x128 pow2"),
        ("e4m3 1x64 rceil", "e4m3 1x64 even"),
        ("e2m1 1x32 rceil", "e2m1 1x32 floor"),
        ("e3m2 1x32 ceil", "e2m3 1x32 rceil"),
        ("e4m3 1x32 rceil percentile:95", "e4m3 32x32 rceil"),
    ],
)
def test_products_have_the_same_values(words: tuple[str, str], swapped: bool, target: str):
    x, w = by_blocks(70, 300, along=-1), by_blocks(300, 50, along=-2)
    x[3, 5], x[4] = torch.nan, 0.0

    def function(x: Tensor, w: Tensor) -> Tensor:
        a, sa = encode(x, -1, words[0])
        b, sb = encode(w.t().contiguous(), -1, words[1]) if swapped else encode(w, -2, words[1])
        b, sb = (b.t(), sb.t()) if swapped else (b, sb)
        return ops.matmul(a, sa, b, sb, None, torch.float32, *words)

    module = applied(function, x, w, target=target)
    (product,) = calls(module, ops.matmul)
    assert Product.read(product).is_mx
    a, sa, b, sb = (node.meta["val"] for node in product.args[:4])
    assert {a.dtype, b.dtype} <= {E4M3.dtype, E5M2.dtype}
    assert {sa.ndim, sb.ndim} == {1 if target == "sm_100" else 2}
    computed, wanted = module(x, w), function(x, w)
    assert wanted[3].isnan().all()
    assert torch.equal(computed.nan_to_num(7.0), wanted.nan_to_num(7.0))


def test_groups_and_batches_have_the_same_values():
    x, w = by_blocks(48, 96, along=-1), by_blocks(3, 96, 64, along=-2)
    offs = torch.tensor([10, 20, 48], dtype=torch.int32)
    word = "e2m1 1x32 rceil"

    def groups(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
        (a, sa), (b, sb) = encode(x, -1, word), encode(w, -2, word)
        return ops.grouped_matmul(a, sa, b, sb, offs, torch.float32, word, word)

    def batch(x: Tensor, w: Tensor) -> Tensor:
        (a, sa), (b, sb) = encode(x.view(3, 16, 96), -1, BLOCKS[0]), encode(w, -2, BLOCKS[1])
        return ops.matmul(a, sa, b, sb, None, torch.float32, *BLOCKS)

    for function, inputs in ((groups, (x, w, offs)), (batch, (x, w))):
        module = applied(function, *inputs)
        assert torch.equal(module(*inputs), function(*inputs))
        (product,) = filter(None, map(Product.from_node, module.graph.nodes))
        assert product.is_mx


NO_INTEGERS = ["no kernel multiplies INT8 under E8M0 scales"]
INTEGERS = [("int8 1x32 rceil",) * 2, ("e4m3 1x32 rceil", "int8 1x32 rceil")]


@pytest.mark.parametrize(
    ("target", "words", "expected"),
    [
        ("sm_100", ("e4m3 1x128 nearest", "e4m3 128x128 nearest"), []),
        ("sm_100", ("e4m3 1x16 rceil",) * 2, []),
        ("gfx950", ("e2m1 1x16 two-level",) * 2, []),  # the pass `packed` gives its reason
        *((target, words, NO_INTEGERS) for words in INTEGERS for target in ("sm_100", "sm_120", "gfx950")),
    ],
)
def test_formats_that_mxfp8_cannot_hold_are_not_promoted(
    target: str, words: tuple[str, str], expected: list[str]
):
    def function(x: Tensor, w: Tensor, amax: Tensor) -> Tensor:
        several = [amax, amax] if "two-level" in words[0] else None
        (a, sa), (b, sb) = (
            encode(side, dim, word, None, 0, None, amax if several else None)
            for side, dim, word in ((x, -1, words[0]), (w, -2, words[1]))
        )
        return ops.matmul(a, sa, b, sb, None, torch.float32, *words, several)

    module = traced(function, torch.randn(32, 128), torch.randn(128, 32), torch.ones(1))
    (product,) = calls(module, ops.matmul)
    _, reasons = lowered([PromoteToMX], target, module)
    assert reasons == expected
    assert calls(module, ops.matmul) == [product]
    assert Product.read(product).words == words


@pytest.mark.parametrize("layout", ["row-major", "128x4"])
@pytest.mark.parametrize("word", [BLOCKS[1], "e4m3 1x64 rceil", "e2m1 1x32 rceil"])
@pytest.mark.parametrize("shape", [(40, 70), (300, 130), (1, 1)])
def test_scale_bytes_operator_passes_opcheck(shape: tuple[int, int], word: str, layout: str):
    for dim in (-1, -2):
        qdata, scale = encode(torch.randn(shape), dim, word)
        opcheck(ops.scale_bytes, (scale, qdata.view(torch.uint8), dim, word, layout))
    qdata, scale = encode(torch.ones(0, 5), -1, word)
    assert ops.scale_bytes(scale, qdata, -1, word, layout).numel() == 0


USES: dict[str, Any] = {
    "blocks": {"precision": "fp8", "scaling": "block", "scale": "pow2"},
    "mxfp4": "mxfp4",
    "mxfp6": "mxfp6_e2m3",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "name", "mma"),
    [
        ("sm_100", "blocks", "tcgen05.mma"),
        ("sm_100", "mxfp4", "tcgen05.mma"),
        ("gfx950", "mxfp6", "v_mfma_scale"),
    ],
)
def test_promoted_products_run_the_native_instruction(target: str, name: str, mma: str, tmp_path: Path):
    """On the chip's own instruction, without spills; what is quick to interpret computes the same."""
    policy = mxcompile.Policy.from_dict(every(USES[name], preset="bf16"))
    layer = nn.Linear(144, 80, dtype=torch.bfloat16)
    w, bias, x = layer.weight.detach(), layer.bias.detach(), by_blocks(48, 144, along=-1).to(torch.bfloat16)
    x_leaf = x.clone().requires_grad_()
    result = mxcompile.codegen(layer, x_leaf, target=target, policy=policy, out_dir=tmp_path)
    assert not result.problems
    products = [result.kernel(launch) for launch in result.launches if launch.gemms]
    assert len(products) == len(result.report.gemms) == 3
    for kernel in products:
        assert any(instruction.startswith(mma) for instruction in kernel.binary.mma)
        assert not any(instruction.endswith("kind::f16") for instruction in kernel.binary.mma)
        assert kernel.binary.spill_bytes == 0
    assert all(TARGETS[target].mma in gemm.kernel for gemm in result.report.gemms)
    if name != "blocks":
        return
    use = policy.rules[0].use
    assert use.fprop is not None
    forms = use.fprop.formats(use)

    def product(a: Tensor, b: Tensor, form_a: Format, form_b: Format) -> Tensor:
        sides = zip((a, b), (-1, -2), (form_a, form_b), strict=True)
        left, right = (
            decode_tensors(*encode_tensors(side, dim, form), dim, form, torch.float32)
            for side, dim, form in sides
        )
        return left @ right

    dy = torch.randn(48, 80).to(torch.bfloat16)
    wanted = (
        product(x, w.t(), forms.x, forms.w) + bias.float(),
        product(dy.t(), x, forms.dy, forms.x),
        dy.float().sum(0),
        product(dy, w, forms.dy, forms.w),
    )
    gradients = interpret(tmp_path, [w, bias, x], dy)
    for expected, computed in zip(wanted, gradients, strict=True):
        assert sqnr_db(expected, computed) > 45  # rounded to BF16
