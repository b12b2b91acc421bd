"""embedding: makes what a residual stream starts with, alone or as one of several layers in a row."""

from __future__ import annotations

from mxcompile.passes.roles.site import Site, named
from mxcompile.passes.roles.sources import Source
from mxcompile.passes.roles.statement import Found, Missing, Statement
from mxcompile.passes.roles.uses import STARTS
from mxcompile.policy import Role


def _starts_stream(site: Site) -> Found | Missing:
    if site.used(STARTS):
        return Found("a residual stream starts with its result")
    if site.all_followers(Role.EMBEDDING):
        return Found(f"its result goes to nothing but {named(f.layer for f in site.followers)}, an embedding")
    return Missing("no residual stream starts with its result")


def _is_not_cut(site: Site) -> Found | Missing:
    if site.sources(Source.CUT):
        return Missing("the graph was cut before it, which may hide what it belongs to")
    return Found("")


EMBEDDING = Statement(role=Role.EMBEDDING, clauses=(_starts_stream, _is_not_cut))
