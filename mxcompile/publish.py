"""Writing a file whole or not at all: beside its place, then renamed into it.

A reader, and another process that writes the same file, see an old or a new one, never half of one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path

_counter = itertools.count()


def publish(path: Path, content: str | bytes) -> None:
    """Write `content` to `path`, with the folders it needs, by rename. Raises `OSError`."""
    path = Path(os.path.realpath(path))  # a link stays a link
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = beside(path)
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def beside(path: Path) -> Path:
    """A file in the folder of `path` that no other process, and nothing else in this one, writes."""
    return path.with_name(f".{path.name[:200]}.{os.getpid()}.{next(_counter)}")
