"""The tested versions: in one place, said by `env` and by the backend."""

from __future__ import annotations

import logging
import tomllib
from pathlib import Path

import pytest

from mxcompile import versions
from mxcompile.cli import main

ROOT = Path(__file__).parents[2]


def test_pyproject_asks_for_the_oldest():
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    for name, (oldest, _) in versions.TESTED.items():
        assert any(line.partition(";")[0].strip() == f"{name}>={oldest}" for line in wanted)


@pytest.mark.parametrize(
    ("version", "warning"),
    [
        ("2.13.0+cpu", ""),
        ("2.11.0", ""),
        ("2.16.0.dev20261220", "newer than tested: torch 2.11 to 2.15"),
        ("3.0.0a0+git", "newer than tested: torch 2.11 to 2.15"),
        ("2.9.1", "older than supported: torch 2.11 to 2.15"),
    ],
)
def test_untested_compares_the_installed_torch_version(
    version: str, warning: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(versions, "installed", lambda name: version)
    assert versions.untested("torch") == warning


def test_env_prints_and_the_backend_logs_an_untested_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(versions, "installed", lambda name: "9.1.0")
    main(["env"])
    assert "9.1.0 (newer than tested: torch 2.11 to 2.15)" in capsys.readouterr().out
    versions.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "mxcompile"):
        versions.warn_once()
        versions.warn_once()
    assert [record.message for record in caplog.records if record.message.startswith("torch")] == [
        "torch 9.1.0 is newer than tested: torch 2.11 to 2.15"
    ]
    versions.warn_once.cache_clear()


@pytest.mark.parametrize(
    ("version", "expected"), [("3.7.1", False), ("3.8.0", True), ("3.10.0+git", True), (None, False)]
)
def test_a_newer_minor_version_is_newer(version: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(versions, "installed", lambda name: version)
    assert versions.newer("triton", "3.7") is expected
