"""Reports kept beside Inductor's caches, for compiles that those caches answer.

    compile ─▶ report stored? yes: its token ─▶ key of Inductor's caches ─▶ hit: the stored report, or miss
                              no: a new token ─▶ key of Inductor's caches ─▶ miss, always

When Inductor's caches answer, none of our hooks runs. So their keys hold a token that only the stored report
knows: code that comes from a cache always has its report, and a graph without a report is compiled anew,
whatever the caches hold. A report is looked up by everything it depends on (see `Compilation.identity`), so
one that is found is the one a fresh compile would make. The files are JSON; a damaged one counts as missing.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

from torch._inductor.runtime.cache_dir_utils import cache_dir

from mxcompile.publish import publish
from mxcompile.report import Part, schema

log = logging.getLogger(__name__)


def _path(name: str) -> Path:
    return Path(cache_dir()) / "mxcompile" / f"{name}.json"


def save(name: str, part: Part) -> None:
    """Keep `part` under `name`. A directory that cannot be written is logged, not an error."""
    try:
        publish(_path(name), json.dumps(dataclasses.asdict(part)))
    except OSError as error:
        log.warning("cannot keep the report beside Inductor's cache: %s", error)


def load(name: str) -> Part | None:
    """The part kept under `name`, or None."""
    try:
        return schema.read(Part, schema.parse(_path(name).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("stored report %s is not readable: %s", name, error)
        return None
