"""Policies of a few rules, written short."""

from __future__ import annotations

from typing import Any

from mxcompile.policy import Policy


def rule(use: Any = "mxfp8", **match: Any) -> dict[str, Any]:
    return {"match": match, "use": use}


def every(use: Any, **preset: str) -> dict[str, Any]:
    """One rule for all layers, as a user writes it."""
    return {"version": 1, **preset, "rules": [rule(use, name="*")]}


def policy(*rules: dict[str, Any], preset: str = "bf16") -> Policy:
    return Policy.from_dict({"version": 1, "preset": preset, "rules": list(rules)})
