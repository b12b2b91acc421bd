"""docs/trainers.md: its examples run, in order."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"
SECTIONS = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)


def code(section: str) -> str:
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE))


@pytest.mark.slow
@pytest.mark.parametrize(
    "section", SECTIONS[1:], ids=[section.partition("\n")[0] for section in SECTIONS[1:]]
)
def test_example_of_each_trainer_runs(section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "example"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the trainers' own code
        exec(compile(code(SECTIONS[0]), str(PAGE), "exec"), names)
        exec(compile(code(section), str(PAGE), "exec"), names)
