"""embedding: makes the first value of a residual stream, alone or with other layers in a row."""

from __future__ import annotations

from mxcompile.passes.roles.site import Site, named
from mxcompile.passes.roles.sources import Source
from mxcompile.passes.roles.statement import Fails, Holds, Statement, clause
from mxcompile.passes.roles.uses import STARTS
from mxcompile.policy import Role


def _starts_stream(site: Site) -> Holds | Fails:
    if site.used(STARTS):
        return Holds("a residual stream starts with its result")
    if site.all_followers(Role.EMBEDDING):
        return Holds(f"its result goes to nothing but {named(site.followers)}, an embedding")
    return Fails("no residual stream starts with its result")


_is_not_cut = clause(
    lambda site: not site.sources(Source.CUT), "", "the graph is cut before it, which may hide its role"
)
EMBEDDING = Statement(role=Role.EMBEDDING, clauses=(_starts_stream, _is_not_cut))
