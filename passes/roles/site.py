"""A linear layer, with the properties that the statements about roles check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import fx

from mxcompile.graph.dims import before
from mxcompile.graph.opsets import TRANSPARENT, aten, packet
from mxcompile.graph.shapes import operands
from mxcompile.graph.tags import tag_of, tags_of, tensor, value_of
from mxcompile.ops.view import argument_of
from mxcompile.passes.roles.axes import contracted, data_operand
from mxcompile.passes.roles.feeds import Feeds
from mxcompile.passes.roles.flow import stored
from mxcompile.passes.roles.sources import BENT, Marks, Source, merged
from mxcompile.policy import Role
from mxcompile.report.forms.words import listed

_CHAIN = 4
_NAMED = 2


class Model:
    """The sweeps' results for the whole graph.

    followers: layers that read a layer's result, with the marks of the operators in between. reads: numbers
    of the residual streams that a layer reads. joined: number of the stream that a layer's result joins or
    starts. together: all sources of the value that joins there. roles: roles of the layers after the current
    layer. read_for: how often these layers read a stream, to condition other streams (True) or for anything
    else (False).
    """

    def __init__(self, feeds: Feeds, uses: dict[fx.Node, int], *, has_streams: bool, is_cut: bool) -> None:
        self.feeds, self.uses = feeds, uses
        self.has_streams, self.is_cut = has_streams, is_cut
        self.followers: dict[fx.Node, Marks] = {layer: {} for layer in feeds.layers}
        self.reads: dict[fx.Node, list[int]] = {}
        for layer in feeds.layers:
            for source, marks in feeds.of_value.get(data_operand(layer), {}).items():
                if feeds.kind[source] is Source.STREAM:
                    self.reads.setdefault(layer, []).append(feeds.number[source])
                elif source in self.followers:
                    self.followers[source][layer] = marks
        joins = [(source, sum_, all_) for sum_, all_ in feeds.before.items() for source in all_]
        self.joined = {source: feeds.number[sum_] for source, sum_, _ in joins}
        self.together = {source: all_ for source, _, all_ in joins}
        self.roles: dict[fx.Node, Role] = {}
        self.read_for: Counter[tuple[int | None, bool]] = Counter()

    def set_role(self, layer: fx.Node, role: Role) -> None:
        """Records the role of `layer`. Later layers must have roles already."""
        self.roles[layer] = role
        self.read_for.update((number, role is Role.CONDITIONING) for number in self.reads.get(layer, ()))


class Site:
    """The layer `node` of `model`, as the statements of roles read it.

    origins: the layers and inputs from which its input is computed. beyond: `origins`, in which the sources
    of an earlier layer replace the layer if no nonlinearity follows it, as in a low-rank pair.
    """

    def __init__(self, node: fx.Node, model: Model) -> None:
        (self.tag,) = tags_of(node)
        self.node, self.model = node, model
        self.origins = model.feeds.of_value.get(data_operand(node), {})
        self.beyond = _beyond(self.origins, model.feeds)

    def used(self, marks: int) -> bool:
        """Whether its result has one of the uses `marks`."""
        return bool(self.model.uses[self.node] & marks)

    @property
    def followers(self) -> Marks:
        """The layers that read its result, with the marks of the operators in between."""
        return self.model.followers[self.node]

    def followers_of(self, *roles: Role) -> list[fx.Node]:
        """Returns the layers that follow and have a role in `roles`."""
        return [layer for layer in self.followers if self.model.roles[layer] in roles]

    def all_followers(self, *roles: Role) -> bool:
        """Whether layers follow, and all have a role in `roles`."""
        return bool(self.followers) and len(self.followers_of(*roles)) == len(self.followers)

    def sources(self, *kinds: Source) -> list[fx.Node]:
        """Returns the sources of its input that are of one of `kinds`, seen through low-rank pairs."""
        return self.model.feeds.sources(self.beyond, *kinds)

    @property
    def streams(self) -> frozenset[int]:
        """The residual streams its input depends on."""
        return self.model.feeds.streams.get(data_operand(self.node), frozenset())

    @property
    def activated_layers(self) -> list[fx.Node]:
        """Layers from which its input comes through an activation or a gate."""
        layers = self.sources(Source.LAYER)
        return [layer for layer in layers if self.beyond[layer] & BENT]

    @property
    def chosen(self) -> bool:
        """Whether a top-k chose its input."""
        return data_operand(self.node) in self.model.feeds.chosen

    @property
    def weight(self) -> fx.Node:
        """The tensor its weight is stored in."""
        return stored(operands(self.node)[self.tag.tensors.index("w")])

    @property
    def stacked(self) -> bool:
        """Whether its weight is a stack of matrices, as experts have; one matrix may have several axes too.

        If groups of its output features gate each other, their axis counts as an output axis. The blocks of a
        block-diagonal matrix are not experts: they divide the features of a token.
        """
        weight = tensor(self.weight) if packet(self.node) is not aten.convolution else None
        if weight is None or weight.ndim < 3 or _divides_features(self.node):
            return False
        summed = _summed(self.node, self.tag.tensors.index("w"))
        if (groups := self.model.feeds.groups.get(self.node)) is None:
            return any(size != 1 for dim, size in enumerate(weight.shape[:-2]) if dim not in summed)
        kept = [size for dim, size in enumerate(weight.shape) if size != 1 and dim not in summed]
        return len(kept) - (groups in kept) > 1

    @property
    def tied(self) -> bool:
        """Whether its weight is also a table of embeddings."""
        readers = [user for user in self.weight.users if packet(user) is aten.embedding]
        return any(argument_of(user, "weight") is self.weight for user in readers)


def _divides_features(product: fx.Node) -> bool:
    """Whether `product` multiplies by a block-diagonal matrix: input and result are features in blocks."""
    column = contracted(product)  # of the result, as in the input
    node, (batch, features) = data_operand(product), _divided(data_operand(product), column)
    while not batch & features:
        if packet(node) not in TRANSPARENT or not isinstance(source := node.args[0], fx.Node):
            return False
        batch, features = before(node, source, batch), before(node, source, features)
        node = source
    return _joins(product, *_divided(product, column))


def _divided(node: fx.Node, column: int) -> tuple[frozenset[int], frozenset[int]]:
    """Returns the batch dimensions of `node`, of a product or its input, and the dimension `column`."""
    num_dims = value_of(node).ndim
    return frozenset(range(num_dims - 2)), frozenset({num_dims + column})


def _joins(node: fx.Node, batch: frozenset[int], features: frozenset[int]) -> bool:
    """Whether a view of `node` has a dimension made of a dimension in `batch` and one in `features`."""
    for user in node.users:
        if packet(user) not in TRANSPARENT or (value := tensor(user)) is None:
            continue
        origins = {dim: before(user, node, frozenset({dim})) for dim in range(value.ndim)}
        after = [frozenset(dim for dim, old in origins.items() if old & dims) for dims in (batch, features)]
        if after[0] & after[1] or _joins(user, *after):
            return True
    return False


def _summed(product: fx.Node, side: int) -> frozenset[int]:
    """Returns the dimensions of the stored weight, operand `side` of `product`, that it sums over."""
    node = operands(product)[side]
    dims = frozenset({value_of(node).ndim - (2 if side else 1)})
    while packet(node) in TRANSPARENT and isinstance(source := node.args[0], fx.Node):
        node, dims = source, before(node, source, dims)
    return dims if node.op in ("placeholder", "get_attr") else frozenset()


def _beyond(origins: Marks, feeds: Feeds) -> Marks:
    for _ in range(_CHAIN):
        linear = bool(origins) and all(
            feeds.kind[source] is Source.LAYER and not marks & BENT for source, marks in origins.items()
        )
        if not linear:
            break
        origins = merged(feeds.of_value.get(data_operand(source), {}) for source in origins)
    return origins


def named(nodes: Iterable[fx.Node]) -> str:
    """Returns the names of the first layers in `nodes`, and the number of the others."""
    names = dict.fromkeys(tag.name or "(root)" for node in nodes if (tag := tag_of(node)) is not None)
    return listed([*names], _NAMED)
