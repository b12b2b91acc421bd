"""Compiled casts against the reference implementation, bit for bit, on the CPU."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.bits import assert_same_bits
from helpers.casts import quantize, quantize_both, values

from mxcompile import ops
from mxcompile.formats import Format, elem_type
from mxcompile.lowering.inductor import copies as copies  # registers the lowerings
from mxcompile.lowering.inductor import decode as decode

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, F32, F16 = torch.bfloat16, torch.float32, torch.float16


def check(function: Callable[..., Any], *arguments: torch.Tensor, dynamic: bool = False) -> None:
    compiled = torch.compile(function, backend="inductor", fullgraph=True, dynamic=dynamic)
    assert_same_bits(compiled(*arguments), function(*arguments))


def wild(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Random bit patterns: all exponents, subnormals, zeros of both signs; a few NaN and Inf."""
    generator = torch.Generator().manual_seed(0)
    integer = torch.int16 if dtype.itemsize == 2 else torch.int32
    info = torch.iinfo(integer)
    bits = torch.randint(info.min, info.max, shape, generator=generator, dtype=integer)
    x = bits.view(dtype)
    rare = torch.rand(shape, generator=generator) < 0.001
    x = torch.where(x.isfinite() | rare, x, torch.tensor(1.5, dtype=dtype))
    # exponents within a block spread over a few binades, those of blocks over all of them
    scale = torch.exp2(torch.randint(-100, 100, (shape[0], 1), generator=generator).float())
    normal = (torch.randn(shape, generator=generator) * scale).to(dtype)
    return torch.where(torch.rand(shape[0], 1, generator=generator) < 0.5, x, normal)


CASES = [
    (BF16, E4M3, "rceil", False, (64, 128)),
    (BF16, E5M2, "floor", False, (64, 128)),
    (F32, E4M3, "even", False, (96, 64)),
    (F32, E5M2, "ceil", False, (96, 64)),
    (F32, E4M3, "rceil", True, (96, 64)),
    (F16, E4M3, "rceil", False, (64, 64)),
    (BF16, E4M3, "rceil", False, (33, 70)),
    (BF16, E5M2, "even", True, (33, 70)),
    (BF16, E4M3, "floor", False, (1, 48)),
    (BF16, E4M3, "rceil", False, (0, 64)),
]


@pytest.mark.parametrize(("dtype", "elem", "rounding", "square", "shape"), CASES, ids=str)
def test_compiled_casts_are_bit_exact(
    dtype: torch.dtype, elem: torch.dtype, rounding: str, square: bool, shape: tuple[int, int]
):
    word = str(Format.mx(elem_type(elem)))

    def casts(x: torch.Tensor) -> Any:
        results: tuple[torch.Tensor, ...] = ()
        for dim in (-1, -2):
            qdata, scale = quantize(x, dim, elem, rounding, square)
            results += (qdata, scale, ops.decode(qdata, scale, dim, word, BF16))
            results += (values(x, dim, elem, rounding, square, F32),)
        return results

    check(casts, wild(*shape, dtype=dtype))


@pytest.mark.parametrize(("shape", "dynamic"), [((33, 70), True), ((200, 300), False)])
def test_compiled_casts_with_tiled_scales(shape: tuple[int, int], dynamic: bool):
    def casts(x: torch.Tensor) -> Any:
        results: tuple[torch.Tensor, ...] = (*quantize_both(x, E4M3, "rceil", "128x4"),)
        for dim in (-1, -2):
            qdata, scale = quantize(x, dim, E4M3, "rceil", False, "128x4")
            results += (qdata, scale, ops.decode(qdata, scale, dim, "e4m3 1x32 rceil", BF16))
        return results

    def dequantized(qdata: torch.Tensor, scale: torch.Tensor) -> list[torch.Tensor]:
        return [ops.decode(qdata, scale, -2, "e4m3 1x32 rceil", F32)]

    x = wild(*shape)
    check(casts, x, dynamic=dynamic)
    check(dequantized, *quantize(x, -2, E4M3, "rceil", False, "128x4"), dynamic=dynamic)


def every_bf16_element() -> Iterator[torch.Tensor]:
    """Every finite value, in blocks of neighbours; and below a leader that makes subnormals of them."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(BF16)
    x = x[x.isfinite()].view(-1, 64)
    yield x
    for leader in (2.0**-100, 1.0, 2.0**100):
        led = torch.where(x.abs() <= leader, x, torch.tensor(leader, dtype=BF16))
        led[:, ::32] = leader
        yield led


def test_every_bf16_element_compiles_to_the_same_bits():
    def casts(x: torch.Tensor) -> Any:
        return tuple(values(x, dim, elem, "rceil", False, F32) for dim in (-1, -2) for elem in (E4M3, E5M2))

    for x in every_bf16_element():
        check(casts, x)


def test_casts_of_computed_values_use_the_rounded_value():
    """A producer fused into the cast must not leak precision its dtype does not have."""
    x, y = torch.randn(64, 128, dtype=BF16), torch.randn(64, 128, dtype=BF16)

    def casts(x: torch.Tensor, y: torch.Tensor) -> Any:
        z = x * y  # exact in FP32, so that BF16 holds its correct rounding
        return *quantize(z, -1, E4M3, "rceil"), *quantize(z, -2, E4M3, "rceil")

    check(casts, x, y)


@pytest.mark.parametrize("shape", [(40, 96), (64, 96), (17, 96)])
def test_compiled_casts_of_dynamic_shapes_equal_reference(shape: tuple[int, int]):
    def casts(x: torch.Tensor) -> Any:
        return *quantize_both(x, E4M3, "rceil"), values(x, -2, E4M3, "rceil", False, BF16)

    check(casts, torch.randn(shape, dtype=BF16), dynamic=True)


@pytest.mark.parametrize("view", ["transposed", "expanded", "strided", "batched"])
def test_compiled_casts_of_strided_sources_equal_reference(view: str):
    x = {
        "transposed": torch.randn(96, 64, dtype=BF16).t(),
        "expanded": torch.randn(1, 96, dtype=BF16).expand(64, 96),
        "strided": torch.randn(64, 200, dtype=BF16)[:, 3:195:2],
        "batched": torch.randn(3, 64, 96, dtype=BF16),
    }[view]
    check(lambda x: quantize_both(x, E4M3, "rceil"), x)


@pytest.mark.parametrize(
    ("tile", "shape"),
    [("1x16", (40, 48)), ("1x16", (2, 33, 64)), ("16x16", (40, 48))],
)
def test_compiled_values_of_packed_elements_equal_reference(tile: str, shape: tuple[int, ...]):
    """Packed elements have scale bytes, one for each row of a square tile."""
    x, word = torch.randn(shape, generator=torch.Generator().manual_seed(0)), f"e2m1 {tile} two-level packed"
    amax = ops.largest(x)
    elements, scales = ops.cast(x, [f"{word} @-1 codes"], None, 0, None, [amax])
    torch._dynamo.reset()
    check(lambda q, s: ops.decode(q, s, -1, word, F32), elements, scales)
    check(lambda q, s, a: ops.decode(q, s, -1, word, BF16, a), elements, scales, amax)
