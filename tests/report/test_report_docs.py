"""The examples of docs/report.md run, in order, and print what the page shows."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest

from mxcompile.cli.main import main
from mxcompile.report import FORMS

PAGE = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def shown(text: str) -> list[str]:
    """Lines without what differs from run to run."""
    return [re.sub(r"passes \d+ ms", "passes # ms", line.rstrip()) for line in text.strip().splitlines()]


@pytest.mark.slow
def test_examples_on_the_report_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("report_examples.py").write_text("\n".join(blocks("python")), encoding="utf-8")
    try:
        importlib.import_module("report_examples")
    finally:
        sys.modules.pop("report_examples", None)
    assert Path("mx_report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    (text,) = blocks("text")
    assert shown(Path("before.txt").read_text(encoding="utf-8")) == shown(text)
    assert "$.gemms[0].formats[0].elem: unknown word 'e3m4'" in capsys.readouterr().out
    for console, status in zip(blocks("console"), (1, 0), strict=True):
        command, _, printed = console.partition("\n")
        assert main(shlex.split(command.removeprefix("$ mxcompile "))) == status
        assert shown(capsys.readouterr().out) == shown(printed)


def test_the_forms_are_all_named():
    assert set(re.findall(r"^\| `(\.\w+)` \|", PAGE, re.MULTILINE)) == set(FORMS)
