"""The site builds, and no link in it or in the README leads nowhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import mxcompile

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_site_builds_strictly(tmp_path: Path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(ROOT / ".mkdocs.yml")]
    done = subprocess.run(
        [*command, "-d", str(tmp_path / "site")], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    api = (tmp_path / "site" / "api" / "index.html").read_text(encoding="utf-8")
    for name in ("explain", "audit", "codegen", "Backend", "MXTensor", "PolicyError"):
        assert re.search(rf'id="mxcompile\.[\w.]*\b{name}"', api), name


def test_every_page_is_in_the_navigation():
    config = (ROOT / ".mkdocs.yml").read_text(encoding="utf-8")
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if f": {page}\n" not in config] == []


def test_every_public_name_is_in_the_reference_once():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    shown = re.findall(r"^::: mxcompile\.[\w.]*\b(\w+)$", page, re.MULTILINE)
    assert sorted(shown) == sorted({*mxcompile.__all__} - {"__version__"} | {"Summary", "errors"})


@pytest.mark.parametrize("page", ["README.md", "examples/README.md"])
def test_links_of_the_readmes_exist(page: str):
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []
