"""Report files: written whole or not at all, and no reason for anything else to stop.

``{rank}`` in a path is the rank of the process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from mxcompile.errors import OptionError, not_allowed
from mxcompile.publish import beside, publish

_T = TypeVar("_T")
RANK = "{rank}"
"""In the path of a report: the rank of the process."""


def save(path: str | Path, text: str, what: str) -> None:
    """`publish`, but what cannot be written is an `OptionError` that names `what` it is and the file."""
    try:
        publish(Path(path), text)
    except OSError as error:
        raise OptionError(f"{what} {str(path)!r} cannot be written: {error.strerror or error}") from None


def form_of(path: str | Path, forms: Mapping[str, _T], what: str) -> _T:
    """Returns the one of `forms` for the suffix of `path`. Raises `OptionError` for a suffix without one."""
    suffix = Path(path).suffix
    if suffix not in forms:
        raise OptionError(f"{what} {str(path)!r}: {not_allowed('suffix', suffix, forms)}")
    return forms[suffix]


def load(path: str | Path, what: str, read: Callable[[str], _T]) -> _T:
    """Returns what `read` makes of the text in `path`. Raises `OptionError` with `what` and the file."""
    try:
        return read(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise OptionError(f"{what} {str(path)!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise OptionError(f"{what} {str(path)!r} is not UTF-8 text: byte {error.start}") from None
    except OptionError as error:
        raise OptionError(f"{what} {str(path)!r}: {error}") from None


def check_place(path: Path) -> None:
    """Raise `OptionError` if no file can be put at `path`. Leaves nothing there."""
    path = of_rank(path)
    try:
        if path.is_dir():
            raise OptionError(f"report {str(path)!r} cannot be written: Is a directory")
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        probe = beside(folder / "mxcompile")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OptionError(f"report {str(path)!r} cannot be written: {error.strerror or error}") from None


def rank() -> int | None:
    """The rank of this process, in the default process group or as its launcher says; None without both."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    number = os.environ.get("RANK", "")
    return int(number) if number.isdecimal() else None


def of_rank(path: Path) -> Path:
    """`path` with the rank of this process, 0 if it has none, for every ``{rank}``."""
    return Path(str(path).replace(RANK, str(rank() or 0))) if RANK in str(path) else path


def is_mine(path: Path) -> bool:
    """Whether this process writes `path`: of many ranks the first does, unless each has a file of its own."""
    return RANK in str(path) or not rank()
