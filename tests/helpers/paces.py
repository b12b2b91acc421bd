"""Which cases of a parametrized test every run has, and which only `make test-slow`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_slow(cases: Iterable[Any], *quick: Any, rows: bool = False) -> list[Any]:
    """`cases`, all but the `quick` ones marked slow. rows: a case is the values of several arguments."""
    cases = list(cases)
    assert {*quick} <= {*cases}
    slow = pytest.mark.slow
    return [
        case if case in quick else pytest.param(*(case if rows else (case,)), marks=slow) for case in cases
    ]
