"""The order of an operator's kernels."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import pytest

from mxcompile.lowering import candidates


@pytest.mark.parametrize("operator", candidates.ORDER)
def test_modules_of_the_order_have_the_kernel_of_their_operator(operator: str):
    pytest.importorskip("triton")
    for name in candidates.ORDER[operator]:
        module = importlib.import_module(f"mxcompile.lowering.{name}")
        assert callable(getattr(module, f"lower_{operator}"))


def test_kernels_run_in_order_until_one_takes_the_operands(monkeypatch: pytest.MonkeyPatch):
    def kernel(name: str, least: int) -> None:
        take = SimpleNamespace(lower_mm=lambda x, scale=1: (name, x * scale) if x >= least else None)
        monkeypatch.setitem(sys.modules, f"mxcompile.lowering.{name}", take)

    monkeypatch.setattr(candidates, "ORDER", {"mm": ("large", "absent", "small")})
    kernel("small", 2)
    kernel("large", 5)
    assert candidates.first("mm", 7) == ("large", 7)
    assert candidates.first("mm", 3, scale=2) == ("small", 6)
    assert candidates.first("mm", 1) is None
