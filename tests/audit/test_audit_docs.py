"""The examples of docs/audit.md run, in order, and do what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mxcompile.cli.main import parser
from mxcompile.policy import Policy

PAGE = (Path(__file__).parents[2] / "docs" / "audit.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return [code for word, code in fenced if word == language]


def test_the_python_examples_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "example"}
    first, *rest = blocks("python")
    exec(compile(first, "audit.md", "exec"), names)
    printed = capsys.readouterr().out
    shown = next(block for block in blocks("") if block.startswith("MXFP8 audit")).splitlines()
    assert printed.splitlines()[0] == shown[0]
    # the loss moves in its last digits with the machine
    assert re.sub(r"[+-]?\d+\.\d+", "#", printed.splitlines()[1]) == re.sub(r"[+-]?\d+\.\d+", "#", shown[1])
    assert shown[4] in printed.splitlines()
    assert {path.name for path in tmp_path.iterdir()} == {"audit.html", "plots"}
    for code in rest:
        exec(compile(code, "audit.md", "exec"), names)
    assert Policy.load(tmp_path / "policy.yaml") == names["tuned"].policy


def test_commands_on_the_audit_page_parse() -> None:
    lines = [line for block in blocks("") for line in block.splitlines()]
    commands = [line.split()[1:] for line in lines if line.startswith("mxcompile ")]
    assert [command[0] for command in commands] == ["audit", "audit", "tune", "tune"]
    for command in commands:
        assert callable(parser().parse_args(command).run)


def test_policy_on_the_audit_page_loads(tmp_path: Path) -> None:
    (text,) = blocks("yaml")
    (tmp_path / "policy.yaml").write_text(text)
    (rule,) = Policy.load(tmp_path / "policy.yaml").rules
    assert rule.match.name == ("model.layers.0.self_attn.q_proj",)
