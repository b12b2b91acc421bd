"""FP8 casts merged, and their transposes made by casts: the same bits, in so many operators."""

from __future__ import annotations

import pytest
import torch
from helpers.bits import assert_same_bits
from helpers.casts import encode
from helpers.graphs import calls, lowered, traced
from helpers.spread import spread
from test_vendor_fp8 import CHIP, FNUZ, HOPPER, applied
from torch import Tensor

from mxcompile import ops
from mxcompile.formats import Copy, Format
from mxcompile.graph.opsets import aten
from mxcompile.lowering.graph.expand import Expand
from mxcompile.lowering.graph.merge_casts import MergeCasts
from mxcompile.lowering.graph.split_casts import SplitCasts
from mxcompile.lowering.graph.vendor_fp8 import VendorFP8
from mxcompile.ops.view import Casts


def with_merged_casts(function, *inputs, chip):
    """The graph of `function`, its products on the vendor's GEMM and its casts merged, and the reasons."""
    return lowered([VendorFP8, Expand, MergeCasts, SplitCasts], chip, traced(function, *inputs))


def copies_of_casts(module) -> list[list[Copy]]:
    return [Casts.read(node).parsed for node in calls(module, ops.cast)]


def parts(copies: list[Copy]) -> list[str]:
    """What the copies are, without formats and dimensions."""
    return [" ".join(str(copy).rpartition("@")[2].split()[1:]) for copy in copies]


def merged(module) -> list[list[str]]:
    """What is made by each cast of which a loop is not as good."""
    kinds_of_casts = map(parts, copies_of_casts(module))
    return [kinds for kinds in kinds_of_casts if len(kinds) > 1 or kinds[0] not in ("elements", "scales")]


class Operands(torch.fx.Interpreter):
    """Runs a graph; a product gives its operands, their scales and what they lie like."""

    def run_node(self, n):
        if n.target is not aten._scaled_mm.default:
            return super().run_node(n)
        a, b, sa, sb = self.fetch_args_kwargs_from_env(n)[0][:4]
        assert a.stride()[1] == b.stride()[0] == 1
        return [t.contiguous().view(torch.uint8) for t in (a, b)] + [sa.contiguous(), sb.contiguous()]


def step(words: dict[str, str]):
    """Forward and both gradients of a layer: x[M, K], w[N, K], dy[M, N], each cast for each product."""

    def function(x: Tensor, w: Tensor, dy: Tensor):
        values, casts = {"x": x, "w": w, "dy": dy}, {}

        def cast(operand: str, dim: int):
            dim = -1 if Format.parse(words[operand]).tile.is_square else dim
            if (operand, dim) not in casts:
                casts[operand, dim] = encode(values[operand], dim, words[operand])
            return casts[operand, dim]

        def product(left, right, a, b):
            return ops.matmul(*a, *b, None, torch.bfloat16, words[left], words[right])

        def swapped(pair):
            return tuple(t.t() for t in pair)

        return (
            product("x", "w", cast("x", -1), swapped(cast("w", -1))),
            product("dy", "w", cast("dy", -1), cast("w", -2)),
            product("dy", "x", swapped(cast("dy", -2)), cast("x", -2)),
        )

    return function


FORMS = {
    "tensor": (("e4m3 tensor nearest", "e4m3 tensor nearest", "e5m2 tensor nearest"), [3, 3, 3]),
    "channel": (("e4m3 channel nearest",) * 3, [4, 4, 4]),
    "block": (("e4m3 1x128 nearest", "e4m3 128x128 nearest", "e4m3 1x128 nearest"), [4, 3, 4]),
}
"""Formats of x, w and dy, and how many copies their casts make."""


@pytest.mark.parametrize("chip", [HOPPER, FNUZ], ids=["hopper", "fnuz"])
@pytest.mark.parametrize("form", FORMS)
def test_merged_casts_of_a_layer_have_the_same_bits(form: str, chip):
    """One cast a matrix that writes all its layouts; operands and scales bit for bit as without."""
    if form == "block" and chip is FNUZ:
        pytest.skip("no such product there")
    words, scales = FORMS[form]
    inputs = [spread(*shape, binades=20) for shape in ((512, 512), (1024, 512), (512, 1024))]
    function = step(dict(zip(("x", "w", "dy"), words, strict=True)))
    module, reasons = with_merged_casts(function, *inputs, chip=chip)
    assert not reasons
    halved = " fnuz" if chip is FNUZ else ""
    both = [f"elements{halved}", "scales", f"elements transposed{halved}"]
    assert [parts(copies)[:3] for copies in copies_of_casts(module)] == [both] * 3
    assert [len(copies) for copies in copies_of_casts(module)] == scales
    assert not calls(module, ops.decode)
    plain, _ = applied(function, *inputs, chip=chip)
    for computed, wanted in zip(Operands(module).run(*inputs), Operands(plain).run(*inputs), strict=True):
        assert_same_bits(computed, wanted)


def test_a_known_scale_is_read_and_the_largest_found_beside():
    word = "e5m2 tensor nearest delayed:4:0"

    def function(x: Tensor, w: Tensor, s: Tensor):
        seen = ops.largest(x)
        a, sa = encode(x, -1, word, None, 0, s)
        b, sb = encode(w, -2, "e4m3 tensor nearest delayed:4:0", None, 0, s)
        return ops.matmul(a, sa, b, sb, None, torch.bfloat16, word, "e4m3 tensor nearest delayed:4:0"), seen

    x, w, scale = torch.randn(32, 64), torch.randn(64, 48), torch.full((1, 1), 0.01)
    module, reasons = with_merged_casts(function, x, w, scale, chip=CHIP)
    assert not reasons
    assert merged(module) == [["elements", "largest"], ["elements transposed"]]
    assert not calls(module, ops.largest)
    assert module(x, w, scale)[1].tolist() == [x.abs().max().item()]


def test_scales_of_blocks_that_are_read_alone_stay():
    word = "e4m3 1x128 nearest"

    def function(x: Tensor, w: Tensor):
        (a, sa), (b, sb) = encode(x, -1, word), encode(w, -2, word)
        product = ops.matmul(a, sa, b, sb, None, torch.bfloat16, word, word)
        return product, encode(x, -2, word)[1], encode(w.t().contiguous(), -1, word)[1]

    inputs = torch.randn(32, 512), torch.randn(512, 48)
    module, reasons = with_merged_casts(function, *inputs, chip=HOPPER)
    assert not reasons
    assert merged(module) == [["elements", "scales"], ["elements transposed", "scales"]]
    assert len(copies_of_casts(module)) == 4
    assert_same_bits(Operands(module).run(*inputs)[1:], function(*inputs)[1:])


@pytest.mark.parametrize("word", ["e4m3 channel nearest", "e4m3 tensor nearest", "e4m3 128x128 nearest"])
def test_elements_beside_values_of_an_emulated_product_stay(word: str):
    """Backward reads them: one loop makes both."""

    def function(x: Tensor, w: Tensor):
        (a, sa), (b, sb) = encode(x, -1, word), encode(w, -2, word)
        return ops.matmul(a, sa, b, sb, None, torch.bfloat16, word, word), a, sa

    module, reasons = with_merged_casts(function, torch.randn(16, 40), torch.randn(40, 32), chip=CHIP)
    assert reasons
    assert all(len(copies) == 1 for copies in copies_of_casts(module))


def test_casts_that_something_else_reads_stay():
    """Of an emulated product, of a batch, of a sorted amax."""

    def function(x: Tensor, w: Tensor):
        results = []
        for a, b, word in (
            (x, w, "e4m3 channel nearest"),  # k is no multiple of 16
            (x[None], w[None], "e4m3 channel nearest"),
            (x, w, "e4m3 tensor nearest percentile:99"),
        ):
            casts = *encode(a, -1, word), *encode(b, -2, word)
            results.append(ops.matmul(*casts, None, torch.bfloat16, word, word))
        return results

    module, _ = with_merged_casts(function, torch.randn(16, 40), torch.randn(40, 32), chip=CHIP)
    assert merged(module) == [["elements bfloat16"]] * 6


@pytest.mark.parametrize("word", ["e4m3 tensor nearest", "e4m3 channel nearest", "e5m2 1x128 nearest"])
def test_transposed_fp8_casts_pass_opcheck(word: str):
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    x = torch.randn(40, 144)
    row, column = ops.cast(x, [f"{word} @{dim} scales" for dim in (-1, -2)])
    rows, columns = f"{word} @-1", f"{word} @-2"
    checks = (
        ([f"{rows} elements", f"{rows} scales", f"{columns} elements transposed"], [None] * 3),
        ([f"{columns} elements transposed fnuz"], [column]),
        ([f"{rows} elements", f"{columns} elements transposed", f"{rows} largest"], [row, column, None]),
    )
    for copies, scales in checks:
        torch.library.opcheck(ops.cast, (x, copies, None, 0, scales), test_utils=tests)
