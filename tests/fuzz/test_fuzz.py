"""Drawn cases under a fixed seed; ``tests/fuzz/run.py`` draws any number of others."""

from __future__ import annotations

import traceback

import pytest
from checked import check
from drawn import draw

CASES, CHUNK, SEED = 300, 10, 0


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("first", range(0, CASES, CHUNK * metafunc.config.getoption("--drawn-every")))


# torch says once a process that a norm with FP32 weights under autocast is not its fused one
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
@pytest.mark.slow
def test_drawn_cases_pass_under_a_fixed_seed(first: int):
    failed = {}
    for number in range(first, first + CHUNK):
        try:
            check(draw(SEED, number))
        except Exception:  # whatever it is: all of the chunk's are told
            failed[f"tests/fuzz/run.py --seed {SEED} --case {number}"] = traceback.format_exc()
    assert not failed, "\n".join(f"{case}\n{error}" for case, error in failed.items())
