"""Atomic file writes: write a temporary file in the same folder, then rename it to the target.

Readers and other writers of the file see the old or the new content, never a partial file.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path

_counter = itertools.count()


def publish(path: Path, content: str | bytes) -> None:
    """Writes `content` to `path` atomically; creates missing folders. Raises `OSError`."""
    path = Path(os.path.realpath(path))  # replaces the target of a symbolic link, not the link
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = beside(path)
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def beside(path: Path) -> Path:
    """Returns an unused path in the folder of `path`, unique to this process and this call."""
    return path.with_name(f".{path.name[:200]}.{os.getpid()}.{next(_counter)}")
