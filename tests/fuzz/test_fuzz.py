"""Drawn cases under a fixed seed; ``tests/fuzz/run.py`` draws any number of others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from checked import check
from drawn import draw

CASES, CHUNK, SEED = 300, 10, 0


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, CASES, CHUNK))
def test_drawn_cases(first: int):
    failed = {}
    for number in range(first, first + CHUNK):
        try:
            check(draw(SEED, number))
        except Exception as error:  # whatever it is: all of the chunk's are told
            failed[f"tests/fuzz/run.py --seed {SEED} --case {number}"] = f"{type(error).__name__}: {error}"
    assert not failed
