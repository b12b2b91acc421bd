"""The tables of passes in docs/architecture.md name those that the code runs, in its order."""

from __future__ import annotations

import re
from pathlib import Path

from mxcompile.lowering.graph.pipeline import JOINT_LOWERING, LOWERING
from mxcompile.models.blocks import Blocks
from mxcompile.passes import pipeline
from mxcompile.passes.compress import Compress
from mxcompile.passes.flatten import Flatten
from mxcompile.passes.watch import Watch
from mxcompile.policy import Policy

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


def first_column(title: str) -> list[str]:
    """The code words of the first column of the table whose first column is called `title`."""
    _, _, table = PAGE.read_text(encoding="utf-8").partition(f"| {title} |")
    rows = table.partition("\n\n")[0].splitlines()[2:]
    return [re.findall("`(.+?)`", row)[0] for row in rows]


def test_table_of_passes_equals_the_pipeline():
    facts = {"strict": False, "inputs": (), "blocks": Blocks(), "planned": {}, "tapped": False}
    passes = pipeline.joint_passes(Policy.preset("nvidia"), cut="a part of a model", **facts)
    on_parts = [Compress.name, Watch.name, Flatten.name]
    assert first_column("pass") == [step.name for step in passes] + on_parts


def test_table_of_lowering_passes_equals_the_code():
    assert first_column("lowering pass") == [step.name for step in (*JOINT_LOWERING, *LOWERING)]
