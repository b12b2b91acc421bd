"""Which cases of a parametrized test every run has, and which only `make test-slow`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_slow(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """`cases`, all but those that are `quick` marked slow."""
    cases = list(cases)
    assert {*quick} <= {*cases}
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]
