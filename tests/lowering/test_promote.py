"""Products in a dtype that the CPU multiplies slowly: which run in FP32, their values, their records."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import graphs
from helpers.bits import assert_same_bits
from helpers.blocks import FeedForward
from helpers.casts import quantize
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import mxcompile
from mxcompile import ops
from mxcompile.graph import dead
from mxcompile.graph.opsets import aten, packet
from mxcompile.graph.tags import Kind, set_tag, tags_of
from mxcompile.lowering.graph import pipeline
from mxcompile.lowering.graph.promote import Promote
from mxcompile.lowering.targets import TARGETS
from mxcompile.ops.view import Decode

BF16, FP32 = torch.bfloat16, torch.float32
SLOW = TARGETS["cpu_fp32"]
TAG = replace(graphs.TAG, module="", kind=Kind.PRODUCT, tensors=("x", "x"))
PRODUCT_OPERATORS = (aten.mm, aten.bmm, aten._scaled_dot_product_flash_attention_for_cpu)


def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def attention_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    return torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True).sum(), (q, k, v))


def convolution_gradients(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    x, w = (t.detach().requires_grad_() for t in (x, w))
    return torch.autograd.grad((F.conv2d(x, w, padding=1) ** 2).sum(), (x, w))


HEADS = (2, 4, 24, 16)
PRODUCTS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "mm": (torch.mm, ((5, 70), (70, 9))),
    "transposed": (lambda a, b: a @ b.t(), ((5, 70), (9, 70))),
    "addmm": (torch.addmm, ((9,), (5, 70), (70, 9))),
    "bmm": (torch.bmm, ((3, 5, 70), (3, 70, 9))),
    "baddbmm": (torch.baddbmm, ((3, 5, 9), (3, 5, 70), (3, 70, 9))),
    "mv": (torch.mv, ((5, 70), (70,))),
    "attention": (F.scaled_dot_product_attention, (HEADS, HEADS, HEADS)),
    "attention with a mask": (F.scaled_dot_product_attention, (HEADS, HEADS, HEADS, (24, 24))),
    "attention's gradients": (attention_gradients, (HEADS, HEADS, HEADS)),
    "convolution": (F.conv2d, ((2, 3, 8, 8), (4, 3, 3, 3))),
    "convolution's gradients": (convolution_gradients, ((2, 3, 8, 8), (4, 3, 3, 3))),
}


def captured(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    """The graph of `function`, its products tagged."""
    graph_module = make_fx(function, tracing_mode="fake")(*inputs)
    for node in graph_module.graph.nodes:
        if packet(node) in PRODUCT_OPERATORS:
            set_tag(node, TAG)
    return graph_module


def flat(values: Any) -> list[Tensor]:
    return [values] if isinstance(values, Tensor) else list(values)


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_rounded_once(name: str, dtype: torch.dtype):
    """The result is FP64's within what FP32 sums and one rounding may add, and has the dtype that it had.

    Gradients read results that were rounded before.
    """
    function, shapes = PRODUCTS[name]
    inputs = [randn(*shape, dtype=dtype) for shape in shapes]
    graph_module = captured(function, *inputs)
    Promote(target=SLOW, device="cpu").apply(graph_module.graph)
    graph_module.recompile()
    results = flat(graph_module(*inputs))
    exact = flat(function(*(x.double() for x in inputs)))
    rounding = torch.finfo(dtype).eps / 2
    for result, expected in zip(results, exact, strict=True):
        assert result.dtype is dtype
        before = 4 * rounding if "gradients" in name else 1e-5
        bound = 1.01 * rounding * expected.abs() + before * expected.abs().max()
        assert bool(((result.double() - expected).abs() <= bound).all())
    products = [node for node in graph_module.graph.nodes if packet(node) in PRODUCT_OPERATORS]
    assert all(flat(node.meta["val"])[0].dtype is FP32 for node in products)


@pytest.mark.parametrize("shapes", [((16, 40), (3, 40, 16)), ((40, 16), (16, 24))], ids=["rows", "K"])
def test_grouped_products_in_slow_dtype_run_in_fp32(shapes: tuple[tuple[int, ...], ...]):
    """Experts' products: of groups of rows, and of their gradient's groups along K."""
    a, b = (randn(*shape) for shape in shapes)
    ends = torch.tensor([3, 3, 16], dtype=torch.int32)
    graph_module = make_fx(lambda a, b, ends: torch._grouped_mm(a, b, offs=ends), tracing_mode="fake")(
        a, b, ends
    )
    Promote(target=SLOW, device="cpu").apply(graph_module.graph)
    graph_module.recompile()
    (product,) = graph_module.graph.find_nodes(op="call_function", target=ops.grouped_mm)
    assert product.meta["val"].dtype is FP32
    expected = ops.grouped_mm(a.double(), b.double(), ends)
    result = graph_module(a, b, ends)
    assert result.dtype is BF16
    torch.testing.assert_close(result.double(), expected, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize(
    ("target", "dtype"), [("cpu_bf16", BF16), ("sm_100", BF16), ("cpu_fp32", FP32)], ids=str
)
def test_products_in_fast_dtypes_are_not_promoted(target: str, dtype: torch.dtype):
    graph_module = captured(torch.mm, randn(5, 70, dtype=dtype), randn(70, 9, dtype=dtype))
    before = str(graph_module.graph)
    Promote(target=TARGETS[target], device="cpu").apply(graph_module.graph)
    assert str(graph_module.graph) == before


def test_an_operand_is_widened_once():
    graph_module = captured(lambda x, a, b: (x @ a, x @ b), randn(5, 70), randn(70, 9), randn(70, 9))
    Promote(target=SLOW, device="cpu").apply(graph_module.graph)
    widened = [n for n in graph_module.graph.nodes if n.args[1:] == (FP32,)]
    assert len(widened) == 3


def test_dequantized_operands_are_dequantized_to_fp32():
    codes, scales = quantize(randn(9, 70), -1, torch.float8_e4m3fn, "rceil")
    graph_module = captured(
        lambda x, q, s: x @ ops.decode(q, s, -1, "e4m3 1x32 rceil", BF16).t(), randn(5, 70), codes, scales
    )
    Promote(target=SLOW, device="cpu", promotes=False).apply(graph_module.graph)
    dead.eliminate(graph_module.graph)
    (decode,) = graphs.calls(graph_module, ops.decode)
    assert Decode.read(decode).dtype is FP32
    assert decode.meta["val"].dtype is FP32


def test_promoted_products_have_the_fp32_kernel_in_their_record():
    graph_module = captured(torch.mm, randn(5, 70), randn(70, 9))
    pipeline.run(graph_module.graph, SLOW, torch.device("cpu"))
    (product,) = (node for node in graph_module.graph.nodes if tags_of(node))
    assert tags_of(product)[0].kernel == "aten.mm (float32)"


def compiled(target: str, policy: str) -> tuple[Tensor, list[Tensor | None], list[Any]]:
    """Result, gradients and records of a feed-forward network and a head, in BF16."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    mxcompile.clear_reports()
    layers = {"ffn": FeedForward(64, 128), "norm": nn.LayerNorm(64), "head": nn.Linear(64, 32)}
    model, x = nn.Sequential(OrderedDict(layers)).bfloat16(), randn(8, 64)
    options = {"target": target, "policy": policy}
    backend = {"backend": "mxfp8", "options": options} if target else {"backend": "inductor"}
    result = torch.compile(model, **backend)(x)
    result.float().square().sum().backward()
    return result, [p.grad for p in model.parameters()], [g for r in mxcompile.reports() for g in r.gemms]


