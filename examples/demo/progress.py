"""Progress of a command that runs for minutes: a bar on a terminal, else a line every ten seconds."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

_RUNNING = "{desc:<30} {percentage:3.0f}% |{bar}| {elapsed}<{remaining}{postfix}"
_INTERVAL_S = 10.0


def progress_bar(description: str) -> Any:
    """Returns a bar of tqdm if standard error is a terminal, else `Lines` with the same methods."""
    from tqdm import tqdm

    if sys.stderr.isatty():
        return tqdm(desc=description, total=1, leave=False, bar_format=_RUNNING)
    return Lines(description)


class Lines:
    """Replaces a tqdm bar if standard error is a file or a pipe: writes lines, with the same methods.

    A thread writes the lines, so that they also appear while nothing advances, such as during a compile.
    """

    def __init__(self, description: str, interval_s: float = _INTERVAL_S) -> None:
        self._description, self._postfix = description, ""
        self._done, self._total = 0, 1
        self._start = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._write, args=(interval_s,), daemon=True)
        self._thread.start()

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reset(self, total: int) -> None:
        """Restarts with `total` steps."""
        self._done, self._total = 0, total

    def update(self, count: int = 1) -> None:
        """Adds `count` finished steps."""
        self._done += count

    def set_description(self, text: str, refresh: bool = True) -> None:
        """Sets the description of the current work."""
        self._description = text

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        """Sets the text after the percentage."""
        self._postfix = text

    def clear(self) -> None:
        """Does nothing; lines cannot be cleared."""

    def refresh(self) -> None:
        """Does nothing; the thread writes lines."""

    def close(self) -> None:
        """Stops the thread."""
        self._closed.set()
        self._thread.join()

    def line(self) -> str:
        """Returns the seconds since the start, the description, and the progress."""
        seconds = time.monotonic() - self._start
        share = self._done / max(1, self._total)
        return f"{seconds:4.0f} s  {self._description}: {share:.0%}{self._postfix}"

    def _write(self, interval_s: float) -> None:
        while not self._closed.wait(interval_s):
            print(self.line(), file=sys.stderr, flush=True)
