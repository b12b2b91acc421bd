"""A policy under construction from another tool's file: rules, their origins, and omitted settings.

The file is plain data: JSON, or YAML under the limits of a policy.
"""

from __future__ import annotations

import json
import re
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mxcompile.errors import PolicyError, printable, shown
from mxcompile.policy.parse import Location, load_yaml, parse_data, read_file, rule_words
from mxcompile.policy.policy import Policy
from mxcompile.policy.shadow import Shadows
from mxcompile.policy.values import VERSION
from mxcompile.policy.yaml_data import MAX_BYTES


def read(path: Path) -> tuple[Any, Location]:
    """Returns the data of the file `path` and its location. Raises `PolicyError`."""
    label = str(path)
    raw = read_file(path)
    if len(raw) <= MAX_BYTES and raw.lstrip()[:1] in (b"{", b"["):
        try:
            return json.loads(raw, object_pairs_hook=lambda pairs: _unique(pairs, label)), Location(label)
        except PolicyError:
            raise
        except (ValueError, RecursionError):
            pass  # it may be flow YAML, and the YAML reader reports the line of a fault
    return load_yaml(raw, label)


def _unique(pairs: list[tuple[str, Any]], label: str) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        keys = [key for key, _ in pairs]
        double = next(key for key in keys if keys.count(key) > 1)
        raise PolicyError(f"{label}: duplicate key {shown(double)}: remove one")
    return mapping


_OWN_PATH = re.compile(r"^: rules\[0\][\w.\[\]]*: ")
"""Path inside the generated rule. It is removed from errors, because the user has only the imported file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """A policy made from another tool's file.

    policy: the rules that a policy can express. origins: origin of each rule. notes: a sentence for each
    setting that the policy omits or changes. source: path of the file. tool: description of the tool.
    """

    policy: Policy
    origins: tuple[str, ...]
    notes: tuple[str, ...]
    source: str
    tool: str

    def text(self) -> str:
        """Returns the policy as YAML, with `origins` and `notes` as comments. It loads as `policy`."""
        head = [f"Made from {self.source}, {self.tool}."]
        if self.notes:
            head += ["", "Not in this policy:", *(f"- {note}" for note in self.notes)]
        data = self.policy.to_dict()
        lines = [_comment(part) for line in head for part in _wrapped(line)]
        lines += ["", f"version: {data['version']}", f"preset: {data['preset']}", "rules:"]
        for rule, origin in zip(data["rules"], self.origins, strict=True):
            written = yaml.safe_dump([rule], sort_keys=False, allow_unicode=True, width=100)
            lines += [f"  {_comment(origin)}", *(f"  {line}" for line in written.splitlines())]
        return "\n".join(lines) + "\n"


@dataclass(kw_only=True, slots=True)
class Draft:
    """A policy under construction. preset: preset that corresponds to the tool's defaults."""

    preset: str
    rules: list[dict[str, Any]] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    shadows: Shadows = field(default_factory=Shadows)

    def finish(self, source: str, tool: str) -> Imported:
        """Returns the policy and its notes."""
        data = {"version": VERSION, "preset": self.preset, "rules": self.rules}
        return Imported(
            policy=Policy.from_dict(data, f"{source} (imported)"),
            origins=tuple(self.origins),
            notes=tuple(dict.fromkeys(self.notes)),
            source=source,
            tool=tool,
        )


@dataclass(frozen=True, slots=True)
class Setting(Location):
    """The location of a setting in another tool's file, with the draft that has its rules and notes."""

    draft: Draft = field(kw_only=True)

    def expected(self, form: str, value: object) -> PolicyError:
        """Returns an error for `value`, where `form` was expected."""
        return self.error(f"expected {form}, found {shown(value)}")

    def note(self, sentence: str) -> None:
        """Adds a note that the policy omits or changes the setting."""
        self.draft.notes.append(self.sentence(sentence))

    def rule(self, match: dict[str, Any], use: dict[str, Any] | str, origin: str) -> None:
        """Adds a rule for the setting. Raises `PolicyError` if it contains an invalid pattern."""
        draft, raw = self.draft, {"match": match, "use": use}
        data = {"version": VERSION, "preset": draft.preset, "rules": [raw]}
        try:
            _, (rule,) = parse_data(data, Location(""))
        except PolicyError as error:
            raise self.error(_OWN_PATH.sub("", str(error))) from None
        if raw in draft.rules:
            return
        if earlier := draft.shadows.add(rule.match):
            self.note(f"never reached: {rule_words(earlier)} of the policy matched all its layers before")
            return
        draft.rules.append(raw)
        draft.origins.append(origin)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 106, subsequent_indent="  ", break_long_words=False) or [""]


def _comment(text: str) -> str:
    """Returns `text` as one comment line, without control characters."""
    return f"# {printable(text)}".rstrip()
