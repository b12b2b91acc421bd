"""Whole models on the GPU of this machine, compiled, against the eager reference on the CPU."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from helpers.eager import reference_linears
from helpers.models import CASES, Case
from helpers.reference import sqnr_db
from torch.utils._pytree import tree_map_only

import mxcompile

pytestmark = pytest.mark.gpu


def on(device: str, case: Case) -> Case:
    """`case` with its model and inputs on `device`."""
    kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), case.kwargs)
    return dataclasses.replace(case, model=case.model.to(device), kwargs=kwargs)


def step(model: Any, case: Case) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits and gradients of one step, on the CPU."""
    output = model(**case.kwargs)
    (output.loss if hasattr(output, "loss") else case.logits(output).float().mean()).backward()
    gradients = {
        name.removeprefix("_orig_mod."): parameter.grad.cpu()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return case.logits(output).detach().cpu(), gradients


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_a_compiled_step_equals_the_reference(name: str):
    case = CASES[name](layers=1)
    eager = dataclasses.replace(case, model=copy.deepcopy(case.model))
    here = on("cuda", case)
    logits, gradients = step(torch.compile(here.model, backend="mxfp8", fullgraph=True), here)
    (report,) = mxcompile.reports()
    assert any(gemm.precision == "mxfp8" for gemm in report.gemms)
    assert all(gemm.kernel for gemm in report.gemms)
    with reference_linears(eager.model, report):
        expected, expected_gradients = step(eager.model, eager)
    assert sqnr_db(expected, logits) > 45
    sizes = {name: value.double().square().mean().sqrt() for name, value in expected_gradients.items()}
    for name, value in expected_gradients.items():
        if sizes[name] > 1e-4 * max(sizes.values()):
            assert sqnr_db(value, gradients[name]) > 35, name
