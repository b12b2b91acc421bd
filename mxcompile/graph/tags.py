"""The tags of matmuls, which passes store in ``node.meta``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true, sym_eq

from mxcompile.formats import Format
from mxcompile.policy import Block, Choice, Gemm, Layer, Reason, Role, Saved, Sent
from mxcompile.report.data.record import flops_of

KEY = "mx"
"""``node.meta`` key: the `GemmTag`s of a node."""

PASS_KEY = "mx_pass"
"""``node.meta`` key: name of the pass that created a node."""

AUTOCAST_KEY = "mxcompile_autocast_off"
"""Key in a node's ``custom`` metadata: the model disables autocast around the node."""

STATE_KEY = "mx_state"
"""``node.meta`` key: links a weight's placeholder to the placeholder of its scale state."""


class Kind(Enum):
    """The kind of a matmul."""

    LINEAR = auto()  # one operand depends on parameters alone
    PRODUCT = auto()  # both operands depend on activations, or none does
    ATTENTION = auto()  # one of the two products inside an attention operator
    QUANTIZED = auto()  # already quantized by the model
    OPAQUE = auto()  # inside an operator that no pass can decompose
    TANGENT = auto()  # part of a forward-mode derivative
    CONVOLUTION = auto()  # not pointwise, so not a linear layer


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """The reason for a GEMM's role.

    holds: matched properties of the graph. nearest: the closest rejected role with its matched and failed
    conditions; "" without one.
    """

    holds: str = ""
    nearest: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmTag:
    """One GEMM: its sizes, its layer, and the decision for it.

    index: number of this GEMM in its graph. layer: name of the layer's forward node, shared by all its GEMMs.
    name: module path for users. module: class name. source: ``file:line``.
    tensors: contents of the left and right operand: "x", "w" or "dy".
    argument: whether the weight is an argument. stored: format of a weight that is stored quantized.
    recast: whether the GEMM casts such a weight again. block: the layer's position in the repeated blocks.
    batch, m, n, k: sizes; a symbolic size by its hint, None for a data-dependent size.
    role, evidence: results of the pass `classify`.
    whole: n and k of the layer if this GEMM computes a shard or a part of it, else None.
    choice, formats, saved, sent: results of the pass `decide`; `formats` is None unless the GEMM is
    quantized. forward: formats of x and w if a backward GEMM reads fprop's operands dequantized, else None.
    kernel, fallbacks: results of the lowering; reasons why preferred kernels do not run the GEMM.
    gradients: for a forward GEMM in a plan, whether its first and second operand need gradients.
    recomputed: whether activation checkpointing recomputes this GEMM in backward.
    unread: for a GEMM in a plan, whether nothing depends on its result, so that compiled code leaves it out.
    """

    layer: str
    name: str
    module: str
    source: str
    index: int = -1
    gemm: Gemm
    kind: Kind
    tensors: tuple[str, str]
    argument: bool = False
    stored: Format | None = None
    recast: bool = False
    block: Block | None = None
    batch: int | None = 1
    m: int | None = 0
    n: int | None = 0
    k: int | None = 0
    role: Role = Role.OTHER
    evidence: Evidence = Evidence()
    whole: tuple[int | None, int | None] | None = None
    choice: Choice | None = None
    formats: tuple[Format, Format] | None = None
    forward: tuple[Format, Format] | None = None
    saved: Saved = Saved.COLUMNWISE
    sent: Sent = Sent.SOURCE
    kernel: str = ""
    fallbacks: tuple[str, ...] = ()
    gradients: tuple[bool, bool] = (False, False)
    recomputed: bool = False
    unread: bool = False

    @property
    def flops(self) -> int:
        """Floating-point operations, two per multiply-add; 0 if a size is unknown."""
        return flops_of(self.batch, self.m, self.n, self.k)

    @property
    def is_layer(self) -> bool:
        """Whether a policy decides for this GEMM: it is in a linear layer, maybe in an opaque operator."""
        hidden = self.kind is Kind.OPAQUE and set(self.tensors) != {"x"}
        return hidden or self.kind is Kind.LINEAR

    def with_reason(self, more: Reason) -> GemmTag:
        """Returns the tag of a decided GEMM with a further reason for its choice."""
        assert self.choice is not None
        return replace(self, choice=replace(self.choice, reason=self.choice.reason.also(more)))

    def with_fallbacks(self, kernel: str) -> str:
        """Returns `kernel`, followed by the reasons why no other kernel runs the GEMM."""
        return "; ".join((kernel, *self.fallbacks))

    def as_layer(self) -> Layer:
        """Returns the layer of a GEMM, for matching by policy rules."""
        m, n, k = self.m, self.n, self.k
        if self.gemm is not Gemm.FPROP:
            m, n, k = (m, k, n) if self.gemm is Gemm.DGRAD else (k, m, n)
        n, k = self.whole or (n, k)
        return Layer(name=self.name, role=self.role, module=self.module, m=m, n=n, k=k, block=self.block)


