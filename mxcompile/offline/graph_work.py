"""The work of the launches that a partitioned graph becomes, reckoned before any code is generated.

    product, attention   one launch each: its operations, the bytes of its operands and results
    cast, rest           what may run together is one launch: nodes that reach each other between the same
                         products; it reads and writes what crosses its border, once
    collective           no launch, but a border as a product is

A launch reads its inputs twice where it also sums over rows (the gradient of a norm's weight), or where casts
follow a statistic of each row (a norm, then codes), as the generated code does. Coarser than `generate`,
which has the machine code: no instructions, no configurations, and products that are emulated read codes as
they are, not as BF16 values.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from networkx.utils import UnionFind
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from mxcompile import ops
from mxcompile.formats import ScaleType
from mxcompile.graph.attention import ATTENTION_BACKWARD, ATTENTIONS
from mxcompile.graph.opsets import (
    LOOKUPS,
    REDUCTIONS,
    VIEWS,
    aten,
    packet,
)
from mxcompile.graph.tags import GemmTag, bytes_of, tags_of
from mxcompile.lowering.targets import Target
from mxcompile.models.names import module_of
from mxcompile.offline.device import attention_backend, attention_flops
from mxcompile.offline.estimate import Work, library_work
from mxcompile.ops.view import Product, arguments_of

Works = Counter[tuple[str, Work]]
"""How often each kind of launch (see `Launch.kind`) with its work runs."""

_TILES = {"tensor": "fp8_tensor", "channel": "fp8_channel"}


def works(graph: fx.Graph, target: Target, count: Callable[[str], int]) -> Works:
    """The work of `graph`, forward or backward, on `target`, which has peaks.

    count: how many layers the module at a path stands for.
    """
    reader = _Reader(target)
    total: Works = Counter()
    for node in graph.nodes:
        if node.op == "call_function" and tags_of(node):
            tags = tags_of(node)
            total[reader.product(node, tags)] += count(tags[0].name)
    for members in _launches(graph):
        entry = reader.streamed(members)
        if entry is not None:
            total[entry] += max(count(module_of(node)[0]) for node in members)
    return total


def unwritten(graph: fx.Graph) -> set[fx.Node]:
    """The nodes of `graph` whose results stay inside of a launch."""
    inside: set[fx.Node] = set()
    for members in _launches(graph):
        group = set(members)
        inside |= {node for node in members if not _leaves(node, group)}
    return inside


def is_collective(node: fx.Node) -> bool:
    """Whether `node` sends or waits for what is sent."""
    return str(packet(node)).startswith("_c10d_functional")


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads the work of launches off a graph. target: the chip that it is for."""

    target: Target

    def product(self, node: fx.Node, tags: tuple[GemmTag, ...]) -> tuple[str, Work]:
        """The launch of a node that multiplies matrices."""
        moved = sum(self._bytes(base(each)) for each in dict.fromkeys(node.all_input_nodes))
        moved += self._bytes(node)
        if packet(node) in ATTENTIONS:
            kind = self._attention(node)
            return "attention", self._library(moved, attention_flops(node), kind)
        return "product", self._library(moved, sum(tag.flops for tag in tags), self._rate(node, tags[0]))

    def _library(self, num_bytes: float, flops: float, kind: str) -> Work:
        return library_work(num_bytes=num_bytes, flops=flops, product=kind, target=self.target)

    def _attention(self, node: fx.Node) -> str:
        masked = arguments_of(node).get("attn_mask") is not None
        backend = "efficient" if masked else attention_backend(self.target)
        return f"{backend}_backward" if packet(node) in ATTENTION_BACKWARD else backend

    def _rate(self, node: fx.Node, tag: GemmTag) -> str:
        """The kind of rate of a product."""
        if packet(node) in ops.PACKED_PRODUCTS:
            return self._fp4_rate(Product.read(node))
        if tag.formats is not None:
            if self.target.multiplies_mx(*tag.formats):
                return "mxfp8" if self.target.has_library_mx else "own_mxfp8"
            tiles = [str(form.tile) for form in tag.formats]
            scaled = all(form.scale is ScaleType.FP32 for form in tag.formats)
            if scaled and self.target.multiplies_fp8(tiles[0], tiles[1]):
                return _TILES.get(tiles[0], "fp8_block")
            return "bf16"
        value = node.meta.get("val")
        return "fp32" if isinstance(value, Tensor) and value.element_size() > 2 else "bf16"

    def _fp4_rate(self, product: Product) -> str:
        """The kind of rate of a product of packed operands: a library's, of matrices in NVFP4."""
        scale = product.forms[0].scale
        theirs = scale is ScaleType.E4M3 and scale in self.target.library_fp4
        return (
            "fp4" if theirs and not product.is_grouped and product.node.meta["val"].ndim == 2 else "own_fp4"
        )

    def streamed(self, members: list[fx.Node]) -> tuple[str, Work] | None:
        """A launch of `members`; None if it moves nothing."""
        inside = set(members)
        read = self._read(members, inside)
        written = sum(self._bytes(node) for node in _results(members) if _leaves(node, inside))
        operators = {packet(node) for node in members}
        times = 2 if _reads_again(members, is_cast=not operators.isdisjoint(ops.CASTS)) else 1
        moved = times * read + written
        kind = "rest" if operators.isdisjoint(ops.CAST_WORK) else "cast"
        return (kind, Work(num_bytes=float(moved))) if moved else None

    def _read(self, members: list[fx.Node], inside: set[fx.Node]) -> int:
        """Bytes of what comes from outside: of a tensor seen through views no more than they show of it."""
        views: defaultdict[fx.Node, dict[fx.Node, int]] = defaultdict(dict)
        for node in members:
            for given in node.all_input_nodes:
                source = base(given)
                if _producer(source) not in inside:
                    shown = self._bytes(node if packet(node) in LOOKUPS else given)
                    views[source][given] = shown
        return sum(min(self._bytes(source), sum(shown.values())) for source, shown in views.items())

    def _bytes(self, node: fx.Node) -> int:
        """Bytes of the value of `node`."""
        return sum(map(bytes_of, tree_leaves(node.meta.get("val"))))


