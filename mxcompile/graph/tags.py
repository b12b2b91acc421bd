"""The tags of matmuls: the passes write them on the node itself, and they travel with it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

import torch
from torch import fx

from mxcompile.formats import Format
from mxcompile.policy import Block, Choice, Gemm, Layer, Reason, Role, Saved, Sent
from mxcompile.report.record import flops_of

KEY = "mx"
"""Where a node's `GemmTag`s live in ``node.meta``."""

PASS_KEY = "mx_pass"
"""Where a node made by a pass says which."""


AUTOCAST_KEY = "mxcompile_autocast_off"
"""Where the ``custom`` metadata of a node says that the model turns autocast off around it."""

STATE_KEY = "mx_state"
"""Where the placeholder of a weight holds that of the state of its layer's scales."""


class Kind(Enum):
    """The kind of matmul that a node is."""

    LINEAR = auto()  # one operand depends on parameters alone
    PRODUCT = auto()  # of two activations, or of none
    ATTENTION = auto()  # one of the two products inside an attention operator
    QUANTIZED = auto()  # already quantized by the model
    OPAQUE = auto()  # inside an operator no pass can look into
    TANGENT = auto()  # of a forward-mode derivative
    CONVOLUTION = auto()  # of more than one pixel, or else no linear layer


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """Why a GEMM has its role.

    holds: what was found in the graph. nearest: the role that came nearest before it, what held of it and
    what did not; "" if none came near.
    """

    holds: str = ""
    nearest: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmTag:
    """One GEMM: what it computes, of which layer, and what is to become of it.

    index: of this GEMM in its graph. layer: name of the layer's forward node, the same on all its GEMMs.
    name: module path for users. module: class name. source: ``file:line``. tensors: what the left and right
    operand are: "x", "w" or "dy". argument: whether the weight is an argument. stored: format of a weight
    that is stored quantized. recast: whether the GEMM casts such a weight again. block: where the
    layer lies among the model's repeated ones. batch, m, n, k: sizes, symbolic ones by their hint, None for
    one that depends on data. role, evidence: from `classify`. whole: n and k of the layer of which this GEMM
    computes a shard or a part; None where it computes all. choice, formats (of the operands; None unless the
    GEMM is quantized), saved, sent: from `decide`. kernel: from the lowering. fallbacks: from there too, the
    reasons why a kernel that is for such a GEMM does not run it. gradients: of a forward GEMM in a plan,
    whether its first and its second operand need gradients. again: whether a checkpoint runs this GEMM once
    more before it computes them.
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
    saved: Saved = Saved.COLUMNWISE
    sent: Sent = Sent.SOURCE
    kernel: str = ""
    fallbacks: tuple[str, ...] = ()
    gradients: tuple[bool, bool] = (False, False)
    again: bool = False

    @property
    def flops(self) -> int:
        """Floating-point operations: two per multiply-add; 0 where a size is not known."""
        return flops_of(self.batch, self.m, self.n, self.k)

    @property
    def is_layer(self) -> bool:
        """Whether it is of a linear layer, one inside of an operator among them: a policy decides for it."""
        hidden = self.kind is Kind.OPAQUE and set(self.tensors) != {"x"}
        return hidden or self.kind is Kind.LINEAR

    def with_reason(self, more: Reason) -> GemmTag:
        """The same, of a GEMM that is decided, with a further reason for its choice."""
        assert self.choice is not None
        return replace(self, choice=replace(self.choice, reason=self.choice.reason.also(more)))

    def with_fallbacks(self, kernel: str) -> str:
        """`kernel` and why no other runs the GEMM, in words."""
        return "; ".join((kernel, *self.fallbacks))

    def as_layer(self) -> Layer:
        """The layer as a policy rule sees it; for a forward GEMM."""
        n, k = self.whole or (self.n, self.k)
        return Layer(
            name=self.name,
            role=self.role,
            module=self.module,
            m=self.m,
            n=n,
            k=k,
            block=self.block,
        )


def gradient_tags(tag: GemmTag) -> tuple[GemmTag, GemmTag]:
    """Returns the two GEMMs that compute the gradients of the operands of `tag`, a forward GEMM."""
    m, n, k = tag.m, tag.n, tag.k
    has_weight = tag.kind in (Kind.LINEAR, Kind.CONVOLUTION)
    first, second = (("dy", "w"), ("dy", "x")) if has_weight else (("x", "x"), ("x", "x"))
    kind = Gemm.WGRAD if has_weight else Gemm.DGRAD
    return (
        replace(tag, gemm=Gemm.DGRAD, tensors=first, m=m, n=k, k=n),
        replace(tag, gemm=kind, tensors=second, m=n, n=k, k=m),
    )


def tags_of(node: fx.Node) -> tuple[GemmTag, ...]:
    """The GEMMs `node` stands for: one for a matmul, several for an attention, else none."""
    if node.op != "call_function":  # the placeholder of a saved value inherits its metadata
        return ()
    tags: tuple[GemmTag, ...] = node.meta.get(KEY, ())
    return tags


def tag_of(node: fx.Node) -> GemmTag | None:
    """The tag of a node that is one matmul; None for all others."""
    tags = tags_of(node)
    return tags[0] if len(tags) == 1 else None


def set_tag(node: fx.Node, *tags: GemmTag) -> None:
    """Make `tags` the tags of `node`."""
    node.meta[KEY] = tags


def add_fallback(node: fx.Node, reason: str) -> None:
    """Note on the tags of `node` why a kernel that is for such a GEMM does not run it, once."""
    known = (
        tag if reason in tag.fallbacks else replace(tag, fallbacks=(*tag.fallbacks, reason))
        for tag in tags_of(node)
    )
    set_tag(node, *known)


def change_tag(node: fx.Node, old: GemmTag, new: GemmTag) -> None:
    """Put `new` in the place of the tag `old` of `node`."""
    set_tag(node, *(new if tag is old else tag for tag in tags_of(node)))


def layers(graph: fx.Graph) -> dict[str, list[tuple[fx.Node, GemmTag]]]:
    """The GEMMs of `graph` that a policy decides for by layer, each layer's in graph order."""
    found: dict[str, list[tuple[fx.Node, GemmTag]]] = {}
    for node in graph.nodes:
        for tag in tags_of(node):
            if tag.is_layer:
                found.setdefault(tag.layer, []).append((node, tag))
    return found


