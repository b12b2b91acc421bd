"""Projections of attentions.

    qkv         an operand of an attention, or a gate on what an attention made
    attn_out    the first layer behind an attention

The attention is one operator or spelled out; q, k and v are reached along elementwise operators (rotary
embedding, norms, filters), not through another layer.
"""

from __future__ import annotations

from mxcompile.passes.roles.site import Site, named
from mxcompile.passes.roles.sources import GATED, Source
from mxcompile.passes.roles.statement import Found, Missing, Statement
from mxcompile.passes.roles.uses import BRANCH, QKV
from mxcompile.policy import Role


def _reaches_attention(site: Site) -> Found | Missing:
    ends_branch = site.used(BRANCH) and (site.activated_layers or from_attention(site))
    if site.used(QKV) and not ends_branch:
        return Found("its result is q, k or v of an attention")
    gated = [f.layer for f in site.followers if f.marks & GATED and gates(site, f.layer, Source.ATTENTION)]
    if gated and not from_attention(site):
        return Found(f"its result gates an attention's, on the way to {named(gated)}")
    return Missing("its result reaches no attention")


def gates(site: Site, layer: object, kind: Source) -> bool:
    """Whether the input of `layer`, which follows `site`, is a gated result of a source of `kind`."""
    feeds = site.model.feeds
    origins = Site.at(layer, site.model).beyond  # type: ignore[arg-type]
    return any(origins[source] & GATED for source in feeds.sources(origins, kind))


def from_attention(site: Site) -> bool:
    """Whether the input of the layer is what an attention made, and no residual stream."""
    return bool(site.sources(Source.ATTENTION)) and not site.sources(Source.STREAM)


def _behind_attention(site: Site) -> Found | Missing:
    if not site.sources(Source.ATTENTION):
        return Missing("its input is not made by an attention")
    return Found("its input is what an attention made")


def _is_no_expert(site: Site) -> Found | Missing:
    if site.stacked and site.all_followers(Role.EXPERT_OUT):
        return Missing("it opens a network of experts, among which the attention divides tokens")
    return Found("")


def _is_first(site: Site) -> Found | Missing:
    straight = site.model.feeds.sources(site.made, Source.ATTENTION)
    if not straight and not site.used(BRANCH):
        return Missing("another layer stands in between, and its result joins no residual stream")
    return Found("")


def _no_stream_in_between(site: Site) -> Found | Missing:
    if site.sources(Source.STREAM):
        return Missing("its input is a residual stream too")
    return Found("")


QKV_LAYER = Statement(role=Role.QKV, clauses=(_reaches_attention,))
ATTN_OUT = Statement(
    role=Role.ATTN_OUT, clauses=(_behind_attention, _no_stream_in_between, _is_no_expert, _is_first)
)
