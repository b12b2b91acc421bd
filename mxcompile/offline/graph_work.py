"""Estimates the work of the launches of a partitioned graph before code generation.

    product, attention   one launch each: its FLOPs, and the bytes of its operands and results
    cast, rest           one launch per fusible group: connected nodes between the same products; it reads and
                         writes the tensors at its border once
    collective           no launch, but a fusion border like a product

A launch reads its inputs twice if it also sums over rows (the gradient of a norm's weight), or if casts
follow a row statistic (a norm, then quantization), as the generated code does. This is coarser than
`generate`, which has the machine code: it has no instructions and no configurations, and emulated products
read qdata instead of BF16 values.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from networkx.utils import UnionFind
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from mxcompile import ops
from mxcompile.graph.attention import ATTENTION_BACKWARD, ATTENTIONS
from mxcompile.graph.opsets import LOOKUPS, REDUCTIONS, VIEWS, aten, called_packet, packet
from mxcompile.graph.tags import GemmTag, bytes_of, tags_of
from mxcompile.lowering.choices.families import Family, families
from mxcompile.lowering.targets import Target
from mxcompile.models.names import module_of
from mxcompile.offline.device import attention_backend, attention_flops
from mxcompile.offline.estimate import Work, library_work, product_kind
from mxcompile.ops.view import Product, arguments_of

Works = Counter[tuple[str, Work]]
"""Number of launches by (kind, work); `Launch.kind` defines the kinds."""


def works(graph: fx.Graph, target: Target, count: Callable[[str], int]) -> Works:
    """Returns the work of `graph`, forward or backward, on `target`, which must have peaks.

    count: returns the number of equal layers that the module at a path represents.
    """
    total: Works = Counter()
    for node in graph.nodes:
        if node.op == "call_function" and (tags := tags_of(node)):
            total[_product(node, tags, target)] += count(tags[0].name)
    for members in _launches(graph):
        if (entry := _streamed(members)) is not None:
            total[entry] += max(count(module_of(node)[0]) for node in members)
    return total


def unwritten(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes of `graph` whose results stay inside a fused launch."""
    inside: set[fx.Node] = set()
    for members in _launches(graph):
        group = set(members)
        inside |= {node for node in members if not _is_read_outside(node, group)}
    return inside


def _product(node: fx.Node, tags: tuple[GemmTag, ...], target: Target) -> tuple[str, Work]:
    moved = sum(_bytes(base(operand)) for operand in dict.fromkeys(node.all_input_nodes))
    moved += _bytes(node) or sum(map(_bytes, node.users))
    if called_packet(node) in ATTENTIONS:
        masked = arguments_of(node).get("attn_mask") is not None
        rate = "efficient" if masked else attention_backend(target)
        rate += "_backward" if packet(node) in ATTENTION_BACKWARD else ""
        kind, flops = "attention", attention_flops(node)
    else:
        kind, flops, rate = "product", sum(tag.flops for tag in tags), _rate(node, tags[0], target)
    return kind, library_work(num_bytes=moved, flops=flops, product=rate, target=target)


def _rate(node: fx.Node, tag: GemmTag, target: Target) -> str:
    product = Product.from_node(node)
    if product is not None and product.is_packed:
        is_matrix = not product.is_grouped and node.meta["val"].ndim == 2
        return product_kind(Family.PACKED, product.forms[0], target, by_library=is_matrix)
    if tag.formats is not None:
        usual = (family for family in families(tag.formats, target) if family is not Family.PACKED)
        return product_kind(next(usual), tag.formats[0], target) or "bf16"
    value = node.meta.get("val")
    return "fp32" if isinstance(value, Tensor) and value.element_size() > 2 else "bf16"


def _streamed(members: list[fx.Node]) -> tuple[str, Work] | None:
    """Returns kind and work of the launch of `members`; None if it moves no bytes."""
    inside = set(members)
    written = sum(_bytes(node) for node in _results(members) if _is_read_outside(node, inside))
    operators = {packet(node) for node in members}
    times = 2 if _reads_again(members, is_cast=not operators.isdisjoint(ops.CASTS)) else 1
    moved = times * _read(members, inside) + written
    kind = "rest" if operators.isdisjoint(ops.CAST_WORK) else "cast"
    return (kind, Work(num_bytes=float(moved))) if moved else None