def tensor(node: Any) -> torch.Tensor | None:
    """The fake tensor of `node`, or None if it is not a node or has another value."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def value_of(node: fx.Node) -> torch.Tensor:
    """The fake tensor of `node`, which has one."""
    value = tensor(node)
    assert value is not None, f"{node} has no tensor"
    return value


Sizes = tuple[Any, Any, Any, Any]
"""batch, m, n, k of a product [batch, m, k] · [batch, k, n]."""

UNKNOWN: Sizes = (1, None, None, None)
"""Of a product of which nothing is known."""


def is_empty(sizes: Iterable[Any]) -> bool:
    """Whether one of `sizes` is known to be 0. Adds no guard."""
    return any(isinstance(size, int) and size == 0 for size in sizes)


def known(size: Any) -> int | None:
    """A size as an integer, a symbolic one by its hint; None for one that depends on data. Adds no guard.

    Sizes that depend on data may have hints of their own (``mark_unbacked``, the pass `hint_expert_splits`).
    """
    if size is None or isinstance(size, int):
        return size
    if size.node.has_hint() and size.node.hint is not None:
        return int(size.node.hint)
    value = size.node.expr.xreplace(getattr(size.node.shape_env, "var_to_hint_override", {}))
    return int(value) if value.is_number else None


def hint(size: Any) -> int:
    """`known`, with 1 for a size that is not: for choices and sums that need a number."""
    value = known(size)
    return 1 if value is None else value


def numel(shape: Iterable[Any]) -> int:
    """Number of elements of a tensor of `shape`, symbolic sizes by their hint."""
    return math.prod(map(hint, shape))


def bytes_of(value: Any) -> int:
    """Bytes of a tensor, symbolic sizes by their hint; 0 for anything else."""
    return numel(value.shape) * value.element_size() if isinstance(value, torch.Tensor) else 0