@pytest.mark.slow
def test_both_forms_of_a_model_agree():
    """What a CPU without BF16 products computes is what one with them does, up to the order of sums."""
    wide, wide_gradients, records = compiled("cpu_fp32", "nvidia")
    narrow, narrow_gradients, _ = compiled("cpu_bf16", "nvidia")
    torch.testing.assert_close(wide, narrow, rtol=0.02, atol=0.02)
    for ours, theirs in zip(wide_gradients, narrow_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05 * float(theirs.abs().max()))
    kernels = {record.name: record.kernel for record in records if record.gemm == "fprop"}
    assert kernels["ffn.up"] == "aten.addmm (float32, dequantized)"
    assert kernels["head"] == "aten.addmm (float32)"
    assert all("(float32" in record.kernel for record in records)


def test_a_policy_that_quantizes_nothing_is_inductor_bit_for_bit():
    result, gradients, records = compiled("auto", "bf16")
    expected, expected_gradients, _ = compiled("", "")
    assert torch.equal(result, expected)
    assert_same_bits(gradients, expected_gradients)
    assert not any("float32" in record.kernel for record in records)


def test_target_cpu_fp32_runs_products_in_fp32():
    _, _, records = compiled("cpu_fp32", "bf16")
    assert all(record.kernel.endswith("(float32)") for record in records)