def _launches(graph: fx.Graph) -> Iterable[list[fx.Node]]:
    """The nodes of each launch that multiplies nothing, in order."""
    levels = _levels(graph)
    joined = UnionFind(levels)
    casts: dict[tuple[fx.Node, int], fx.Node] = {}
    for node, level in levels.items():
        for given in map(base, node.all_input_nodes):
            given = _producer(given)
            if levels.get(given) == level:
                joined.union(node, given)
            elif packet(node) in ops.CASTS:
                joined.union(node, casts.setdefault((given, level), node))
    place = {node: index for index, node in enumerate(levels)}
    return [sorted(group, key=place.__getitem__) for group in joined.to_sets()]


def _leaves(result: fx.Node, inside: set[fx.Node]) -> bool:
    """Whether anything outside reads `result`, itself or through views."""
    return any(_leaves(user, inside) if _is_view(user) else user not in inside for user in result.users)


def _is_view(node: fx.Node) -> bool:
    return packet(node) in VIEWS


def base(node: fx.Node) -> fx.Node:
    """The tensor that `node` is a view of."""
    while _is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _producer(node: fx.Node) -> fx.Node:
    """The operator of which `node` is a result."""
    while node.target is operator.getitem:
        node = node.all_input_nodes[0]
    return node


def _is_border(node: fx.Node) -> bool:
    return bool(tags_of(node)) or is_collective(node)


def _computes(node: fx.Node) -> bool:
    """Whether `node` is part of a launch that multiplies nothing."""
    is_passed = _is_view(node) or node.target is operator.getitem or packet(node) is aten.full
    return node.op == "call_function" and not is_passed and not _is_border(node)


def _levels(graph: fx.Graph) -> dict[fx.Node, int]:
    """For each computing node how many borders lie before it, at most; as late as its readers allow.

    What is recomputed for a later product is so part of the launch that needs it.
    """
    early: dict[fx.Node, int] = {}
    for node in graph.nodes:
        given = node.all_input_nodes
        early[node] = max((early[each] + _is_border(each) for each in given), default=0)
    late: dict[fx.Node, int] = {}
    for node in reversed(graph.nodes):
        users = [late[user] for user in node.users if user.op != "output"]
        kept = any(user.op == "output" for user in node.users)
        late[node] = early[node] if kept or _is_border(node) or not users else min(users)
    return {node: late[node] for node in graph.nodes if _computes(node)}


def _results(members: list[fx.Node]) -> Iterable[fx.Node]:
    """The tensors that `members` compute."""
    for node in members:
        items = [user for user in node.users if user.target is operator.getitem]
        yield from items or [node]


def _reads_again(members: list[fx.Node], *, is_cast: bool) -> bool:
    rows = columns = False
    for node in members:
        if packet(node) in REDUCTIONS and node.all_input_nodes:
            given, value = node.all_input_nodes[0].meta.get("val"), node.meta.get("val")
            if isinstance(given, Tensor) and isinstance(value, Tensor) and given.ndim > 1:
                whole = value.ndim and value.shape[-1] == given.shape[-1]
                rows, columns = rows or bool(whole), columns or not whole
    return rows or (columns and is_cast)
