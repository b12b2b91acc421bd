"""Policies that result from measurements: their text, and their YAML with the measurements as comments."""

from __future__ import annotations

import dataclasses
import textwrap
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml

from mxcompile.policy import Policy
from mxcompile.report.files import save
from mxcompile.report.forms.tables import Table, page

_WIDTH = 110


@dataclass(frozen=True, kw_only=True)
class MeasuredPolicy(ABC):
    """A policy that results from measurements. `Policy.load` reads its YAML form.

    policy: the policy. comments: comments of its first rules. notes: remarks for the reader.
    """

    policy: Policy
    comments: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def with_note(self, note: str) -> Self:
        """Returns a copy with `note` as the first note."""
        return dataclasses.replace(self, notes=(note, *self.notes))

    def __str__(self) -> str:
        table = self._table()
        flexible = [header for header in ("layer", "in") if header in table[0]]
        return page([*self._facts(), *(f"note: {note}" for note in self.notes)], (table, flexible))

    def to_yaml(self) -> str:
        """Returns the policy as YAML with the findings as comments. `Policy.load` reads it."""
        plain = self.policy.to_dict()
        rules = plain.pop("rules")
        lines = [*map(_comment, self._heading()), _dumped(plain), *(["rules:\n"] if rules else [])]
        comments = [*map(_comment, self.comments), *[""] * len(rules)]
        for comment, rule in zip(comments, rules, strict=False):
            lines.append(textwrap.indent(comment + _dumped([rule]), "  "))
        return "".join(lines)

    def dump(self, path: str | Path) -> None:
        """Writes `to_yaml` to `path`, atomically. Raises `OptionError` if it cannot be written."""
        save(path, self.to_yaml(), "policy")

    @abstractmethod
    def _facts(self) -> list[str]:
        """Returns sentences about the policy."""

    @abstractmethod
    def _table(self) -> Table:
        """Returns headers and rows of the measurements; no rows without any."""

    def _heading(self) -> list[str]:
        """Returns the comments at the head of the YAML form."""
        return self._facts()


def _dumped(data: Any) -> str:
    text: str = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=_WIDTH)
    return text


def _comment(text: str) -> str:
    return "".join(f"# {line}\n" for line in textwrap.wrap(text, _WIDTH, break_on_hyphens=False))
