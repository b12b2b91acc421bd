"""Stores reports beside Inductor's caches, for compiles that these caches answer.

    compile ─▶ report stored? yes: its token ─▶ key of Inductor's caches ─▶ hit: the stored report, or miss
                              no: a new token ─▶ key of Inductor's caches ─▶ miss, always

On a cache hit none of our hooks runs. The cache keys therefore contain a token from the stored report: cached
code always has its report, and a graph without a report is compiled again. The file name of a report is a
hash of everything that it depends on (see `Compilation.identity`), so a stored report equals a fresh one. The
files are JSON; a damaged file counts as missing.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

from torch._inductor.runtime.cache_dir_utils import cache_dir

from mxcompile.publish import publish
from mxcompile.report import Part
from mxcompile.report.data import schema

log = logging.getLogger(__name__)


def _path(name: str) -> Path:
    return Path(cache_dir()) / "mxcompile" / f"{name}.json"


def save(name: str, part: Part) -> None:
    """Stores `part` under `name`. Logs a warning if the directory is not writable."""
    try:
        publish(_path(name), json.dumps(dataclasses.asdict(part)))
    except OSError as error:
        log.warning(
            "cannot store the report beside Inductor's cache, so a later process compiles again: %s", error
        )


def load(name: str) -> Part | None:
    """Returns the part stored under `name`, or None."""
    try:
        return schema.read(Part, schema.parse(_path(name).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("stored report %s is not readable, so the graph is compiled again: %s", name, error)
        return None
