"""Plots need matplotlib, which is not installed with the package."""

from __future__ import annotations

import sys

import pytest

from mxcompile.cli import main
from mxcompile.errors import OptionError
from mxcompile.report.forms import plots


def test_figure_without_matplotlib_raises_error_with_install_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(OptionError, match="plots need matplotlib: pip install matplotlib"):
        plots.figure()


@pytest.mark.parametrize(
    "command",
    [
        ["explain", "absent:example", "--sweep", "-o", "plot.svg"],
        ["mesh", "absent:example", "8", "--links", "net=50", "-o", "plot.svg"],
        ["audit", "absent:example", "--plots", "plots"],
    ],
)
def test_commands_without_matplotlib_fail_before_making_a_model(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(command) == 2
    assert "plots need matplotlib" in capsys.readouterr().err
