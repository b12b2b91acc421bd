"""Projections of attentions.

    qkv         its result is q, k or v of an attention, or gates the result of an attention
    attn_out    the first layer behind an attention

The attention is one operator or spelled out. Elementwise operators (rotary embedding, norms, filters) may lie
between a layer and the attention, but not another layer.
"""

from __future__ import annotations

from torch import fx

from mxcompile.graph.opsets import aten, packet
from mxcompile.passes.roles.site import Site, named
from mxcompile.passes.roles.sources import GATED, Source
from mxcompile.passes.roles.statement import Fails, Holds, Statement, clause
from mxcompile.passes.roles.uses import BRANCH, QKV
from mxcompile.policy import Role


def _reaches_attention(site: Site) -> Holds | Fails:
    ends_branch = site.used(BRANCH) and (site.activated_layers or from_attention(site))
    if site.used(QKV) and not ends_branch:
        return Holds("its result is q, k or v of an attention")
    after_gate = (layer for layer, marks in site.followers.items() if marks & GATED)
    gated = [layer for layer in after_gate if gates(site, layer, Source.ATTENTION)]
    if gated and not from_attention(site):
        return Holds(f"its result gates an attention's, on the way to {named(gated)}")
    return Fails("its result reaches no attention")


def gates(site: Site, layer: fx.Node, kind: Source) -> bool:
    """Whether the input of `layer` comes from a source of `kind` through a gate."""
    feeds = site.model.feeds
    origins = Site(layer, site.model).beyond
    return any(origins[source] & GATED for source in feeds.sources(origins, kind))


def from_attention(site: Site) -> bool:
    """Whether the input of the layer comes from an attention, and not from a residual stream."""
    return bool(site.sources(Source.ATTENTION)) and not site.sources(Source.STREAM)


def _is_first(site: Site) -> Holds | Fails:
    feeds = site.model.feeds
    straight = feeds.sources(site.origins, Source.ATTENTION)
    # latent attention: a bmm with a matrix per head may stand in between
    of_heads = [packet(layer) is aten.bmm for layer in feeds.sources(site.origins, Source.LAYER)]
    if not straight and not site.used(BRANCH) and not (of_heads and all(of_heads)):
        return Fails("another layer stands in between, and its result joins no residual stream")
    return Holds("")


_behind_attention = clause(
    lambda site: site.sources(Source.ATTENTION),
    "an attention computes its input",
    "no attention computes its input",
)
_no_stream_in_between = clause(
    lambda site: not site.sources(Source.STREAM), "", "its input is a residual stream too"
)
_is_no_expert = clause(
    lambda site: not (site.stacked and site.all_followers(Role.EXPERT_OUT)),
    "",
    "it opens a network of experts, among which the attention divides tokens",
)
QKV_LAYER = Statement(role=Role.QKV, clauses=(_reaches_attention,))
ATTN_OUT = Statement(
    role=Role.ATTN_OUT, clauses=(_behind_attention, _no_stream_in_between, _is_no_expert, _is_first)
)
