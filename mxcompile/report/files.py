"""Report files: their forms by suffix, atomic writes, and errors that name the file.

``{rank}`` in a path stands for the rank of the process.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from mxcompile.errors import OptionError, not_allowed
from mxcompile.publish import beside, publish

_T = TypeVar("_T")
RANK = "{rank}"
"""Placeholder for the rank of the process in the path of a report."""


def save(path: str | Path, text: str, noun: str) -> None:
    """Writes `text` to `path` atomically. Raises `OptionError` with `noun` and the path if that fails."""
    try:
        publish(Path(path), text)
    except OSError as error:
        raise OptionError(f"{noun} {str(path)!r} cannot be written: {error.strerror or error}") from None


def form_of(path: str | Path, forms: Mapping[str, _T], noun: str) -> _T:
    """Returns the entry of `forms` for the suffix of `path`. Raises `OptionError` for an unknown suffix."""
    suffix = Path(path).suffix
    if suffix not in forms:
        raise OptionError(f"{noun} {str(path)!r}: {not_allowed('suffix', suffix, forms)}")
    return forms[suffix]


def load(path: str | Path, noun: str, read: Callable[[str], _T]) -> _T:
    """Returns `read` applied to the text of `path`. Raises `OptionError` with `noun` and the path."""
    try:
        return read(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise OptionError(f"{noun} {str(path)!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise OptionError(f"{noun} {str(path)!r} is not UTF-8 text: byte {error.start}") from None
    except OptionError as error:
        raise OptionError(f"{noun} {str(path)!r}: {error}") from None


class Document:
    """Base of results that are saved as files.

    NOUN: name of the result in errors. FORMS: functions that render it, by file suffix.
    """

    __slots__ = ()
    NOUN: ClassVar[str]
    FORMS: ClassVar[Mapping[str, Callable[[Any], str]]]

    @classmethod
    def form_of(cls, path: str | Path) -> Callable[[Self], str]:
        """Returns the renderer for the suffix of `path`. Raises `OptionError` for other suffixes."""
        return form_of(path, cls.FORMS, cls.NOUN)

    def save(self, path: str | Path) -> None:
        """Writes the result to `path` atomically.

        Args:
            path: File, whose suffix selects the form.

        Raises:
            OptionError: The suffix is unknown, or the file cannot be written.
        """
        save(path, self.form_of(path)(self), self.NOUN)


class LoadedDocument(Document, ABC):
    """Base of results that are also read from JSON files, and shown as HTML in notebooks."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        """Returns the HTML page in a frame, for notebooks."""
        page = escape(self.FORMS[".html"](self))
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 40em; border: 0"></iframe>'

    @classmethod
    @abstractmethod
    def from_json(cls, text: str) -> Self:
        """Returns the result that `to_json` wrote as `text`.

        Args:
            text: The JSON text.

        Raises:
            OptionError: The text is not such a result. The error has the JSON path of the first fault.
        """

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Returns the result in a JSON file.

        Args:
            path: The file.

        Raises:
            OptionError: The file cannot be read, or is not such a result. The error has the JSON path of the
                first fault.
        """
        return load(path, cls.NOUN, cls.from_json)


def check_writable(path: Path) -> None:
    """Raises `OptionError` if `path` cannot be written. Leaves no file."""
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
    """Returns the rank in the default process group, else the launcher's ``RANK``, else None."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    number = os.environ.get("RANK", "")
    return int(number) if number.isdecimal() else None


def of_rank(path: Path) -> Path:
    """Returns `path` with the rank of this process (0 without one) in place of every ``{rank}``."""
    return Path(str(path).replace(RANK, str(rank() or 0))) if RANK in str(path) else path


def is_mine(path: Path) -> bool:
    """Whether this process writes `path`: rank 0 does, or every rank if the path contains ``{rank}``."""
    return RANK in str(path) or not rank()
