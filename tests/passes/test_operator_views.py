"""Calls of mx operators read by name: defaults, arguments that only some have, calls made again."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from helpers.casts import quantize
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from mxcompile import ops
from mxcompile.formats import Copy, Format
from mxcompile.graph.opsets import aten
from mxcompile.graph.transpose import readers
from mxcompile.ops import view

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
WORD, OTHER = str(Format()), "e4m3 tensor nearest"
COPIES = [str(Copy(format=Format()))]
KINDS = (
    view.Cast,
    view.Casts,
    view.Decode,
    view.Dequantize,
    view.Unpack,
    view.Product,
)


def call(target, *arguments, **named) -> fx.Node:
    graph = fx.Graph()
    nodes = {name: graph.placeholder(name) for name in "abcdefgh"}

    def as_node(argument: Any) -> Any:
        if isinstance(argument, list):
            return [as_node(part) for part in argument]
        return nodes.get(argument, argument) if isinstance(argument, str) else argument

    args = tuple(map(as_node, arguments))
    return graph.call_function(target, args, {name: as_node(argument) for name, argument in named.items()})


def test_defaults_and_keywords_are_read():
    plain = view.Cast.read(call(ops.cast, "a", COPIES))
    assert (plain.stream, plain.scale, plain.copy, plain.side) == (0, None, Copy(format=Format()), -1)
    named = view.Cast.read(call(ops.cast, "a", COPIES, scales=["b"]))
    assert (str(named.scale), named.fmt) == ("b", "e4m3 1x32 rceil")


def test_arguments_of_aten_are_read_by_name():
    """By position, by keyword, by default; an argument that the schema lacks is an error."""
    sliced = call(aten.slice.Tensor, "a", 1, end=4)
    names = ("dim", "start", "end", "step")
    assert [view.argument_of(sliced, name) for name in names] == [1, None, 4, 1]
    assert str(view.argument_of(sliced, "self")) == "a"
    assert view.argument_of(call(aten.unbind.int, "a"), "dim") == 0
    with pytest.raises(KeyError):
        view.argument_of(sliced, "index")


def test_product_view_reads_matmul_and_grouped_matmul():
    product = view.Product.read(call(ops.matmul, "a", "b", "c", "d", None, BF16, WORD, OTHER))
    assert (product.words, product.extra, product.is_grouped) == ((WORD, OTHER), None, False)
    assert not product.is_mx
    grouped = view.Product.read(call(ops.grouped_matmul, "a", "b", "c", "d", "e", BF16, WORD, WORD))
    assert (grouped.is_grouped, grouped.is_mx, grouped.is_packed) == (True, True, False)
    assert [str(node) for side in grouped.sides for node in side] == ["a", "b", "c", "d"]
    assert str(grouped.extra) == "e"


def test_other_calls_have_no_view():
    node = call(aten.mm.default, "a", "b")
    assert view.Cast.from_node(node) is view.Product.from_node(node) is view.Cast.from_node(None) is None
    with pytest.raises(AssertionError, match="is not a call of Cast"):
        view.Cast.read(node)


def test_a_call_is_made_again_with_changes():
    cast = view.Cast.read(call(ops.cast, "a", COPIES, None, 0))
    assert cast.arguments() == (cast.x, COPIES)
    scaled = view.Cast.read(call(ops.cast, "a", COPIES, None, 0, ["b"]))
    assert scaled.arguments(stream=3) == (scaled.x, COPIES, None, 3, [scaled.scale])
    with pytest.raises(AssertionError, match="has no argument"):
        cast.arguments(square=True)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_fields_are_arguments_of_the_operators(kind: type[view.View]):
    """Every argument of an operator is a field, and every field is an argument of some operator."""
    arguments = [{argument.name for argument in op._schema.arguments} for op in kind.operators]
    names = {field.name for field in fields(kind) if field.name != "node"}
    assert names == set().union(*arguments)


def test_results_and_who_made_them():
    module = make_fx(lambda x: quantize(x, -1, E4M3, "rceil")[1] + 1, tracing_mode="fake")(torch.randn(4, 64))
    (cast,) = module.graph.find_nodes(op="call_function", target=ops.cast)
    results = dict(view.results_of(cast))
    assert view.result_of(results[1]) == (cast, 1)
    assert view.result_of(cast) == (None, -1)


def test_readers_look_through_transposes():
    def function(x):
        y = x + 1
        return y.t() * 2, y.t().t() * 3, y * 4

    module = make_fx(function, tracing_mode="fake")(torch.randn(4, 64))
    (addition,) = module.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    uses = list(readers(addition))
    assert sorted(reader.args[1] for reader, _ in uses) == [2, 3, 4]
    assert all(read in reader.all_input_nodes for reader, read in uses)
