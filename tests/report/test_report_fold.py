"""Folding: a row stands for equal layers, and its name for exactly those."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_reports import W, X, record, training

from mxcompile.report import GemmRecord, Part, Report
from mxcompile.report.data.fold import fold


def folded(*gemms: GemmRecord) -> dict[str, int]:
    return {row.name: row.count for row in fold(gemms)}


def layers(*paths: str) -> dict[str, int]:
    return folded(*(gemm for path in paths for gemm in training(path)))


FOLDED: dict[str, tuple[list[str], dict[str, int]]] = {
    "equal layers": (
        [f"model.layers.{i}.mlp.up_proj" for i in range(32)], {"model.layers.0-31.mlp.up_proj": 32}
    ),
    "a gap of numbers": (["h.0.fc", "h.1.fc", "h.2.fc", "h.5.fc"], {"h.0-2,5.fc": 4}),
    "numbers in the order of numbers": (["h.10.fc", "h.9.fc", "h.2.fc"], {"h.2,9-10.fc": 3}),
    "two numbers in a path": (
        [f"layers.{i}.experts.{j}.up" for i in range(2) for j in range(4)], {"layers.0-1.experts.0-3.up": 8}
    ),
    "no layer that is not there": (
        ["0.experts.0", "0.experts.1", "1.experts.0"], {"0.experts.0-1": 2, "1.experts.0": 1}
    ),
    "layers alone": (
        ["blocks.007.fc", "h.².fc", "fc1", ""], {"blocks.007.fc": 1, "h.².fc": 1, "fc1": 1, "": 1}
    ),
    "another word": (["h.0.up", "h.0.gate", "g.0.up"], {"h.0.up": 1, "h.0.gate": 1, "g.0.up": 1}),
}  # fmt: skip
"""The paths of layers, and the count of each row that they fold to; keys say what is special."""


@pytest.mark.parametrize("case", FOLDED)
def test_names_of_equal_layers_fold_into_rows(case: str):
    paths, rows = FOLDED[case]
    assert layers(*paths) == rows


@pytest.mark.parametrize(
    "change",
    [
        {"role": "other"},
        {"batch": 2},
        {"m": 65},
        {"n": 97},
        {"k": 33},
        {"precision": "bf16"},
        {"formats": (X, replace(W, block="32x32"))},
        {"kernel": "triton_mm"},
        {"reason": "policy: rule 2"},
        {"gemm": "dgrad"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_layers_that_differ_in_one_respect_stay_apart(change: dict[str, Any]):
    assert folded(record("h.0.fc"), record("h.1.fc")) == {"h.0-1.fc": 2}
    other = replace(record("h.1.fc"), **change)
    assert folded(record("h.0.fc"), other) == {"h.0.fc": 1, "h.1.fc": 1}


def test_layers_that_differ_in_one_of_three_gemms_stay_apart():
    changed = [*training("h.1.fc")[:2], replace(training("h.1.fc")[2], precision="bf16")]
    assert folded(*training("h.0.fc"), *changed) == {"h.0.fc": 1, "h.1.fc": 1}


def test_where_a_layer_is_written_does_not_keep_it_apart():
    assert folded(record("h.0.fc", source="a.py:1"), record("h.1.fc", source="a.py:2")) == {"h.0-1.fc": 2}


def test_layers_of_several_graphs_fold():
    parts = [Part(gemms=(record(f"h.{i}.fc"),)) for i in range(3)]
    assert folded(*Report.from_parts(parts, target="cpu", policy="p").gemms) == {"h.0-2.fc": 3}


def test_rows_come_in_the_order_of_their_first_layer():
    assert [*layers("h.0.b", "h.0.a", "h.1.b", "h.1.a")] == ["h.0-1.b", "h.0-1.a"]


def spelled_out(name: str) -> set[str]:
    """The names that a folded `name` stands for."""
    columns = [
        [
            str(number)
            for part in step.split(",")
            for low, _, high in [part.partition("-")]
            for number in range(int(low), int(high or low) + 1)
        ]
        if re.fullmatch(r"(0|[1-9]\d*)([-,]\d+)*", step)
        else [step]
        for step in name.split(".")
    ]
    return {".".join(steps) for steps in itertools.product(*columns)}


STEPS = st.sampled_from(["a", "b", "07", "#"]) | st.integers(0, 12).map(str)
PATHS = st.lists(STEPS, min_size=1, max_size=4).map(".".join)


@settings(max_examples=200, deadline=None)
@given(names=st.lists(PATHS, max_size=40, unique=True))
def test_folded_names_stand_for_exactly_the_layers_they_count(names: list[str]):
    rows = layers(*names)
    assert {name for row in rows for name in spelled_out(row)} == set(names)
    assert {row: len(spelled_out(row)) for row in rows} == rows
