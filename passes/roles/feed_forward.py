"""Feed-forward networks.

    ffn_out     reads other layers through an activation or a gate, and its result joins the residual stream
    ffn_in      feeds ffn_out or another ffn_in through an activation or a gate, or gates ffn_out's result
    expert_*    the same where tokens are routed: a top-k chose the input or weights the result, or the weight
                is a stack of matrices; softmax weights may divide tokens among them and combine results

A model or a block that is only a feed-forward network has no residual stream to join. Its last layer is the
layer that returns to the width of the input.
"""

from __future__ import annotations

from torch import fx

from mxcompile.graph.opsets import aten, packet
from mxcompile.graph.tags import tag_of
from mxcompile.passes.roles.site import Site, named
from mxcompile.passes.roles.sources import BENT, GATED, Source
from mxcompile.passes.roles.statement import Fails, Holds, Statement, clause, joins_stream
from mxcompile.passes.roles.uses import BRANCH, QKV, RESULT, WEIGHED
from mxcompile.policy import Role

_LAST = frozenset({Role.FFN_OUT, Role.FFN_IN, Role.EXPERT_OUT, Role.EXPERT_IN})


def _reads_activated(site: Site) -> Holds | Fails:
    if site.activated_layers:
        return Holds(f"it reads {named(site.activated_layers)} through an activation or a gate")
    return Fails("there is no activation or gate between it and the layers before it")


def _returns_to_width(site: Site) -> Holds | Fails:
    if site.model.has_streams or site.model.is_cut or not site.used(RESULT):
        return Fails("it is not alone in the model")
    first = [tag for layer in site.activated_layers if (tag := tag_of(layer)) is not None]
    inputs = all(Site(layer, site.model).sources(Source.INPUT) for layer in site.activated_layers)
    if inputs and {tag.k for tag in first} == {site.tag.n}:
        return Holds("it returns to the width of the input, in a model without residual streams")
    return Fails("it does not return to the width of the input")


def _feeds_last(site: Site) -> Holds | Fails:
    roles = {layer: site.model.roles[layer] for layer, marks in site.followers.items() if marks & BENT}
    outs = [layer for layer, role in roles.items() if role in _LAST]
    fused = [layer for layer, role in roles.items() if role.row.ends_branch and role not in _LAST]
    if layers := [*outs, *fused]:
        return Holds(f"{named(layers)} reads its result through an activation or a gate")
    origins = site.model.together.get(site.node, {})
    if origins.get(site.node, 0) & GATED and not site.followers:
        gated = [other for other, marks in origins.items() if marks & GATED and _ends_network(other, site)]
        if gated:
            return Holds(f"its result gates the result of {named(gated)}")
    return Fails("no layer that ends a feed-forward network reads its result through an activation")


def _ends_network(node: fx.Node, site: Site) -> bool:
    """Whether `node` is another layer that reads layers through an activation and joins the stream."""
    if node is site.node or site.model.feeds.kind[node] is not Source.LAYER:
        return False
    other = Site(node, site.model)
    return other.used(BRANCH) and bool(other.activated_layers)


def _is_routed(site: Site) -> Holds | Fails:
    for near in (site.node, *site.activated_layers, *site.followers_of(*_LAST)):
        other = Site(near, site.model)
        who = "its" if near is site.node else f"{named([near])}'s"
        if other.chosen:
            return Holds(f"a top-k chose {who} input")
        if other.used(WEIGHED):
            return Holds(f"weights from a top-k multiply {who} result")
        if other.stacked or packet(near) is aten._grouped_mm:
            return Holds(f"{who} weight is a stack of matrices")
    return Fails("no tokens are routed to it")


_is_combined = clause(
    lambda site: site.used(QKV) and site.stacked,
    "its weight is a stack of matrices, and weights by a softmax combine its results",
    "no weights by a softmax combine results of a stack of matrices",
)
LONE_EXPERT_OUT = Statement(role=Role.EXPERT_OUT, clauses=(_reads_activated, _returns_to_width, _is_routed))
LONE_FFN_OUT = Statement(role=Role.FFN_OUT, clauses=(_reads_activated, _returns_to_width))
FFN_OUT = Statement(role=Role.FFN_OUT, clauses=(_reads_activated, joins_stream))
FFN_IN = Statement(role=Role.FFN_IN, clauses=(_feeds_last,))
EXPERT_OUT = Statement(role=Role.EXPERT_OUT, clauses=(_reads_activated, joins_stream, _is_routed))
SOFT_EXPERT_OUT = Statement(role=Role.EXPERT_OUT, clauses=(_is_combined, _reads_activated))
EXPERT_IN = Statement(role=Role.EXPERT_IN, clauses=(_feeds_last, _is_routed))
