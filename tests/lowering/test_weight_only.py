"""Which products become weight-only ones, what the others stay, and that both mean the same."""

from __future__ import annotations

import pytest
import torch
from helpers.casts import quantize, scaled_mm
from helpers.graphs import calls, lowered, operators, traced
from torch import Tensor, fx

from mxcompile import ops
from mxcompile.formats import Format, elem_type
from mxcompile.graph.tags import add_fallback, tags_of
from mxcompile.lowering.graph.expand import Expand
from mxcompile.lowering.graph.weight_only import WeightOnly
from mxcompile.lowering.inductor import decode as decode  # registers the lowering
from mxcompile.lowering.targets import TARGETS
from mxcompile.passes.reuse import Reuse

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def quantized(x: Tensor, rounding: str = "rceil") -> tuple[Tensor, Tensor]:
    return quantize(x, -1, E4M3, rounding)


def linear(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product as `quantize_gemms` leaves it when elements and scales are inputs."""
    return scaled_mm(*quantized(x), qdata.t(), scale.t(), bias, x.dtype)


def recast(x: Tensor, qdata: Tensor, scale: Tensor, rounding: str = "rceil") -> Tensor:
    """As `quantize_gemms` leaves a product with a weight that the model dequantizes."""
    recoded = quantized(ops.decode(qdata, scale, -1, "e4m3 1x32 rceil", x.dtype), rounding)
    return scaled_mm(*quantized(x), recoded[0].t(), recoded[1].t(), None, x.dtype)


def weight_only(function, *inputs: Tensor, target: str = "sm_90", mode: str = "fake") -> fx.GraphModule:
    """`function` as a graph with every product tagged, after the pass."""
    module = traced(function, *inputs, mode=mode)
    Reuse().apply(module.graph)
    return lowered([WeightOnly], target, module)[0]


def kernels(module: fx.GraphModule) -> list[str]:
    return [tag.kernel for node in module.graph.nodes for tag in tags_of(node)]


def inputs(rows: int, dtype: torch.dtype = BF16, n: int = 70, k: int = 100) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(rows, k).to(dtype), *quantized(torch.randn(n, k))


TAKEN = ["cast", "weight_only_mm"]


@pytest.mark.parametrize("function", [linear, recast])
@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "gfx942"])
@pytest.mark.parametrize(("rows", "dtype"), [(1, BF16), (32, BF16), (1, F32), (4, F32)])
def test_few_rows_are_taken_and_mean_the_same(rows, dtype, target, function):
    module = check_taken(function, *inputs(rows, dtype), target=target)
    (kernel,) = kernels(module)
    assert kernel.startswith("mx_weight_only_mm " + ("dot" if rows > 1 and dtype is BF16 else "gemv"))


def test_fp16_results_are_computed_in_fp32():
    module = check_taken(linear, *inputs(2, F16))
    (x,) = calls(module, ops.cast)
    assert x.meta["val"][0].dtype is F32


def check_taken(function, *arguments: Tensor, **how: str) -> fx.GraphModule:
    module = weight_only(function, *arguments, **how)
    assert operators(module) == TAKEN
    torch.testing.assert_close(module(*arguments), function(*arguments))
    return module


@pytest.mark.parametrize("shape", [(70,), (1, 70), (3, 70), (1,)], ids=str)
def test_a_bias_of_any_shape(shape):
    check_taken(linear, *inputs(3), torch.randn(shape, dtype=BF16))


def test_a_weight_stored_along_the_other_dimension():
    stored = quantize(torch.randn(100, 70), -2, E5M2, "rceil")
    function = lambda x, q, s: scaled_mm(*quantized(x), q, s, None, x.dtype)  # noqa: E731
    check_taken(function, torch.randn(3, 100).to(BF16), *stored)


def test_one_activation_for_several_weights_is_quantized_once():
    def function(x: Tensor, *weights: Tensor) -> list[Tensor]:
        a = quantized(x)
        pairs = zip(weights[::2], weights[1::2], strict=True)
        return [scaled_mm(*a, qdata.t(), scale.t(), None, BF16) for qdata, scale in pairs]

    x, *first = inputs(3)
    module = weight_only(function, x, *first, *inputs(3, n=8)[1:])
    assert operators(module) == [*TAKEN, "weight_only_mm"]


@pytest.mark.parametrize("rows", [2, 31])
def test_a_dynamic_number_of_rows_is_decided_by_its_hint(rows):
    module = weight_only(linear, *inputs(rows), mode="symbolic")
    assert operators(module) == TAKEN
    for other in (1, 40):
        arguments = inputs(other)
        torch.testing.assert_close(module(*arguments), linear(*arguments))


@pytest.mark.parametrize(("rows", "dtype"), [(33, BF16), (5, F32), (0, BF16)])
def test_other_numbers_of_rows_stay(rows, dtype):
    module = weight_only(linear, *inputs(rows, dtype))
    assert operators(module) == ["cast", "matmul"]
    assert kernels(module) == [""]


def test_a_weight_cast_in_the_graph_stays():
    x, w = torch.randn(3, 64).to(BF16), torch.randn(32, 64).to(BF16)
    module = weight_only(lambda x, w: linear(x, *quantized(w)), x, w)
    assert operators(module) == ["cast", "cast", "matmul"]


def test_batched_weights_are_not_weight_only_products():
    def function(x: Tensor, qdata: Tensor, scale: Tensor) -> Tensor:
        return scaled_mm(*quantized(x), qdata.mT, scale.mT, None, x.dtype)

    module = weight_only(function, torch.randn(2, 3, 64).to(BF16), *quantized(torch.randn(2, 32, 64)))
    assert operators(module) == ["cast", "matmul"]


@pytest.mark.parametrize("rounding", ["floor", "ceil", "even"])
def test_a_cast_that_may_change_a_stored_weight_is_made(rounding):
    """A stored 240 is 480 over floor's scale, which saturates; ceil may double the scale."""
    module = weight_only(lambda x, q, s: recast(x, q, s, rounding), *inputs(3))
    assert operators(module)[-1] == "matmul"


def every_block(elem: torch.dtype) -> Tensor:
    """A row of blocks; the largest element of each is another positive finite code of the type."""
    codes = torch.arange(256, dtype=torch.uint8).view(elem)
    finite = codes[codes.float().isfinite() & (codes.float() > 0)]
    blocks = []
    for largest in finite:
        below = finite[finite.float() <= largest.float()]
        chosen = below[torch.randint(len(below), (31,))]
        blocks.append(torch.cat([largest.view(torch.uint8)[None], chosen.view(torch.uint8)]))
    return torch.cat(blocks).view(elem)[None]


@pytest.mark.parametrize("elem", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_casting_a_stored_block_again_keeps_its_values(dtype, elem):
    """Every largest element times every scale at which the values exist in the dtype; NaN stays NaN."""
    qdata = every_block(elem).expand(256, -1).contiguous()
    scale = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, qdata.shape[1] // 32).contiguous()
    word = str(Format.mx(elem_type(elem)))
    value = ops.decode(qdata, scale, -1, word, dtype)
    recoded = ops.decode(*quantize(value, -1, elem, "rceil"), -1, word, F32)
    exact = ops.decode(qdata, scale, -1, word, torch.float64)
    exists = (value.double() == exact) & (exact.abs() < 2.0**127)
    inside = exists.unflatten(1, (-1, 32)).all(-1)
    assert inside.float().mean() > 0.8
    inside = inside.repeat_interleave(32, 1)
    assert torch.equal(recoded.double()[inside], exact[inside])
    assert recoded[255].isnan().all()


def test_rejected_weight_only_product_records_the_reason():
    arguments = inputs(3)
    module = traced(linear, *arguments)
    for taken in WeightOnly(target=TARGETS["sm_90"], device="cpu").candidates(module.graph):
        add_fallback(taken, "too old")
    lowered([Expand], "sm_90", module)
    assert kernels(module) == ["aten.mm (bfloat16, dequantized); too old"]


@pytest.mark.parametrize(("dtype", "bias"), [(BF16, None), (F16, (70,)), (F32, (3, 70))], ids=str)
def test_the_operator_compiles_where_it_has_no_kernel(dtype, bias):
    x, qdata, scale = inputs(3, dtype)
    added = None if bias is None else torch.randn(bias).to(dtype)

    def function(x: Tensor) -> Tensor:
        return ops.weight_only_mm(x, qdata, scale, added, dtype, "e4m3 1x32 rceil").relu()

    products = torch.compile(function, backend="inductor", fullgraph=True)(x)
    expected = ops.weight_only_mm(x, qdata, scale, added, F32, "e4m3 1x32 rceil").relu()
    tolerance = 2 * torch.finfo(dtype).eps if dtype is not F32 else 1e-5
    torch.testing.assert_close(products.float(), expected, rtol=tolerance, atol=10 * tolerance)
