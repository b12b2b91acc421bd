"""Roles of low-rank pairs: two layers without a nonlinearity in between are one layer in two steps."""

from __future__ import annotations

from mxcompile.passes.roles.site import Site, named
from mxcompile.passes.roles.sources import BESIDE
from mxcompile.passes.roles.statement import Answer
from mxcompile.policy import Role


def inherited(site: Site) -> tuple[Role, Answer] | None:
    """Returns role and evidence if all readers of the result of `site` read it linearly and share a role."""
    roles = {site.role_of(follower) for follower in site.followers}
    if len(roles) != 1 or any(follower.activated or follower.marks & BESIDE for follower in site.followers):
        return None
    (role,) = roles
    if role in (Role.OTHER, Role.HEAD):
        return None
    layers = named(follower.layer for follower in site.followers)
    return role, Answer(
        holds=True, clauses=1, says=f"the first step of {layers}, with no activation in between"
    )
