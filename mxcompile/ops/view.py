"""Reads calls of operators by the argument names of their schemas. A new argument changes only this file.

Cast.from_node(node).copies       or None, if the node calls another operator: Cast, Product, Dequantize, …
argument_of(node, "dim")          an argument of any operator, also of ATen, or its default
build.call(ops.decode, *view.arguments(dtype=torch.float32), like=node)       the same call, one change
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, Self

import torch
from torch import fx

from mxcompile.formats import Copy, Format
from mxcompile.ops.cast import cast, decode
from mxcompile.ops.products import grouped_matmul, matmul


@functools.cache
def _schema(target: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Returns the argument names of an operator, in order, and the defaults by name."""
    arguments = target._schema.arguments
    defaults = {arg.name: arg.default_value for arg in arguments if arg.has_default_value()}
    return tuple(arg.name for arg in arguments), defaults


def call_of(node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """Returns the operator that `node` runs and its positional arguments.

    If `node` calls a higher-order operator around another, as `auto_functionalized`, returns the inner call.
    """
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        for index, value in enumerate(node.args):
            if isinstance(value, torch._ops.OpOverload):
                return value, node.args[index + 1 :]
    return node.target, node.args


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """Returns the arguments of `node`, a call of an operator, by name, in order, with defaults."""
    called, args = call_of(node)
    names, defaults = _schema(called)
    arguments = {**defaults, **dict(zip(names, args, strict=False)), **node.kwargs}
    return {name: arguments[name] for name in names}


def argument_of(node: fx.Node, name: str) -> Any:
    """Returns argument `name` of the call `node`, or its default. Raises `KeyError` if there is neither."""
    names, defaults = _schema(node.target)
    if name in node.kwargs:
        return node.kwargs[name]
    if name in names[: len(node.args)]:
        return node.args[names.index(name)]
    return defaults[name]


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """A call of an operator. Fields are its arguments; a field keeps its default if the operator lacks it."""

    node: fx.Node
    operators: ClassVar[frozenset[Any]]

    @classmethod
    def from_node(cls, node: Any) -> Self | None:
        """Returns the view of `node`, or None if it does not call an operator of `operators`."""
        if not isinstance(node, fx.Node) or node.target not in cls.operators:
            return None
        arguments = arguments_of(node)
        return cls(
            node=node, **{name: arguments[name] for name in cls.__dataclass_fields__ if name in arguments}
        )

    @classmethod
    def read(cls, node: fx.Node) -> Self:
        """Returns the view of `node`, which must call an operator of `operators`."""
        view = cls.from_node(node)
        assert view is not None, f"{node.format_node()} is not a call of {cls.__name__}"
        return view

    @classmethod
    def calls(cls, graph: fx.Graph) -> Iterator[Self]:
        """Yields the views of the calls of `operators` in `graph`, in order. The graph may change."""
        nodes = (graph.find_nodes(op="call_function", target=target) for target in cls.operators)
        for node in sorted(chain.from_iterable(nodes)):
            if (view := cls.from_node(node)) is not None:
                yield view

    def arguments(self, **changes: Any) -> tuple[Any, ...]:
        """Returns the arguments of this call with `changes`, in order, without trailing defaults."""
        names, defaults = _schema(self.node.target)
        values = arguments_of(self.node) | changes
        assert len(values) == len(names), f"{self.node.target} has no argument {set(values) - set(names)}"
        while names and names[-1] in defaults and values[names[-1]] == defaults[names[-1]]:
            names = names[:-1]
        return tuple(values[name] for name in names)


@dataclass(frozen=True, kw_only=True, slots=True)
class Casts(View):
    """A call of `cast`, with any number of copies. Fields: see `ops.cast`."""

    x: fx.Node
    copies: Sequence[str]
    seed: fx.Node | None = None
    stream: int = 0
    scales: Sequence[fx.Node | None] | None = None
    amaxes: Sequence[fx.Node | None] | None = None
    y: fx.Node | None = None
    operators: ClassVar[frozenset[Any]] = frozenset({cast})

    @property
    def parsed(self) -> list[Copy]:
        """The copies, parsed."""
        return [Copy.parse(word) for word in self.copies]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cast(Casts):
    """A call of `cast` that makes a single copy of one tensor, as passes write it."""

    @classmethod
    def from_node(cls, node: Any) -> Self | None:
        """Returns the view of `node`, or None if it is not a cast to a single copy of one tensor."""
        view = super(Cast, cls).from_node(node)
        return view if view is not None and len(view.copies) == 1 and view.y is None else None

    @property
    def copy(self) -> Copy:
        """The copy, parsed."""
        return Copy.parse(self.copies[0])

    @property
    def scale(self) -> fx.Node | None:
        """The scale from earlier calls, or None."""
        return self.scales[0] if self.scales else None

    @property
    def amax(self) -> fx.Node | None:
        """The amax of the tensor for two levels, or None."""
        return self.amaxes[0] if self.amaxes else None

    @property
    def form(self) -> Format:
        """The format of the copy."""
        return self.copy.format

    @property
    def side(self) -> int:
        """The contraction dimension, counted from the last (−1)."""
        return self.copy.dim

    @property
    def fmt(self) -> str:
        """The format of the copy, as a word."""
        return str(self.form)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decode(View):
    """A call of `decode`. Fields: see `ops.cast`."""

    qdata: fx.Node
    scale: fx.Node | None
    block_dim: int
    fmt: str
    dtype: torch.dtype
    amax: fx.Node | None = None
    global_scale: fx.Node | None = None
    operators: ClassVar[frozenset[Any]] = frozenset({decode})

    @property
    def form(self) -> Format:
        """The format of the data, parsed."""
        return Format.parse(self.fmt)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dequantize(Decode):
    """A decode, with scales, of a format in which weights and caches are stored (`Format.lies_stored`)."""

    scale: fx.Node

    @classmethod
    def from_node(cls, node: Any) -> Self | None:
        """Returns the view of `node`, or None if it is not a decode of this kind."""
        view = super(Dequantize, cls).from_node(node)
        if view is None or view.scale is None:
            return None
        return view if view.form.lies_stored else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Unpack(Decode):
    """A decode of packed elements to codes, one per byte."""

    @classmethod
    def from_node(cls, node: Any) -> Self | None:
        """Returns the view of `node`, or None if it is not a decode to codes."""
        view = super(Unpack, cls).from_node(node)
        return view if view is not None and view.dtype is torch.uint8 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Product(View):
    """A GEMM a · b of quantized operands, or a GEMM per group.

    tensors: scales of tensors, which multiply the product before the bias is added.
    """

    a: fx.Node
    scale_a: fx.Node
    b: fx.Node
    scale_b: fx.Node
    out_dtype: torch.dtype
    format_a: str
    format_b: str
    bias: fx.Node | None = None
    offs: fx.Node | None = None
    tensors: Sequence[fx.Node] | None = None
    operators: ClassVar[frozenset[Any]] = frozenset({matmul, grouped_matmul})

    @property
    def is_grouped(self) -> bool:
        """Whether it is a GEMM per group."""
        return self.offs is not None

    @property
    def per_byte(self) -> int:
        """Elements per byte of an operand."""
        return self.forms[0].per_byte

    @property
    def is_packed(self) -> bool:
        """Whether operands are packed FP4."""
        return all(form.packed for form in self.forms)

    @property
    def is_mx(self) -> bool:
        """Whether operands are MXFP8."""
        return all(form.is_mx_operand for form in self.forms)

    @property
    def extra(self) -> fx.Node | None:
        """The offsets of groups if it is grouped, else the bias."""
        return self.offs if self.is_grouped else self.bias

    @property
    def sides(self) -> tuple[tuple[fx.Node, fx.Node], tuple[fx.Node, fx.Node]]:
        """Elements and scales of the left operand, and of the right operand."""
        return (self.a, self.scale_a), (self.b, self.scale_b)

    @property
    def words(self) -> tuple[str, str]:
        """The formats of both operands, as words."""
        return self.format_a, self.format_b

    @property
    def forms(self) -> tuple[Format, ...]:
        """The formats of both operands, parsed."""
        return tuple(map(Format.parse, self.words))


def results_of(node: fx.Node) -> Iterator[tuple[int, fx.Node]]:
    """Yields (index, node) for each node that picks a result of `node`, a call with several results."""
    for user in node.users:
        if user.target is operator.getitem:
            index: Any = user.args[1]
            yield index, user


def result_of(node: Any) -> tuple[fx.Node | None, int]:
    """Returns (call, index) if `node` picks the result `index` of `call`, else (None, −1)."""
    if isinstance(node, fx.Node) and node.target is operator.getitem:
        call, index = node.args
        if isinstance(call, fx.Node) and isinstance(index, int):
            return call, index
    return None, -1
