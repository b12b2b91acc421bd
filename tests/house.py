"""Print the sizes that the tests of the house hold: lines by room, operators, circles between folders.

Usage: make house
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests/packaging"))

from test_import_order import circles  # noqa: E402
from test_room_budgets import BUDGETS, NUM_OPERATORS, lines_by_room  # noqa: E402

from mxcompile import ops  # noqa: E402


def main() -> None:
    """Print the sizes."""
    lines = lines_by_room()
    rows = [f"{lines[room]:6,} of {budget:5,}  {room}" for room, budget in BUDGETS.items()]
    tests = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in ROOT.glob("tests/**/*.py"))
    print(*rows, f"{lines.total():6,} lines in the product, {tests:,} in the tests", sep="\n")  # noqa: T201
    print(f"{len(ops.SPECS):6} operators, at most {NUM_OPERATORS}")  # noqa: T201
    for circle in circles():
        print(f"circle of folders: {' '.join(circle)}")  # noqa: T201


if __name__ == "__main__":
    main()
