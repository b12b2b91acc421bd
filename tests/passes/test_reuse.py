"""The pass `reuse`: casts of stored weights that change nothing are gone, and only those."""

from __future__ import annotations

import pytest
import torch
from by_hand import Hand, assert_unchanged, calls, random, run
from helpers.casts import codes, quantize
from torch import fx

import mxcompile
from mxcompile import ops
from mxcompile.errors import PolicyError
from mxcompile.formats import Format
from mxcompile.graph.opsets import aten
from mxcompile.graph.tags import tag_of
from mxcompile.passes.reuse import Reuse

E4M3, E5M2, FP32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float32


def recast(
    dim: int = -1, elem: torch.dtype = E4M3, rounding: str = "rceil", *, between: torch.dtype = FP32,
    transposed: bool = False,
) -> fx.Graph:  # fmt: skip
    """Codes [64, 96] and their scales along the last dimension, dequantized and cast again."""
    hand = Hand()
    codes, scales = hand.input("codes", 64, 96, dtype=E4M3), hand.input("scales", 64, 3, dtype=torch.uint8)
    values = hand.call(ops.decode, codes, scales, -1, "e4m3 1x32 rceil", between)
    if transposed:
        values = hand.call(aten.permute.default, values, [1, 0])
    return hand.output(*hand.parts(hand.quantize(values, dim, elem, rounding)))


def stored() -> list[torch.Tensor]:
    x = random(64, 96)
    return [*quantize(x * x.exp(), -1, E4M3, "rceil")]


@pytest.mark.parametrize("between", [FP32, torch.bfloat16])
@pytest.mark.parametrize(("dim", "transposed"), [(-1, False), (0, True)])
def test_stored_parts_replace_casts_of_decoded_values(dim: int, transposed: bool, between: torch.dtype):
    graph = recast(dim, transposed=transposed, between=between)
    Reuse().apply(graph)
    assert not calls(graph, ops.cast)
    assert not calls(graph, ops.decode)
    parts = stored()
    expected = [part.T for part in parts] if transposed else parts
    results = [result.view(torch.uint8) for result in run(graph, *parts)]
    assert all(map(torch.equal, results, [part.view(torch.uint8) for part in expected]))


@pytest.mark.parametrize(
    "graph",
    [
        recast(0), recast(-1, E5M2), recast(rounding="floor"), recast(between=torch.float16),
        recast(-1, transposed=True),
    ],
    ids=["another dimension", "other elements", "floor", "FP16 between", "the other side of a transpose"],
)  # fmt: skip
def test_casts_that_differ_from_the_stored_weight_stay(graph: fx.Graph):
    assert_unchanged(Reuse(), graph)


def two_level(
    form: str = "e2m1 1x16 two-level",
    dim: int = -1,
    global_shape: tuple[int, ...] = (1, 1),
    *,
    groups: int = 0,
) -> fx.Graph:
    """The product of x [32, 64] and a stored weight [48, 64], or a stack of `groups`, cast in the graph."""
    hand, stored_form = Hand(), "e2m1 1x16 two-level"
    stack = (groups,) if groups else ()
    packed = hand.input("packed", *stack, 48, 32, dtype=torch.uint8)
    scales = hand.input("scales", *stack, 48, 4, dtype=E4M3)
    whole = hand.input("whole", *global_shape)
    x = hand.input("x", 32, 64)
    values = hand.call(ops.decode, packed, scales, -1, f"{stored_form} packed", FP32, None, whole)
    sides, global_scales = [], []
    for source, along, word in ((x, -1, stored_form), (values, dim, form)):
        amax = hand.call(ops.largest, source)
        cast = hand.call(ops.cast, source, codes(along, word), None, 0, None, [amax])
        global_scales.append(hand.call(ops.known_scale, amax, 0, word, 1))
        sides += hand.parts(cast)
    sides[2:] = [hand.call(aten.transpose.int, part, -1, -2) for part in sides[2:]]
    ends = hand.input("ends", groups, dtype=torch.int32) if groups else None
    gemm_operator = ops.grouped_matmul if groups else ops.matmul
    stored = Format.parse(stored_form)
    return hand.output(
        hand.gemm(gemm_operator, *sides, ends, FP32, stored_form, form, global_scales, stored=stored)
    )


@pytest.mark.parametrize(
    ("global_shape", "form"),
    [
        ((1, 1), "e2m1 1x16 two-level"),
        ((48, 1), "e2m1 1x16 two-level"),
        ((1, 1), "e2m1 1x16 two-level 4over6:256:mae"),
    ],
)
def test_codes_of_two_levels_are_read_as_they_are(global_shape: tuple[int, ...], form: str):
    """Under scales that no cast of their values has; a row may have a global scale of its own."""
    graph = two_level(form, global_shape=global_shape)
    Reuse().apply(graph)
    assert len(calls(graph, ops.cast)) == 1
    (codes_of,) = calls(graph, ops.decode)
    assert codes_of.args[1:] == (None, -1, "e2m1 1x16 two-level packed", torch.uint8)
    (product,) = calls(graph, ops.matmul)
    assert not tag_of(product).recast
    torch.manual_seed(0)
    packed = torch.randint(4, (48, 32), dtype=torch.uint8) * 0x11
    scales, whole = torch.rand(48, 4).to(E4M3), torch.rand(global_shape) + 1
    x = torch.randn(32, 64)
    (output,) = run(graph, packed, scales, whole, x)
    values = mxcompile.quantize(x, elem_dtype=torch.float4_e2m1fn_x2, rounding="two-level").dequantize(FP32)
    weight = ops.decode(packed, scales, -1, "e2m1 1x16 two-level packed", FP32, None, whole)
    assert torch.allclose(output, values @ weight.t(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "graph",
    [two_level("e2m1 16x16 two-level"), two_level(global_shape=(2, 1, 1), groups=2)],
    ids=["square tiles", "a global scale for each group"],
)
def test_other_casts_of_two_levels_stay_and_are_noted(graph: fx.Graph):
    assert_unchanged(Reuse(), graph)
    (product,) = (*calls(graph, ops.matmul), *calls(graph, ops.grouped_matmul))
    assert tag_of(product).recast


def gathered(rounding: str) -> fx.Graph:
    """Codes in tiles of 32×32, cast in tiles with scales rounded by `rounding`; they were with rceil."""
    hand = Hand()
    codes, scales = hand.input("codes", 64, 96, dtype=E4M3), hand.input("scales", 2, 3, dtype=torch.uint8)
    values = hand.call(ops.decode, codes, scales, -1, "e4m3 32x32 rceil", FP32)
    cast = hand.quantize(values, -1, E4M3, rounding, True)
    return hand.output(*(hand.call(aten.clone.default, part) for part in hand.parts(cast)))


def test_tiles_that_were_gathered_are_read():
    graph = gathered("rceil")
    Reuse().apply(graph)
    assert not calls(graph, ops.cast)
    codes = torch.arange(64 * 96).remainder(120).to(torch.uint8).view(64, 96).view(E4M3)
    scales = torch.arange(6, dtype=torch.uint8).view(2, 3) + 120
    elements, rows = run(graph, codes, scales)
    assert torch.equal(elements.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(rows, scales.repeat_interleave(32, 0))


def test_a_policy_that_wants_them_otherwise_is_an_error():
    with pytest.raises(PolicyError, match="gathered in 32×32 tiles"):
        Reuse().apply(gathered("floor"))
