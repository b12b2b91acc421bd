"""The table of docs/formats.md names the kernel family of each format on each chip."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from mxcompile.lowering.choices.families import Family, families
from mxcompile.lowering.targets import TARGETS
from mxcompile.policy import Gemm, Layer, Policy, Role

PAGE = Path(__file__).parents[2] / "docs" / "formats.md"
LAYER = Layer(name="l", role=Role.FFN_IN, module="Linear", m=4096, n=4096, k=4096)


def cells(line: str) -> list[str]:
    return [cell.strip().strip("`") for cell in line.strip().strip("|").split("|")]


def rows() -> tuple[list[str], list[list[str]]]:
    """The chips of the table, and its rows."""
    table = re.search(r"^\| `use` \|.*\n(?:\|.*\n)+", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert table is not None
    head, _, *lines = table[0].splitlines()
    return cells(head)[1:], [cells(line) for line in lines]


def family_of(use: str, target: str) -> Family:
    """The first family for all GEMMs of a layer under the rule `use` whose weight is not stored."""
    rule = {"match": {"name": "*"}, "use": yaml.safe_load(use)}
    decision = Policy.from_dict({"version": 1, "rules": [rule]}).decide(LAYER)
    names = set()
    for gemm, operands in {Gemm.FPROP: "xw", Gemm.DGRAD: ("dy", "w"), Gemm.WGRAD: ("dy", "x")}.items():
        formats = decision.choice(gemm).formats
        assert formats is not None
        every = families([formats.operand_format(operand).as_read for operand in operands], TARGETS[target])
        names.add(next(family for family in every if family is not Family.WEIGHT_ONLY))
    (family,) = names
    return family


def test_table_has_every_gpu():
    assert rows()[0] == [name for name, target in TARGETS.items() if target.device == "cuda"]


@pytest.mark.parametrize("row", rows()[1], ids=lambda row: row[0])
def test_table_names_the_family(row: list[str]):
    use, *named = row
    assert named == [str(family_of(use, target)) for target in rows()[0]]
