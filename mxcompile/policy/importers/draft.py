"""A policy under construction from another tool's file: rules, their origins, and omitted settings."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from typing import Any

import yaml

from mxcompile.errors import PolicyError, printable
from mxcompile.policy.parse import Origin, parse_data, rule_words
from mxcompile.policy.policy import Policy
from mxcompile.policy.shadow import Shadows
from mxcompile.policy.values import VERSION
from mxcompile.policy.yaml_data import Path

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


class Draft:
    """A policy under construction. preset: preset that corresponds to the tool's defaults."""

    def __init__(self, *, source: Origin, preset: str, tool: str) -> None:
        self.source = source
        self._preset = preset
        self._tool = tool
        self._rules: list[dict[str, Any]] = []
        self._origins: list[str] = []
        self._notes: list[str] = []
        self._shadows = Shadows()

    def stands_for(self, preset: str) -> None:
        """Sets the preset that corresponds to the tool's defaults, if the file names them."""
        self._preset = preset

    def rule(self, match: dict[str, Any], use: dict[str, Any] | str, path: Path, origin: str) -> None:
        """Adds a rule for the settings at `path`. Raises `PolicyError` if they contain an invalid pattern."""
        raw = {"match": match, "use": use}
        try:
            _, (rule,) = parse_data({"version": VERSION, "preset": self._preset, "rules": [raw]}, Origin(""))
        except PolicyError as error:
            raise self.source.error(path, _OWN_PATH.sub("", str(error))) from None
        if raw in self._rules:
            return
        earlier = self._shadows.add(rule.match)
        if earlier:
            self.note(
                path, f"never reached: {rule_words(earlier)} of the policy matched all its layers before"
            )
            return
        self._rules.append(raw)
        self._origins.append(origin)

    def note(self, path: Path, sentence: str) -> None:
        """Adds a note that the policy omits or changes the setting at `path`."""
        self._notes.append(self.source.sentence(path, sentence))

    def finish(self) -> Imported:
        """Returns the policy and its notes."""
        label = f"{self.source.label} (imported)"
        data = {"version": VERSION, "preset": self._preset, "rules": self._rules}
        return Imported(
            policy=Policy.from_dict(data, label),
            origins=tuple(self._origins),
            notes=tuple(dict.fromkeys(self._notes)),
            source=self.source.label,
            tool=self._tool,
        )


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 106, subsequent_indent="  ", break_long_words=False) or [""]


def _comment(text: str) -> str:
    """Returns `text` as one comment line, without control characters."""
    return f"# {printable(text)}".rstrip()
