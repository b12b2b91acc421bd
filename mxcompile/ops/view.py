"""Calls of operators, read by the names of their schemas: one more argument is a change here alone.

Cast.of(node).copies              Product.of(node).scale_b          None for calls of other operators
argument_of(node, "dim")          of any operator, ATen's too, with the default
build.call(ops.decode, *view.arguments(dtype=torch.float32), like=node)                   made again
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import torch
from torch import fx

from mxcompile.formats import Copy, Format
from mxcompile.ops.cast import cast, decode
from mxcompile.ops.general import grouped_matmul, matmul


@functools.cache
def _schema(target: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Names of the arguments of an operator, in order, and the defaults of those that have one."""
    arguments = target._schema.arguments
    defaults = {each.name: each.default_value for each in arguments if each.has_default_value()}
    return tuple(each.name for each in arguments), defaults


def call_of(node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """Returns the operator that `node` runs and its positional arguments.

    The operator is the wrapped one, if `node` calls `auto_functionalized` or runs with a saved random state.
    """
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        for place, value in enumerate(node.args):
            if isinstance(value, torch._ops.OpOverload):
                return value, node.args[place + 1 :]
    return node.target, node.args


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The arguments of `node`, a call of an operator, by their names in order, with defaults."""
    called, args = call_of(node)
    names, defaults = _schema(called)
    given = {**defaults, **dict(zip(names, args, strict=False)), **node.kwargs}
    return {name: given[name] for name in names}


def argument_of(node: fx.Node, name: str) -> Any:
    """The argument `name` of `node`, a call of an operator, or its default. Raises `KeyError` for others."""
    names, defaults = _schema(node.target)
    if name in node.kwargs:
        return node.kwargs[name]
    if name in names[: len(node.args)]:
        return node.args[names.index(name)]
    return defaults[name]


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """One call of an operator. An argument that the operator does not have is the default of its field."""

    node: fx.Node
    operators: ClassVar[frozenset[Any]]

    @classmethod
    def of(cls, node: Any) -> Self | None:
        """The view of `node`; None if it is not a call of one of `operators`."""
        if not isinstance(node, fx.Node) or node.target not in cls.operators:
            return None
        given = arguments_of(node)
        known = {field.name: given[field.name] for field in fields(cls) if field.name in given}
        return cls(node=node, **known)

    @classmethod
    def read(cls, node: fx.Node) -> Self:
        """The view of `node`, a call of one of `operators`."""
        view = cls.of(node)
        assert view is not None, f"{node.format_node()} is not a call of {cls.__name__}"
        return view

    def arguments(self, **changes: Any) -> tuple[Any, ...]:
        """The arguments of the same call with `changes`, in order; trailing defaults are left out."""
        names, defaults = _schema(self.node.target)
        values = arguments_of(self.node) | changes
        assert len(values) == len(names), f"{self.node.target} has no argument {set(values) - set(names)}"
        while names and names[-1] in defaults and values[names[-1]] == defaults[names[-1]]:
            names = names[:-1]
        return tuple(values[name] for name in names)


@dataclass(frozen=True, kw_only=True, slots=True)
class Casts(View):
    """A cast: the `copies` of `x`, and of `y` if there is one. Other fields: see `ops.cast`."""

    x: fx.Node
    copies: Sequence[str]
    seed: fx.Node | None = None
    stream: int = 0
    scales: Sequence[fx.Node | None] | None = None
    amaxes: Sequence[fx.Node | None] | None = None
    y: fx.Node | None = None
    operators: ClassVar[frozenset[Any]] = frozenset({cast})

    @property
    def each(self) -> list[Copy]:
        """The copies as values."""
        return [Copy.of(word) for word in self.copies]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cast(Casts):
    """A cast that makes one copy, as passes write it."""

    @classmethod
    def of(cls, node: Any) -> Self | None:
        """The view of `node`; None if it is not a cast that makes one copy of one tensor."""
        view = super(Cast, cls).of(node)
        return view if view is not None and len(view.copies) == 1 and view.y is None else None

    @property
    def copy(self) -> Copy:
        """The copy."""
        return Copy.of(self.copies[0])

    @property
    def scale(self) -> fx.Node | None:
        """Its scale, where that is known before."""
        return self.scales[0] if self.scales else None

    @property
    def amax(self) -> fx.Node | None:
        """The amax of the tensor, for two levels."""
        return self.amaxes[0] if self.amaxes else None

    @property
    def form(self) -> Format:
        """The format."""
        return self.copy.format

    @property
    def side(self) -> int:
        """The dimension of blocks, counted from the last, which is −1."""
        return self.copy.dim

    @property
    def fmt(self) -> str:
        """The word of the format."""
        return str(self.form)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decode(View):
    """Values of data in the format `fmt`. Other fields: see `ops.cast`."""

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
        """The format."""
        return Format.of(self.fmt)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dequantize(Decode):
    """Values of data as weights and caches are stored: MXFP8 with a scale for every row, or packed."""

    scale: fx.Node

    @classmethod
    def of(cls, node: Any) -> Self | None:
        """The view of `node`; None if it is not the values of such data."""
        view = super(Dequantize, cls).of(node)
        if view is None or view.scale is None:
            return None
        return view if view.form.packed or view.form.is_mx_rows else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Unpack(Decode):
    """Codes, one a byte, of a weight whose codes are packed."""

    @classmethod
    def of(cls, node: Any) -> Self | None:
        """The view of `node`; None if it is not the codes of such a weight."""
        view = super(Unpack, cls).of(node)
        return view if view is not None and view.dtype is torch.uint8 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Product(View):
    """A GEMM of quantized operands a · b, or one for each group.

    tensors: the scales of tensors, by which the product is multiplied before the bias is added.
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
        """Whether there is a product for each group."""
        return self.offs is not None

    @property
    def per_byte(self) -> int:
        """How many elements of an operand share a byte."""
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
        """The bias, or the offsets of groups."""
        return self.offs if self.is_grouped else self.bias

    @property
    def sides(self) -> tuple[tuple[fx.Node, fx.Node], tuple[fx.Node, fx.Node]]:
        """Elements and scales, of the left operand and of the right."""
        return (self.a, self.scale_a), (self.b, self.scale_b)

    @property
    def words(self) -> tuple[str, str]:
        """The formats of both operands, as the operators take them."""
        return self.format_a, self.format_b

    @property
    def forms(self) -> tuple[Format, ...]:
        """The formats of both operands as values."""
        return tuple(map(Format.of, self.words))


def results_of(node: fx.Node) -> Iterator[tuple[int, fx.Node]]:
    """The nodes that pick the results of `node`, a call that returns several, with their places."""
    for user in node.users:
        if user.target is operator.getitem:
            place: Any = user.args[1]
            yield place, user


def result_of(node: Any) -> tuple[fx.Node | None, int]:
    """The call that `node` picks a result of, and the place of that; None and −1 if it is not such a node."""
    if isinstance(node, fx.Node) and node.target is operator.getitem:
        call, place = node.args
        if isinstance(call, fx.Node) and isinstance(place, int):
            return call, place
    return None, -1
