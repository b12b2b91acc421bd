"""The example of the page about codegen runs and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "codegen.md"


def test_example_on_the_codegen_page_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(example, PAGE, "exec"), {})
    *launches, instruction = capsys.readouterr().out.splitlines()
    assert any("fprop" in line for line in launches)
    assert instruction.startswith("('tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale")
