"""router: its result enters a top-k, and later layers use the choice.

Without such a use, the layer is a head, and the top-k samples classes.
"""

from __future__ import annotations

from mxcompile.passes.roles.site import Site
from mxcompile.passes.roles.statement import Fails, Holds, Statement
from mxcompile.passes.roles.uses import CHOOSES, SELECTS
from mxcompile.policy import Role


def _enters_top_k(site: Site) -> Holds | Fails:
    if site.used(SELECTS | CHOOSES):
        return Holds("its result enters a top-k")
    return Fails("its result enters no top-k")


def _choice_is_used(site: Site) -> Holds | Fails:
    if site.used(CHOOSES):
        return Holds("later layers use the choice of the top-k")
    return Fails("no later layer uses the choice of the top-k")


ROUTER = Statement(role=Role.ROUTER, clauses=(_enters_top_k, _choice_is_used))
