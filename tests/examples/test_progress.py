"""Progress for a file or a pipe: a line every interval, also while nothing advances."""

from __future__ import annotations

import sys
import threading

import pytest
from demo import progress
from demo.progress import Lines, progress_bar


class Stream:
    """Keeps what is written, and says when there were `wanted` lines."""

    def __init__(self, wanted: int) -> None:
        self.lines: list[str] = []
        self.enough = threading.Event()
        self._wanted = wanted

    def write(self, text: str) -> None:
        self.lines += [line for line in text.splitlines() if line]
        if len(self.lines) >= self._wanted:
            self.enough.set()

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False


def test_lines_come_while_nothing_advances(monkeypatch: pytest.MonkeyPatch):
    stream = Stream(wanted=2)
    monkeypatch.setattr(sys, "stderr", stream)
    with Lines("fp32, compiling", interval_s=0.01):
        assert stream.enough.wait(30)
    assert all(line.endswith("s  fp32, compiling: 0%") for line in stream.lines)


def test_progress_line_shows_description_share_and_postfix(monkeypatch: pytest.MonkeyPatch):
    stream = Stream(wanted=1)
    monkeypatch.setattr(sys, "stderr", stream)
    with Lines("starting", interval_s=1000) as bar:
        bar.reset(total=8)
        bar.set_description("fp32, seed 0", refresh=False)
        bar.set_postfix_str(" loss 2.500", refresh=False)
        bar.update()
        bar.update()
        assert bar.line().endswith(" s  fp32, seed 0: 25% loss 2.500")
    assert not stream.lines


def test_progress_without_a_terminal_prints_lines(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stderr", Stream(wanted=1))
    with progress_bar("starting") as bar:
        assert isinstance(bar, progress.Lines)


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch):
    stream = Stream(wanted=1)
    monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_bar("starting"):
        pass
    assert any("starting" in line for line in stream.lines)
