"""Reads other tools' files as plain data: JSON, or YAML under the limits of a policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mxcompile.errors import PolicyError, shown
from mxcompile.policy.parse import Location, load_yaml, read_file
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
