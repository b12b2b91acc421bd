"""Plots need matplotlib, which is not installed with the package."""

from __future__ import annotations

import sys

import pytest

from mxcompile.cli import main
from mxcompile.errors import OptionError
from mxcompile.report.forms import plots


def test_a_figure_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(OptionError, match="plots need matplotlib: pip install matplotlib"):
        plots.figure()


@pytest.mark.parametrize(
    "command",
    [
        ["explain", "absent:made", "--sweep", "-o", "plot.svg"],
        ["mesh", "absent:made", "8", "--links", "net=50", "-o", "plot.svg"],
        ["audit", "absent:made", "--plots", "plots"],
    ],
)
def test_commands_without_matplotlib_say_so_before_a_model_is_made(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(command) == 2
    assert "plots need matplotlib" in capsys.readouterr().err