def _read(members: list[fx.Node], inside: set[fx.Node]) -> int:
    """Returns the bytes that `inside` reads from other nodes; through a view, the bytes of the view."""
    views: defaultdict[fx.Node, dict[fx.Node, int]] = defaultdict(dict)
    for node in members:
        for producer in node.all_input_nodes:
            source = base(producer)
            if _producer(source) not in inside:
                views[source][producer] = _bytes(node if packet(node) in LOOKUPS else producer)
    return sum(min(_bytes(source), sum(shown.values())) for source, shown in views.items())


def _bytes(node: fx.Node) -> int:
    return sum(map(bytes_of, tree_leaves(node.meta.get("val"))))


def _launches(graph: fx.Graph) -> Iterable[list[fx.Node]]:
    """Returns the nodes of each launch without a product, in order."""
    levels = _levels(graph)
    joined = UnionFind(levels)
    casts: dict[tuple[fx.Node, int], fx.Node] = {}
    for node, level in levels.items():
        for source in map(base, node.all_input_nodes):
            source = _producer(source)
            if levels.get(source) == level:
                joined.union(node, source)
            elif packet(node) in ops.CASTS:
                joined.union(node, casts.setdefault((source, level), node))
    position = {node: index for index, node in enumerate(levels)}
    return [sorted(group, key=position.__getitem__) for group in joined.to_sets()]


def _is_read_outside(result: fx.Node, inside: set[fx.Node]) -> bool:
    """Whether a node outside `inside` reads `result`, directly or through views."""
    return any(
        _is_read_outside(user, inside) if _is_view(user) else user not in inside for user in result.users
    )


def _is_view(node: fx.Node) -> bool:
    return packet(node) in VIEWS


def base(node: fx.Node) -> fx.Node:
    """Returns the tensor that `node` is a view of."""
    while _is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _producer(node: fx.Node) -> fx.Node:
    """Returns the operator that `node` is a result of."""
    while node.target is operator.getitem:
        node = node.all_input_nodes[0]
    return node


def _is_border(node: fx.Node) -> bool:
    """Whether `node` has a product, is a collective, or waits for one."""
    return bool(tags_of(node)) or str(packet(node)).startswith("_c10d_functional")


def _computes(node: fx.Node) -> bool:
    """Whether `node` is part of a launch without a product."""
    is_passed = _is_view(node) or node.target is operator.getitem or packet(node) is aten.full
    return node.op == "call_function" and not is_passed and not _is_border(node)


def _levels(graph: fx.Graph) -> dict[fx.Node, int]:
    """Returns a level for each computing node: the number of launch borders before it on the longest path.

    A node moves to the level of its earliest reader, so a recomputed value is in the launch that reads it.
    """
    early: dict[fx.Node, int] = {}
    for node in graph.nodes:
        sources = node.all_input_nodes
        early[node] = max((early[source] + _is_border(source) for source in sources), default=0)
    late: dict[fx.Node, int] = {}
    for node in reversed(graph.nodes):
        users = [late[user] for user in node.users if user.op != "output"]
        kept = any(user.op == "output" for user in node.users)
        late[node] = early[node] if kept or _is_border(node) or not users else min(users)
    return {node: late[node] for node in graph.nodes if _computes(node)}


def _results(members: list[fx.Node]) -> Iterable[fx.Node]:
    for node in members:
        items = [user for user in node.users if user.target is operator.getitem]
        yield from items or [node]


def _reads_again(members: list[fx.Node], *, is_cast: bool) -> bool:
    rows = columns = False
    for node in members:
        if packet(node) in REDUCTIONS and node.all_input_nodes:
            source, value = node.all_input_nodes[0].meta.get("val"), node.meta.get("val")
            if isinstance(source, Tensor) and isinstance(value, Tensor) and source.ndim > 1:
                whole = value.ndim and value.shape[-1] == source.shape[-1]
                rows, columns = rows or bool(whole), columns or not whole
    return rows or (columns and is_cast)
