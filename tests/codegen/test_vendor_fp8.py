"""Products put on `_scaled_mm`: layouts, scales and results, on the CPU's form of that operator."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from mxcompile import ops
from mxcompile.graph.tags import GemmTag, Kind, set_tag, tags_of
from mxcompile.lowering.graph.vendor_fp8 import VendorFP8
from mxcompile.lowering.targets import TARGETS
from mxcompile.policy import Gemm

CHIP = dataclasses.replace(TARGETS["cpu"], fp8_tiles=frozenset({"tensor", "channel"}))
TAG = GemmTag(
    layer="l", name="l", module="Linear", source="", gemm=Gemm.FPROP, kind=Kind.LINEAR, tensors=("x", "w")
)


def applied(function, *inputs):
    """The graph of `function` with its products on the vendor's GEMM, and why others are not."""
    module = make_fx(function, tracing_mode="fake")(*inputs)
    for node in module.graph.find_nodes(op="call_function", target=ops.encoded_mm):
        set_tag(node, TAG)
    reasons = VendorFP8(target=CHIP, device="cpu").apply(module.graph)
    module.graph.lint()
    module.recompile()
    return module, list(reasons.values())


def product(x, w, word, bias=None, left_swapped=False, right_swapped=False, dtype=torch.bfloat16):
    """x · w, each cast along the contraction, in the memory layout asked for."""
    a, sa = ops.encode(x.t().contiguous(), -2, word) if left_swapped else ops.encode(x, -1, word)
    b, sb = ops.encode(w.t().contiguous(), -1, word) if right_swapped else ops.encode(w, -2, word)
    a, sa = (a.t(), sa.t()) if left_swapped else (a, sa)
    b, sb = (b.t(), sb.t()) if right_swapped else (b, sb)
    return ops.encoded_mm(a, sa, b, sb, bias, dtype, word, word)


@pytest.mark.parametrize("right_swapped", [False, True])
@pytest.mark.parametrize("left_swapped", [False, True])
@pytest.mark.parametrize("word", ["e4m3 tensor nearest", "e4m3 channel nearest"])
def test_values_and_layouts(word: str, left_swapped: bool, right_swapped: bool):
    gen = torch.Generator().manual_seed(1)
    x = torch.randn(40, 64, generator=gen) * torch.exp2(torch.randint(-9, 9, (40, 1), generator=gen).float())
    w = torch.randn(64, 48, generator=gen) * torch.exp2(torch.randint(-9, 9, (1, 48), generator=gen).float())

    def function(x, w):
        return product(x, w, word, None, left_swapped, right_swapped)

    module, reasons = applied(function, x, w)
    assert reasons == []
    (node,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten._scaled_mm.default)
    left, right = (argument.meta["val"] for argument in node.args[:2])
    assert (left.stride(), right.stride()) == ((64, 1), (1, 64))
    assert [tag.kernel for tag in tags_of(node)] == [f"aten._scaled_mm ({word.split()[1]} scales)"]
    torch.testing.assert_close(module(x, w), function(x, w), rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "word", "dtype", "said"),
    [
        ((40, 60, 48), "e4m3 tensor nearest", torch.bfloat16, "takes multiples of 16 (k=60)"),
        ((40, 64, 50), "e4m3 channel nearest", torch.bfloat16, "takes multiples of 16 (n=50)"),
        ((0, 64, 48), "e4m3 tensor nearest", torch.bfloat16, "(empty)"),
        ((40, 64, 48), "e5m2 tensor nearest", torch.bfloat16, "no E5M2 on the right"),
        ((40, 64, 48), "e4m3 channel nearest", torch.float32, "gives BF16"),
        ((40, 128, 128), "e4m3 1x128 nearest", torch.bfloat16, "no FP8 GEMM of cpu for scales 1x128"),
    ],
)
def test_what_it_does_not_take_has_a_reason(shape, word: str, dtype: torch.dtype, said: str):
    m, k, n = shape
    module, (reason,) = applied(
        lambda x, w: product(x, w, word, dtype=dtype), torch.randn(m, k), torch.randn(k, n)
    )
    assert said in reason
    assert module.graph.find_nodes(op="call_function", target=ops.encoded_mm)


def test_other_formats_have_none():
    _, reasons = applied(
        lambda x, w: product(x, w, "e2m1 1x32 rceil"), torch.randn(40, 64), torch.randn(64, 48)
    )
    assert reasons == []