def gradient_tags(tag: GemmTag) -> tuple[GemmTag, GemmTag]:
    """Returns the tags of the two GEMMs that compute the gradients of the operands of a forward GEMM."""
    m, n, k = tag.m, tag.n, tag.k
    has_weight = tag.kind in (Kind.LINEAR, Kind.CONVOLUTION)
    first, second = (("dy", "w"), ("dy", "x")) if has_weight else (("x", "x"), ("x", "x"))
    kind = Gemm.WGRAD if has_weight else Gemm.DGRAD
    return (
        replace(tag, gemm=Gemm.DGRAD, tensors=first, m=m, n=k, k=n),
        replace(tag, gemm=kind, tensors=second, m=n, n=k, k=m),
    )


def tags_of(node: fx.Node) -> tuple[GemmTag, ...]:
    """Returns the tags of `node`: one for a matmul, several for an attention, else none."""
    if node.op != "call_function":  # the placeholder of a saved value inherits its metadata
        return ()
    tags: tuple[GemmTag, ...] = node.meta.get(KEY, ())
    return tags


def tag_of(node: fx.Node) -> GemmTag | None:
    """Returns the tag of a node with exactly one GEMM, else None."""
    tags = tags_of(node)
    return tags[0] if len(tags) == 1 else None


def tagged(graph: fx.Graph) -> list[tuple[fx.Node, GemmTag]]:
    """Returns the nodes of `graph` with exactly one GEMM, in order, each with its tag."""
    return [(node, tag) for node in graph.nodes if (tag := tag_of(node)) is not None]


def set_tag(node: fx.Node, *tags: GemmTag) -> None:
    """Sets the tags of `node`."""
    node.meta[KEY] = tags


def add_fallback(node: fx.Node, reason: str) -> None:
    """Adds the reason why a preferred kernel does not run the GEMM to the tags of `node`, once."""
    for tag in tags_of(node):
        if reason not in tag.fallbacks:
            change_tag(node, tag, replace(tag, fallbacks=(*tag.fallbacks, reason)))


def change_tag(node: fx.Node, old: GemmTag, new: GemmTag) -> None:
    """Replaces the tag `old` of `node` by `new`."""
    set_tag(node, *(new if tag is old else tag for tag in tags_of(node)))


def layers(graph: fx.Graph) -> dict[str, list[tuple[fx.Node, GemmTag]]]:
    """Returns the (node, tag) pairs of the linear layers of `graph` by layer, in graph order."""
    by_name: dict[str, list[tuple[fx.Node, GemmTag]]] = {}
    for node in graph.nodes:
        for tag in tags_of(node):
            if tag.is_layer:
                by_name.setdefault(tag.layer, []).append((node, tag))
    return by_name


def tensor(node: Any) -> torch.Tensor | None:
    """Returns the fake tensor of `node`; None if `node` is not a node or its value is not a tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def value_of(node: fx.Node) -> torch.Tensor:
    """Returns the fake tensor of `node`, which must have one."""
    value = tensor(node)
    assert value is not None, f"{node} has no tensor"
    return value


Sizes = tuple[Any, Any, Any, Any]
"""(batch, m, n, k) of a product [batch, m, k] · [batch, k, n]."""

UNKNOWN: Sizes = (1, None, None, None)
"""Sizes of a product with unknown dimensions."""


def is_empty(sizes: Iterable[Any]) -> bool:
    """Whether any of `sizes` is statically 0. Adds no guard."""
    return any(isinstance(size, int) and size == 0 for size in sizes)


def size_or_none(size: Any) -> int | None:
    """Returns a size as an int, a symbolic size by its hint; None for a data-dependent size. Adds no guard.

    Data-dependent sizes can have override hints (``mark_unbacked``, the pass `hint_expert_splits`).
    """
    if size is None or isinstance(size, int):
        return size
    if size.node.has_hint() and size.node.hint is not None:
        return int(size.node.hint)
    value = size.node.expr.xreplace(getattr(size.node.shape_env, "var_to_hint_override", {}))
    return int(value) if value.is_number else None


def hint(size: Any) -> int:
    """Returns `size_or_none` of `size`, or 1 if it is unknown, for estimates that need a number."""
    value = size_or_none(size)
    return 1 if value is None else value


def lies_in_order(value: torch.Tensor) -> bool:
    """Whether `value` surely is contiguous; a size that data decides gets no guard."""
    if not free_unbacked_symbols(value):
        return value.is_contiguous()
    strides = [math.prod(value.shape[dim + 1 :]) for dim in range(value.ndim)]
    return statically_known_true(sym_eq([*value.stride()], strides))


def numel(shape: Iterable[Any]) -> int:
    """Returns the number of elements of `shape`, symbolic sizes by their hint."""
    return math.prod(map(hint, shape))


def bytes_of(value: Any) -> int:
    """Returns the bytes of a tensor, symbolic sizes by their hint; 0 for other values."""
    return numel(value.shape) * value.element_size() if isinstance(value, torch.Tensor) else 0
