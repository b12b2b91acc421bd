"""Statements about roles, and their answers.

A statement is a list of clauses, all of which must hold. A clause looks at one layer and says in words what
it found, or what is missing; so a role comes with its evidence, and a role that nearly held with what it
lacked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mxcompile.passes.roles.site import Site
from mxcompile.passes.roles.uses import BRANCH
from mxcompile.policy import Role


@dataclass(frozen=True, slots=True)
class Holds:
    """A clause holds: what was found, a phrase about "its" input or result."""

    says: str


@dataclass(frozen=True, slots=True)
class Fails:
    """A clause does not hold: what is in its way."""

    says: str


Clause = Callable[[Site], Holds | Fails]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The answer of a statement for one layer: whether it holds, how many clauses do, and the words."""

    holds: bool
    clauses: int
    says: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Statement:
    """A role and the clauses that make it one."""

    role: Role
    clauses: tuple[Clause, ...]

    def ask(self, site: Site) -> Answer:
        """Whether the layer at `site` has the role, and why or why not."""
        sentences: list[str] = []
        for count, clause in enumerate(self.clauses):
            match clause(site):
                case Holds(says):
                    sentences += [says] if says else []
                case Fails(says):
                    known = f"{'; '.join(sentences)}; but " if sentences else ""
                    return Answer(holds=False, clauses=count, says=f"{known}{says}")
        return Answer(holds=True, clauses=len(self.clauses), says="; ".join(sentences))


def joins_stream(site: Site) -> Holds | Fails:
    """The clause of layers that end a branch."""
    if site.used(BRANCH):
        return Holds("its result joins the residual stream")
    return Fails("its result joins no residual stream")
