"""Each room has a budget of lines, so that the product does not grow unseen.

A budget counts the lines of the Python files directly in a folder. To raise one, give the reason in the
message of the commit that raises it. Where a room shrinks, lower its budget.
"""

from __future__ import annotations

from collections import Counter

from test_import_order import ROOT, modules

from mxcompile import ops

BUDGETS = {
    "lowering": 221,
    "lowering/chips": 884,
    "lowering/choices": 915,
    "lowering/cpu": 974,
    "lowering/graph": 2_514,
    "lowering/inductor": 1_686,
    "lowering/kernels": 2_190,
    "lowering/templates": 3_294,
    "mxcompile": 417,
    "mxcompile/analysis": 163,
    "mxcompile/analysis/audit": 821,
    "mxcompile/analysis/blame": 796,
    "mxcompile/analysis/explain": 859,
    "mxcompile/analysis/study": 1_228,
    "mxcompile/analysis/tune": 518,
    "mxcompile/checkpoint": 2_542,
    "mxcompile/cli": 1_460,
    "mxcompile/compiler": 705,
    "mxcompile/compiler/calls": 879,
    "mxcompile/compiler/capture": 661,
    "mxcompile/compiler/hooks": 609,
    "mxcompile/compiler/reporting": 1_071,
    "mxcompile/compiler/session": 799,
    "mxcompile/distributed": 526,
    "mxcompile/formats": 1_956,
    "mxcompile/graph": 1_617,
    "mxcompile/mesh": 2_003,
    "mxcompile/models": 2_808,
    "mxcompile/offline": 3_078,
    "mxcompile/ops": 1_033,
    "mxcompile/plan": 704,
    "mxcompile/policy": 1_825,
    "mxcompile/policy/importers": 996,
    "mxcompile/ranks": 686,
    "mxcompile/report": 1_098,
    "mxcompile/report/data": 1_062,
    "mxcompile/report/forms": 1_127,
    "mxcompile/rules": 559,
    "mxcompile/serving": 600,
    "mxcompile/storage": 1_014,
    "mxcompile/watch": 1_849,
    "passes": 4_043,
    "passes/roles": 2_142,
}


NUM_OPERATORS = 18
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
