"""The misfits that are known: those of `docs/zoo.md`, one a line, ``animal | disguises | layer | what``."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from checks import Misfit

FILE = Path(__file__).parents[2] / "docs" / "zoo.md"


@cache
def _lines() -> tuple[tuple[str, frozenset[str], Misfit], ...]:
    entries = []
    for line in FILE.read_text().splitlines():
        if line.count(" | ") == 3 and not line.startswith("|"):
            animal, disguises, layer, problem = (part.strip() for part in line.split(" | "))
            entries.append((animal, frozenset(disguises.split(",")), Misfit(layer=layer, problem=problem)))
    return tuple(entries)


def known_misfits(animal: str, disguise: str) -> set[Misfit]:
    """The misfits of `animal` in `disguise` that are listed; ``*`` stands for every disguise."""
    return {misfit for name, where, misfit in _lines() if name == animal and where & {disguise, "*"}}


def animals() -> set[str]:
    """All that have an entry."""
    return {name for name, _, _ in _lines()}
