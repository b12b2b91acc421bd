"""Calls of mx operators read by name: defaults, keywords, and the arguments of all of them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from torch import fx

from mxcompile import ops
from mxcompile.formats import Copy, Format
from mxcompile.graph.opsets import aten
from mxcompile.ops import view

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
    sliced = call(aten.slice.Tensor, "a", 1, end=4)
    assert [view.argument_of(sliced, name) for name in ("dim", "start", "end", "step")] == [1, None, 4, 1]
    assert str(view.argument_of(sliced, "self")) == "a"
    assert view.argument_of(call(aten.unbind.int, "a"), "dim") == 0
    with pytest.raises(KeyError):
        view.argument_of(sliced, "index")


def test_other_calls_have_no_view():
    node = call(aten.mm.default, "a", "b")
    assert view.Cast.from_node(node) is view.Product.from_node(node) is view.Cast.from_node(None) is None
    with pytest.raises(AssertionError, match="is not a call of Cast"):
        view.Cast.read(node)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_fields_are_arguments_of_the_operators(kind: type[view.View]):
    arguments = [{argument.name for argument in op._schema.arguments} for op in kind.operators]
    assert {field.name for field in fields(kind) if field.name != "node"} == set().union(*arguments)
