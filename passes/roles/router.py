"""router: its result enters a top-k, and later layers use the choice.

Without such a use, the layer is a head, and the top-k samples classes.
"""

from __future__ import annotations

from mxcompile.passes.roles.statement import Statement, clause
from mxcompile.passes.roles.uses import CHOOSES, SELECTS
from mxcompile.policy import Role

ROUTER = Statement(
    role=Role.ROUTER,
    clauses=(
        clause(
            lambda site: site.used(SELECTS | CHOOSES),
            "its result enters a top-k",
            "its result enters no top-k",
        ),
        clause(
            lambda site: site.used(CHOOSES),
            "later layers use the choice of the top-k",
            "no later layer uses the choice of the top-k",
        ),
    ),
)
