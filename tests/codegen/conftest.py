"""Code for each target is generated once; every test looks at it."""

from __future__ import annotations

import functools

import pytest
from llama_block import block

from mxcompile.lowering.choices import configs
from mxcompile.lowering.inductor import winners
from mxcompile.offline import CodegenResult, codegen


@functools.cache
def _generate(target: str, training: bool) -> CodegenResult:
    model, x = block()
    return codegen(model, x, target=target, training=training)


@pytest.fixture(scope="session")
def generated():
    """Function of a target and whether to train: the code of a Llama block."""
    return _generate


@pytest.fixture
def choose(monkeypatch):
    """Function of a template and a number: Inductor takes that choice of it, or its last, untimed.

    It returns the lists that Inductor chose from. Of other templates the first choice is taken.
    """

    def chosen(template: str, number: int) -> list[list]:
        offered: list[list] = []
        plain = winners.autotune_select_algorithm

        def select(name, choices, operands, layout, **keywords):
            if name != template:
                return plain(name, choices[:1], operands, layout, **keywords)
            offered.append(choices)
            return choices[min(number, len(choices) - 1)].output_node()

        monkeypatch.setattr(configs, "autotuning", lambda: True)
        monkeypatch.setattr(winners, "autotune_select_algorithm", select)
        return offered

    return chosen
