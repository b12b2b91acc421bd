"""The order of the statements about roles, and the role of a layer for which no statement holds.

Two layers without a nonlinearity in between (a low-rank pair) are one layer in two steps, with one role.
"""

from __future__ import annotations

from mxcompile.graph.tags import Evidence
from mxcompile.passes.roles.attention import ATTN_OUT, QKV_LAYER
from mxcompile.passes.roles.conditioning import CONDITIONING
from mxcompile.passes.roles.embedding import EMBEDDING
from mxcompile.passes.roles.feed_forward import (
    EXPERT_IN,
    EXPERT_OUT,
    FFN_IN,
    FFN_OUT,
    LONE_EXPERT_OUT,
    LONE_FFN_OUT,
    SOFT_EXPERT_OUT,
)
from mxcompile.passes.roles.head import HEAD, TIED_HEAD
from mxcompile.passes.roles.mixer import MIXER_IN, MIXER_OUT
from mxcompile.passes.roles.router import ROUTER
from mxcompile.passes.roles.site import Site, named
from mxcompile.passes.roles.sources import BENT, BESIDE, Source
from mxcompile.passes.roles.statement import Holds, Statement
from mxcompile.passes.roles.uses import CUT
from mxcompile.policy import Role

STATEMENTS: tuple[Statement, ...] = (
    TIED_HEAD,  # first: logits may have any further use
    ROUTER,  # before HEAD: its result may be an output too, for a loss
    CONDITIONING,  # before branches: a gate joins the stream as a branch does
    SOFT_EXPERT_OUT,  # before QKV_LAYER: an attention with a parameter as query combines experts
    QKV_LAYER,  # before HEAD: keys and values may be outputs too, for a cache
    LONE_EXPERT_OUT,  # a network of experts, compiled or tried alone
    LONE_FFN_OUT,  # a block's feed-forward network, compiled or tried alone
    MIXER_OUT,
    MIXER_IN,  # before HEAD: the state of a filter for the next token may be an output too
    HEAD,  # before ATTN_OUT: a head may stand behind an attention
    ATTN_OUT,
    EXPERT_OUT,  # before FFN_OUT, which holds for a routed network too
    FFN_OUT,
    EXPERT_IN,
    FFN_IN,
    EMBEDDING,  # last: the first value of an inner residual stream may end an outer branch
)
"""`role_of` checks them in this order; the first statement that holds gives the role."""


def role_of(site: Site) -> tuple[Role, Evidence]:
    """Returns the role of the layer at `site`, and its evidence. Layers that follow must have roles."""
    most, nearest = 0, ""
    for statement in STATEMENTS:
        answer = statement.evaluate(site)
        if isinstance(answer, Holds):
            return statement.role, Evidence(holds=answer.says, nearest=nearest)
        if answer.clauses > most:
            most, nearest = answer.clauses, f"{statement.role}: {answer.says}"
    if (role := _inherited(site)) is not None:
        says = f"the first step of {named(site.followers)}, with no activation in between"
        return role, Evidence(holds=says, nearest=nearest)
    says = "no role's conditions are true"
    if site.used(CUT) or site.sources(Source.CUT):
        says = f"the graph is cut, which may hide its role: {says}"
    return Role.OTHER, Evidence(holds=says, nearest=nearest)


def _inherited(site: Site) -> Role | None:
    """Returns the role that all readers of the result of `site` share, if they read it linearly."""
    roles = {site.model.roles[layer] for layer in site.followers}
    if len(roles) != 1 or any(marks & (BENT | BESIDE) for marks in site.followers.values()):
        return None
    (role,) = roles
    return None if role in (Role.OTHER, Role.HEAD) else role
