"""Each room has a budget of lines, so that the product does not grow unseen.

A budget counts the lines of the Python files directly in a folder. To raise one, give the reason in the
message of the commit that raises it. Where a room shrinks, lower its budget.
"""

from __future__ import annotations

from collections import Counter

from test_import_order import ROOT, modules

from mxcompile import ops

BUDGETS = {
    "lowering": 330,
    "lowering/chips": 1_000,
    "lowering/cpu": 810,
    "lowering/graph": 2_725,
    "lowering/inductor": 1_890,
    "lowering/kernels": 2_420,
    "lowering/templates": 4_470,
    "mxcompile": 407,
    "mxcompile/analysis": 195,
    "mxcompile/analysis/audit": 950,
    "mxcompile/analysis/blame": 930,
    "mxcompile/analysis/explain": 960,
    "mxcompile/analysis/study": 1_245,
    "mxcompile/analysis/tune": 590,
    "mxcompile/checkpoint": 1_800,
    "mxcompile/cli": 1_550,
    "mxcompile/compiler": 1_125,
    "mxcompile/compiler/calls": 487,
    "mxcompile/compiler/capture": 704,
    "mxcompile/compiler/hooks": 770,
    "mxcompile/compiler/reporting": 1_095,
    "mxcompile/compiler/session": 250,
    "mxcompile/distributed": 600,
    "mxcompile/formats": 1_970,
    "mxcompile/graph": 1_606,
    "mxcompile/mesh": 2_071,
    "mxcompile/models": 2_735,
    "mxcompile/offline": 3_351,
    "mxcompile/ops": 1_170,
    "mxcompile/plan": 720,
    "mxcompile/policy": 1_845,
    "mxcompile/policy/importers": 1_160,
    "mxcompile/ranks": 753,
    "mxcompile/report": 2_205,
    "mxcompile/report/forms": 1_375,
    "mxcompile/rules": 626,
    "mxcompile/serving": 585,
    "mxcompile/storage": 940,
    "mxcompile/watch": 1_935,
    "passes": 4_519,
    "passes/roles": 2_060,
}


NUM_OPERATORS = 19
"""The most operators that the library `mx` may have."""


def lines_by_room() -> Counter[str]:
    """Returns the number of lines of the Python files directly in each folder of the product."""
    lines: Counter[str] = Counter()
    for path in modules().values():
        lines[str(path.parent.relative_to(ROOT))] += len(path.read_text(encoding="utf-8").splitlines())
    return lines


def test_operators_keep_their_budget():
    assert len(ops.SPECS) <= NUM_OPERATORS


def test_every_room_keeps_its_budget_of_lines():
    lines = lines_by_room()
    total = f"the product has {lines.total():,} lines"
    assert lines.keys() == BUDGETS.keys(), total
    over = {room: f"{lines[room]} of {budget}" for room, budget in BUDGETS.items() if lines[room] > budget}
    assert not over, total
