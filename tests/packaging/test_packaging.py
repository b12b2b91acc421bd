"""What is installed: the packages of the tree, under one name."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TREES = {"mxcompile": "mxcompile", "mxcompile.passes": "passes", "mxcompile.lowering": "lowering"}


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False)


def on_disk() -> set[str]:
    """The packages of the tree, by their installed name."""
    packages = set()
    for name, folder in TREES.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            inner = init.parent.relative_to(ROOT / folder).parts
            if not (name == "mxcompile" and inner[:1] in (("passes",), ("lowering",))):
                packages.add(".".join((name, *inner)))
    return packages


def test_pyproject_lists_the_packages_on_disk():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert len(listed) == len(set(listed))
    assert set(listed) == on_disk()


def test_every_folder_with_code_is_a_package():
    for folder in TREES.values():
        for module in (ROOT / folder).rglob("*.py"):
            assert (module.parent / "__init__.py").is_file(), module


def test_the_links_point_to_the_trees():
    for name in ("passes", "lowering"):
        link = ROOT / "mxcompile" / name
        assert link.is_symlink()
        assert link.readlink() == Path("..", name)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The names in a wheel built from a copy of the tree."""
    copy = tmp_path_factory.mktemp("wheel") / "copy"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in TREES.values():
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=ignored)
    build = "from setuptools.build_meta import build_wheel; build_wheel('out')"
    built = run("-W", "ignore", "-c", build, cwd=copy)
    assert built.returncode == 0, built.stderr
    (path,) = (copy / "out").glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return archive.namelist()


def test_a_wheel_holds_every_module_once(wheel: list[str]):
    expected = {
        "/".join((*name.split("."), *module.relative_to(ROOT / folder).parts))
        for name, folder in TREES.items()
        for module in (ROOT / folder).rglob("*.py")
    }
    assert len(wheel) == len(set(wheel))
    assert {name for name in wheel if name.endswith(".py")} == expected
    assert {"mxcompile/passes/pipeline.py", "mxcompile/lowering/graph/pipeline.py"} <= expected


def test_a_wheel_puts_one_name_in_site_packages(wheel: list[str]):
    top = {name.split("/")[0] for name in wheel}
    (metadata,) = (name for name in top if name.endswith(".dist-info"))
    assert top == {"mxcompile", metadata}
    assert f"{metadata}/entry_points.txt" in wheel


def test_a_wheel_holds_the_data_beside_the_code(wheel: list[str]):
    """Everything in the package's folders that is not code: schemas, templates, the typing marker."""
    data = {
        "/".join((*name.split("."), *file.relative_to(ROOT / folder).parts))
        for name, folder in TREES.items()
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and file.suffix not in (".py", ".pyc", ".md")
    }
    assert "mxcompile/py.typed" in data
    assert data <= set(wheel)


@pytest.mark.parametrize("name", ["passes", "lowering"])
def test_the_trees_cannot_be_imported_by_their_short_name(name: str):
    """From the repository's root they are on the path; a second copy of every module would be made."""
    done = run("-c", f"import {name}", cwd=ROOT)
    assert done.returncode != 0
    assert f"ImportError: the {name}" in done.stderr
    assert f"mxcompile.{name}: import that, not '{name}'" in done.stderr
