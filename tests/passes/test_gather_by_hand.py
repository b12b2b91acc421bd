"""The pass `gather` without ranks: an interpreter makes of one rank's part what all of them send."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from by_hand import Hand, assert_unchanged, calls, random, tag
from torch import Tensor, fx, nn

from mxcompile import ops
from mxcompile.formats import Format
from mxcompile.graph.opsets import aten, prims
from mxcompile.graph.tags import Kind
from mxcompile.passes.gather import Gather
from mxcompile.policy import Choice, Code, Gemm, Reason, Sent

WORDS = (str(Format()), str(Format()))
C10D = torch.ops._c10d_functional
SEND, WAIT = C10D.all_gather_into_tensor.default, C10D.wait_tensor.default
E4M3, RANKS = torch.float8_e4m3fn, 3

Steps = Callable[[Hand, fx.Node], fx.Node]


class Ranks(fx.Interpreter):
    """Runs a graph for one rank of several whose parts are its own times 1, 2, 3 …; bytes are counted."""

    sent = 0

    def call_function(self, target, args, kwargs):
        if target is WAIT:
            return args[0]
        if target is not SEND:
            return super().call_function(target, args, kwargs)
        self.sent += args[0].nbytes
        return torch.cat([self.of_rank(args[0], rank) for rank in range(RANKS)])

    def of_rank(self, part: Tensor, rank: int) -> Tensor:
        """What `rank` sends: values times a power of two, of which casts differ in their scales alone."""
        if part.dtype is not torch.uint8:
            return part * 2**rank
        codes, scales = part[..., :64], part[..., 64:]
        return torch.cat([codes, scales + rank], -1)


def gathered(steps: Steps, *dims: int, dtype: torch.dtype = torch.float32) -> fx.Graph:
    """x[4, 10, 64] gathered along its first dimension, moved by `steps`, and cast along each of `dims`."""
    hand = Hand()
    whole = steps(hand, hand.call(WAIT, hand.call(SEND, hand.input("x", 4, 10, 64, dtype=dtype), RANKS, "0")))
    casts = [hand.quantize(whole, dim, E4M3, "rceil") for dim in dims]
    return hand.output(*(part for cast in casts for part in hand.parts(cast)))


def rows(hand: Hand, whole: fx.Node) -> fx.Node:
    return hand.call(aten.view.default, whole, [120, 64])


def tokens(hand: Hand, whole: fx.Node) -> fx.Node:
    """As DTensor brings the parts of ranks into order: split, concatenated along tokens."""
    parts = hand.call(aten.split.Tensor, whole, 4)
    return hand.call(aten.cat.default, [hand.call(operator.getitem, parts, rank) for rank in range(RANKS)], 1)


def numbers(hand: Hand, length: int, factor: int, end: int) -> fx.Node:
    """0, `factor`, 2 · `factor` …, each modulo `end`."""
    places = hand.call(aten.arange.default, length)
    return hand.call(aten.remainder.Scalar, hand.call(aten.mul.Tensor, places, factor), end)


def order(hand: Hand) -> fx.Node:
    """An order of the 12 tokens, as a sort by expert gives it."""
    return hand.call(operator.getitem, hand.call(aten.sort.default, numbers(hand, 12, 5, 12)), 1)


def filled(hand: Hand, whole: fx.Node, value: float, *shape: int) -> fx.Node:
    return hand.call(aten.full.default, shape, value, dtype=whole.meta["val"].dtype)


def mask(hand: Hand, *shape: int) -> fx.Node:
    return hand.call(aten.view.default, hand.call(aten.gt.Scalar, numbers(hand, max(shape), 1, 3), 0), shape)


def picked(hand: Hand, whole: fx.Node) -> fx.Node:
    """Tokens in an order that an index gives, as those of experts are, and some of them again."""
    some = hand.call(aten.index_select.default, whole, 0, order(hand))
    return hand.call(aten.index.Tensor, some, [None, numbers(hand, 20, 7, 10)])


def padded(hand: Hand, whole: fx.Node) -> fx.Node:
    """Rows behind others of zeros, and zeros where a mask says so."""
    longer = hand.call(aten.cat.default, [filled(hand, whole, 0, 2, 10, 64), whole])
    return hand.call(aten.where.self, mask(hand, 14, 1, 1), longer, filled(hand, whole, 0.0))


def in_the_midst(hand: Hand, whole: fx.Node) -> fx.Node:
    """Rows between one of zeros, which is a view, and the zeros of padding."""
    zero = hand.call(aten.expand.default, filled(hand, whole, 0.0, 64), [1, 10, 64])
    longer = hand.call(aten.cat.default, [zero, whole])
    return hand.call(
        aten.constant_pad_nd.default,
        hand.call(aten.slice_scatter.default, filled(hand, whole, 0, 15, 10, 64), longer, 0, 1, 14),
        [0, 0, 2, 0],
    )


def put(hand: Hand, whole: fx.Node, places: fx.Node) -> fx.Node:
    return hand.call(aten.index_put.default, filled(hand, whole, 0, 12, 10, 64), [places], whole, True)


def masked(hand: Hand, whole: fx.Node, value: float, *shape: int) -> fx.Node:
    return hand.call(aten.where.self, mask(hand, *shape), whole, filled(hand, whole, value))


def result(graph: fx.Graph, dtype: torch.dtype) -> tuple[list[Tensor], int]:
    x = random(4, 10, 64, dtype=dtype)
    graph.lint()
    ranks = Ranks(fx.GraphModule(nn.Module(), graph))
    return [tensor.view(torch.uint8) for tensor in ranks.run(x)], ranks.sent


FP32, BF16 = torch.float32, torch.bfloat16
TRAVELS: dict[str, tuple[Steps, torch.dtype]] = {
    "rows": (rows, FP32),
    "rows of BF16": (rows, BF16),
    "tokens": (tokens, BF16),
    "narrowed": (lambda h, whole: rows(h, h.call(prims.convert_element_type.default, whole, BF16)), FP32),
    "picked": (picked, BF16),
    "padded": (padded, BF16),
    "the gradient of a permutation": (lambda h, whole: put(h, whole, order(h)), FP32),
    "in the midst": (in_the_midst, BF16),
    "halves": (
        lambda h, whole: h.call(operator.getitem, h.call(aten.split_with_sizes.default, whole, [5, 7]), 1),
        BF16,
    ),
}


@pytest.mark.parametrize("name", TRAVELS)
def test_codes_and_scales_travel_and_are_those_of_the_whole(name: str):
    steps, dtype = TRAVELS[name]
    expected, sent = result(gathered(steps, -1, dtype=dtype), dtype)
    graph = gathered(steps, -1, dtype=dtype)
    Gather().apply(graph)
    values, fewer = result(graph, dtype)
    assert all(map(torch.equal, values, expected))
    assert (sent, fewer) == (4 * 10 * 64 * dtype.itemsize, 4 * 10 * (64 + 2))


STAYS: dict[str, Steps] = {
    "transposed": lambda h, whole: h.call(aten.permute.default, whole, [0, 2, 1]),
    "shifted": lambda h, whole: h.call(aten.add.Tensor, whole, 1),
    "places that rows share": lambda h, whole: put(h, whole, numbers(h, 12, 1, 6)),
    "masked by one": lambda h, whole: masked(h, whole, 1.0, 12, 1, 1),
    "masked elements": lambda h, whole: masked(h, whole, 0.0, 64),
    "features": lambda h, whole: h.call(aten.index_select.default, whole, 2, numbers(h, 64, 5, 64)),
    "widened": lambda h, whole: h.call(aten.constant_pad_nd.default, whole, [0, 64]),
}


@pytest.mark.parametrize(
    ("steps", "dims"),
    [(rows, (0,)), (rows, (-1, 0)), *((steps, (-1,)) for steps in STAYS.values())],
    ids=["along rows", "along both", *STAYS],
)
def test_the_source_travels_where_something_else_reads_it(steps: Steps, dims: tuple[int, ...]):
    graph = gathered(steps, *dims)
    assert_unchanged(Gather(), graph)
    assert calls(graph, SEND)


def test_both_operands_that_travel_as_they_are_have_a_reason():
    """A wgrad whose casts run along tokens, of tensors that came from other ranks."""
    hand = Hand()
    casts = []
    for name in ("dy", "x"):
        source = rows(hand, hand.call(WAIT, hand.call(SEND, hand.input(name, 4, 10, 64), RANKS, "0")))
        casts.append(hand.parts(hand.quantize(source, 0, E4M3, "rceil")))
    (dy, dy_scale), (x, x_scale) = casts
    turned = hand.call(aten.permute.default, dy, [1, 0]), hand.call(aten.permute.default, dy_scale, [1, 0])
    facts = {"gemm": Gemm.WGRAD, "tensors": ("dy", "x"), "sent": Sent.MXFP8, "formats": (Format(), Format())}
    choice = Choice(precision="mxfp8", reason=Reason(Code.PRESET, "nvidia"))
    product = hand.gemm(ops.matmul, *turned, x, x_scale, None, torch.bfloat16, *WORDS, choice=choice, **facts)
    graph = hand.output(product)
    Gather().apply(graph)
    assert tag(product).kind is Kind.LINEAR
    assert tag(product).choice.reason == (
        "preset nvidia; ranks send its dy unquantized: another operator reads it;"
        " ranks send its x unquantized: another operator reads it"
    )
