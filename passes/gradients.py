"""Matches each backward product with the forward product whose gradient it computes.

    y = x·Wᵀ (fprop)    dx = dy·W (dgrad)    dW = dyᵀ·x (wgrad)

AOTAutograd numbers operators: a gradient has the number of its forward product, and shares an operand with
it. Derivatives that the compiled code takes itself (``torch.func.grad``) and bodies of other operators have
no numbers. There, dx is the product that reads W along its other dimension. dW is the product with a result
of the size of W that reads x, or the dy of such a dx. If several layers fit, the last layer of the forward
comes first, because backward runs in reverse. A forward product whose value nobody reads is not in the graph:
dx stands for it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from mxcompile.graph.attention import ATTENTION_BACKWARD, ATTENTION_FORWARD
from mxcompile.graph.opsets import CONJUGATES, TRANSPARENT, argument, gradient_index, is_matmul, packet
from mxcompile.graph.shapes import matmul_sizes, operands
from mxcompile.graph.tags import Kind, hint, tags_of
from mxcompile.graph.transpose import readers
from mxcompile.passes.roles.flow import DERIVATIVE, Depends, is_derivative, origin
from mxcompile.policy import Gemm


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradient:
    """A backward product: the GEMM `gemm` for the product `forward`. tensors: names of its operands."""

    forward: fx.Node
    gemm: Gemm
    tensors: tuple[str, str]


class Gradients:
    """The forward products of a graph, by numbers and operands that their gradients share with them."""

    def __init__(self, depends: Mapping[fx.Node, Depends]) -> None:
        self._depends = depends
        self._by_number: defaultdict[int, list[fx.Node]] = defaultdict(list)
        self._by_operand: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
        self._by_dy: defaultdict[fx.Node, list[tuple[fx.Node, fx.Node]]] = defaultdict(list)
        self._matched: set[tuple[fx.Node, Gemm]] = set()
        self._without_forward: set[fx.Node] = set()

    def add(self, forward: fx.Node) -> None:
        """Adds `forward`, a tagged product of the forward."""
        number = _number(forward)
        if number >= 0:
            self._by_number[number].append(forward)
        for operand in _sources(forward):
            self._by_operand[operand].append(forward)

    def add_without_forward(self, node: fx.Node) -> None:
        """Adds `node`, the tagged dgrad of a layer whose forward product is not in the graph."""
        dy, weight = (_source(operands(node)[tags_of(node)[0].tensors.index(name)]) for name in ("dy", "w"))
        self._by_operand[weight].append(node)
        self._by_dy[dy].append((node, node))
        self._without_forward.add(node)

    def is_read(self, weight: fx.Node) -> bool:
        """Whether a layer or another operator of the forward reads `weight`."""
        source = _source(weight)
        users = (user for user, _ in readers(source, lambda node: packet(node) in TRANSPARENT))
        return source in self._by_operand or any(not self._depends[user] & DERIVATIVE for user in users)

    def match(self, node: fx.Node, *, of_data: bool = False) -> Gradient | None:
        """Returns the gradient that the backward product `node` computes, None if no forward product fits.

        of_data: whether to match `node` as a gradient that reads no weight (wgrad), if several forward
        products fit. Match these after all dgrads, because both gradients of a layer share dy.
        """
        shared = _sources(node)
        numbered = [(n, tags_of(n)[0]) for n in self._by_number[_number(node)]]
        same = [n for n, _ in numbered if is_matmul(n) is is_matmul(node)]
        near = dict.fromkeys(n for source in shared for n in self._by_operand.get(source, ()) if n < node)
        hidden = [n for n, tag in numbered if tag.kind is Kind.OPAQUE and tag.is_layer]
        if packet(node) in ATTENTION_BACKWARD:
            fitting = [n for n in same or near if packet(n) in ATTENTION_FORWARD]
        elif not is_matmul(node):
            fitting = same
        elif hidden:  # the operator's own backward, in plain products
            fitting = hidden
        else:
            fitting = [n for n in same if n in near] or [n for n in near if _has_flops_of(node, n)]
            if len(fitting) != 1 or fitting[0] not in same:
                fitting = self._fitting(node, fitting, of_data=of_data)
        return self._gradient(node, fitting[-1]) if fitting else None

    def _fitting(self, node: fx.Node, near: list[fx.Node], *, of_data: bool) -> list[fx.Node]:
        """Returns the products that `node` can be a gradient of; products still without one come last.

        near: the forward products that share an operand with `node`.
        """
        sources = _sources(node)
        if not of_data:
            fitting = [n for n in near if _weight(n) in sources and _reads_across(node, n)]
            return sorted(fitting, key=lambda n: (n, Gemm.DGRAD) not in self._matched)
        dys = [read for source in sources for read in self._by_dy.get(source, ())]
        dys.sort(key=lambda read: (read[0] < node, read))  # puts the dgrad right before `node` last
        same_flops = [n for _, n in dys if _has_flops_of(node, n)]
        alone = [n for n in same_flops if n in self._without_forward]
        layers = [n for n in same_flops if n in near] or alone or near or same_flops
        fitting = [n for n in layers if _weight(n) is None or _has_size_of_weight(node, n)]
        return sorted(fitting, key=lambda n: (n, Gemm.WGRAD) not in self._matched)

    def _gradient(self, node: fx.Node, forward: fx.Node) -> Gradient:
        tag = tags_of(forward)[0]
        if tag.kind is not Kind.LINEAR:
            is_wgrad = tag.kind is Kind.CONVOLUTION and gradient_index(node) == 1
            return Gradient(forward=forward, gemm=Gemm.WGRAD if is_wgrad else Gemm.DGRAD, tensors=("x", "x"))
        of_forward = dict(zip(tag.tensors, map(_source, operands(forward)), strict=True))
        lhs, rhs = map(_source, operands(node))
        other = "w" if of_forward["w"] in (lhs, rhs) else "x"
        gemm, kept = Gemm.DGRAD if other == "w" else Gemm.WGRAD, of_forward.get(other)
        if (lhs is kept) != (rhs is kept):
            dy_is_lhs = rhs is kept
        elif (lhs in self._by_dy) != (rhs in self._by_dy):
            dy_is_lhs = lhs in self._by_dy
        else:
            dy_is_lhs = Depends.GRADIENT in self._depends[operands(node)[0]]
        if gemm is Gemm.DGRAD:
            self._by_dy[lhs if dy_is_lhs else rhs].append((node, forward))
        self._matched.add((forward, gemm))
        return Gradient(forward=forward, gemm=gemm, tensors=("dy", other) if dy_is_lhs else (other, "dy"))


def _number(node: fx.Node) -> int:
    """Returns autograd's sequence number, which a forward product shares with its gradients; -1 without."""
    return -1 if is_derivative(node) else node.meta.get("seq_nr", -1)


