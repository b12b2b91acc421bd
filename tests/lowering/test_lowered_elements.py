"""Rounding on the bits, bytes in place of FP8 tensors: code of GPUs without the conversion, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.bits import assert_same_bits
from helpers.casts import quantize, quantize_both, values
from test_casts import every_bf16_element, wild
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from mxcompile import ops
from mxcompile.formats import Format, elem_type
from mxcompile.lowering.cpu import kernel
from mxcompile.lowering.inductor import copies, decode
from mxcompile.lowering.targets import TARGETS

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.fixture(params=["sm_80", "sm_89"])
def code(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Compiles for the CPU with the elements of another chip: results and generated code."""
    for module in (copies, decode):
        monkeypatch.setattr(module, "of_device", lambda device: TARGETS[request.param])
    monkeypatch.setattr(kernel, "obstacle", lambda: "GPUs run the loops")

    def compiled(function: Callable[..., Any], *arguments: Tensor) -> tuple[Any, str]:
        torch._dynamo.reset()
        results, sources = run_and_get_code(torch.compile(function, fullgraph=True), *arguments)
        loops = "".join(sources).partition("async_compile.wait")[0]
        assert ("float8" in loops.lower()) == TARGETS[request.param].stores_fp8
        return results

    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield compiled


@pytest.mark.parametrize("elem", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize(
    ("rounding", "shape"), [("rceil", (33, 70)), ("floor", (64, 128)), ("even", (64, 128))], ids=str
)
def test_casts_without_fp8_conversion_equal_reference(
    code: Any, shape: tuple[int, int], elem: torch.dtype, rounding: str
):
    word = str(Format.mx(elem_type(elem)))

    def function(x: Tensor) -> tuple[Tensor, ...]:
        copies: tuple[Tensor, ...] = quantize_both(x, elem, rounding)
        rowwise, scale, *_ = copies
        value = ops.decode(rowwise, scale, -1, word, torch.bfloat16)
        return *copies, value, values(x, -2, elem, rounding, False, torch.float32)

    x = wild(*shape, dtype=torch.float32)
    assert_same_bits(code(function, x), function(x))


@pytest.mark.parametrize("elem", [E4M3, E5M2], ids=str)
def test_every_bf16_value_is_rounded_as_the_reference(code: Any, elem: torch.dtype):
    def function(x: Tensor) -> tuple[Tensor, ...]:
        qdata, scale = quantize(x, -1, elem, "rceil")
        return qdata, scale, values(x, -1, elem, "rceil", False, torch.float32)

    for x in every_bf16_element():
        assert_same_bits(code(function, x), function(x))


@pytest.mark.parametrize("elem", [E4M3, E5M2], ids=str)
def test_every_stored_code_is_decoded_as_the_reference(code: Any, elem: torch.dtype):
    """Stored elements as they may come from elsewhere: NaN and Inf too."""

    word = str(Format.mx(elem_type(elem)))

    def function(qdata: Tensor, scale: Tensor) -> list[Tensor]:
        return [ops.decode(qdata, scale, -1, word, torch.float32)]

    qdata = torch.arange(256, dtype=torch.uint8).view(elem).view(8, 32)
    scale = torch.tensor([[127], [0], [1], [254], [100], [140], [3], [255]], dtype=torch.uint8)
    assert_same_bits(code(function, qdata, scale), function(qdata, scale))
