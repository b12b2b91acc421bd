"""Statements about roles, and their answers.

A statement is a list of clauses that must all hold. A clause checks one layer and returns a phrase with the
evidence or the reason of failure. So a role comes with its evidence, and a role that nearly held comes with
the clause that failed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mxcompile.passes.roles.site import Site
from mxcompile.passes.roles.uses import BRANCH
from mxcompile.policy import Role


@dataclass(frozen=True, slots=True)
class Holds:
    """A clause or a statement holds. `says`: the evidence, phrases about "its" input or result."""

    says: str


@dataclass(frozen=True, slots=True)
class Fails:
    """It does not hold. `says`: the reason. clauses: for a statement, number of clauses that hold."""

    says: str
    clauses: int = 0


Clause = Callable[[Site], Holds | Fails]


@dataclass(frozen=True, kw_only=True, slots=True)
class Statement:
    """A role, and the clauses that hold for layers with this role."""

    role: Role
    clauses: tuple[Clause, ...]

    def evaluate(self, site: Site) -> Holds | Fails:
        """Returns whether the layer at `site` has the role, with the phrases up to a failure."""
        sentences: list[str] = []
        for count, clause in enumerate(self.clauses):
            match clause(site):
                case Holds(says):
                    sentences += [says] if says else []
                case Fails(says):
                    prefix = f"{'; '.join(sentences)}; but " if sentences else ""
                    return Fails(f"{prefix}{says}", count)
        return Holds("; ".join(sentences))


def clause(test: Callable[[Site], object], holds: str, fails: str) -> Clause:
    """Returns a clause that holds for a layer if `test` does, with the phrases of both answers."""
    return lambda site: Holds(holds) if test(site) else Fails(fails)


joins_stream = clause(
    lambda site: site.used(BRANCH),
    "its result joins the residual stream",
    "its result joins no residual stream",
)
"""Holds for the end of a branch."""