def _source(operand: fx.Node) -> fx.Node:
    """Returns the origin of an operand, also behind conjugation: gradients conjugate complex operands."""
    operand = origin(operand)
    while packet(operand) in CONJUGATES:
        operand = origin(argument(operand))
    return operand


def _sources(node: fx.Node) -> frozenset[fx.Node]:
    """Returns the origins of the operands of `node`; if it is not a plain product, of all its inputs."""
    read = operands(node) if is_matmul(node) else node.all_input_nodes
    return frozenset(_source(operand) for operand in read if isinstance(operand, fx.Node))


def _weight(forward: fx.Node) -> fx.Node | None:
    """Returns the weight of the forward product `forward`, None if it is not a layer."""
    tag = tags_of(forward)[0]
    return _source(operands(forward)[tag.tensors.index("w")]) if tag.kind is Kind.LINEAR else None


def _has_flops_of(node: fx.Node, forward: fx.Node) -> bool:
    """Whether `node` has the FLOPs of `forward`, or a multiple: ``jacrev`` batches many into one product."""
    if not is_matmul(forward):
        return False
    flops, base = (math.prod(map(hint, matmul_sizes(product))) for product in (node, forward))
    return flops == base or (is_derivative(node) and base > 0 and flops % base == 0)


def _reads_across(node: fx.Node, forward: fx.Node) -> bool:
    """Whether the product `node` sums over the output features of the layer `forward`."""
    tag = tags_of(forward)[0]
    return tag.n == tag.k or hint(matmul_sizes(node)[3]) == tag.n


def _has_size_of_weight(node: fx.Node, forward: fx.Node) -> bool:
    """Whether the result of `node` has the size of the weight of `forward`, or of several stacked."""
    tag = tags_of(forward)[0]
    _, m, n, _ = map(hint, matmul_sizes(node))
    weight = hint(tag.n) * hint(tag.k)
    if not is_derivative(node) or weight == 0:
        return {m, n} == {tag.n, tag.k}
    return m * n % weight == 0 and not {m, n}.isdisjoint((tag.n, tag.k))
