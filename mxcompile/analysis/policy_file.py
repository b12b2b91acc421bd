"""A policy that results from measurements, as a YAML file with the measurements as comments."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import yaml

from mxcompile.policy import Policy

_WIDTH = 110


def annotated(policy: Policy, facts: Iterable[str], comments: Sequence[str]) -> str:
    """Returns `policy` as YAML that `Policy.load` reads.

    facts: comments at the head of the file. comments: comments of the first rules, in order.
    """
    plain = policy.to_dict()
    rules = plain.pop("rules")
    written = [*map(_comment, facts), _dumped(plain)]
    if not rules:
        return "".join(written)
    written.append("rules:\n")
    for index, rule in enumerate(rules):
        lines = _dumped([rule])
        if index < len(comments):
            lines = _comment(comments[index]) + lines
        written.append(textwrap.indent(lines, "  "))
    return "".join(written)


def _dumped(data: Any) -> str:
    text: str = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=_WIDTH)
    return text


def _comment(text: str) -> str:
    return "".join(f"# {line}\n" for line in textwrap.wrap(text, _WIDTH, break_on_hyphens=False))
