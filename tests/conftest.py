"""Shared by all tests: Inductor's caches, new for every run, options, and a fresh state for each test."""

from __future__ import annotations

import importlib
import itertools
import os
import random
import tempfile
import traceback
from importlib.util import find_spec
from pathlib import Path

import pytest

_product = find_spec("mxcompile")  # importing it may import torch, which reads the environment below
assert _product is not None
assert _product.origin is not None
PRODUCT = Path(_product.origin).parent

_caches = tempfile.TemporaryDirectory(prefix="mxcompile-tests-", ignore_cleanup_errors=True)
os.environ["TORCHINDUCTOR_CACHE_DIR"] = _caches.name
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Inductor's results are references, and GCC 12 compiles them wrongly for AVX-512 without this: docs/cpu.md
os.environ.setdefault(
    "TORCHINDUCTOR_CPP_ENABLE_FLOATING_POINT_CONTRACT_FLAG", "off -fno-tree-loop-distribute-patterns"
)


ZOO_DISGUISES = "plain,all:2,training:5,grouped_mm:3,batched_mm:3,loop:3"


def pytest_addoption(parser):
    parser.addoption("--zoo-misfits", default="", help="a file to add what the zoo finds to")
    parser.addoption(
        "--zoo-disguises", default=ZOO_DISGUISES, help="what the zoo's models wear: see zoo/disguise.py"
    )
    parser.addoption(
        "--drawn-every", type=int, default=1, help="run every so many of the fuzzer's tens and of random cuts"
    )
    parser.addoption(
        "--slow-cases",
        type=int,
        default=0,
        help="run so many cases of each slow test, spread evenly (0: all)",
    )
    parser.addoption(
        "--slow-turn",
        type=int,
        default=0,
        help="with --slow-cases, start from the first case (0), one in the middle (1) or the last (2)",
    )
    parser.addoption(
        "--slow-part", default="1/1", help="run this part of the slow tests: 2/3 is the second of three"
    )
    parser.addoption(
        "--shuffle", type=int, metavar="SEED", help="run the files, and the tests of each, in a random order"
    )


def pytest_collection_modifyitems(config, items):
    """Shuffle the tests, and thin out the cases of slow ones, as the options ask."""
    if (seed := config.getoption("--shuffle")) is not None:
        draw = random.Random(seed)
        files = [[*group] for _, group in itertools.groupby(items, lambda item: item.path)]
        draw.shuffle(files)
        items[:] = [item for group in files for item in draw.sample(group, len(group))]
    most = config.getoption("--slow-cases")
    turn = config.getoption("--slow-turn") % 3
    part, parts = map(int, config.getoption("--slow-part").split("/"))
    cases = {}
    for item in items:
        if item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = set()
    for number, group in enumerate(cases.values()):
        runs = min(most, len(group)) or len(group) if number % parts == part - 1 else 0
        start = (0, len(group) // 2, len(group) - 1)[turn]
        chosen = {(start + len(group) * index // runs) % len(group) for index in range(runs)}
        left_out |= {item for index, item in enumerate(group) if index not in chosen}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


OPTIONAL = ("compressed_tensors", "expecttest", "jsonschema", "torchao")
"""Packages for tests that a machine with a GPU may lack."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skip a test that imports one of these packages if it is not installed; imports of the product fail."""
    try:
        return (yield)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
        if package not in OPTIONAL or find_spec(package) or any(PRODUCT in file.parents for file in files):
            raise
        pytest.skip(f"{package} is not installed")


@pytest.fixture(autouse=True)
def _fresh_state():
    """Every test starts without compiled code or reports of another."""
    from helpers.fresh import fresh_state

    yield from fresh_state()


@pytest.fixture
def in_this_process():
    """Models are traced and code is generated in this process, not in a child: a test sees what is called."""
    from mxcompile.models import isolated

    token = isolated._IN_CHILD.set(True)
    yield
    isolated._IN_CHILD.reset(token)


@pytest.fixture
def benchmark(monkeypatch):
    """Function of a name: that module of the folder `benchmarks`."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return importlib.import_module
