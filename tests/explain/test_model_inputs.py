"""Which keywords are options and which are the model's, in every function that takes both."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.made import Made
from torch import nn

import mxcompile
from mxcompile.errors import ModelError, OptionError


class Loss(Made, fc=(64, 64)):
    """Arguments called like options of ours."""

    def forward(self, x, target=None, policy=None, training=None, scale=1.0):
        y = self.fc(x) * scale
        return y.mean() if target is None else (y - target).square().mean()


class Open(Loss):
    def forward(self, x, **others):
        return super().forward(x, **others)


X, Y = torch.randn(32, 64), torch.randn(32, 64)
FUNCTIONS = [
    mxcompile.explain,
    mxcompile.audit,
    lambda model, *args, **kw: mxcompile.tune(model, *args, min_sqnr=10, **kw),
    mxcompile.codegen,
]


@pytest.mark.parametrize("function", FUNCTIONS[:3])
def test_kwargs_may_have_names_of_options(function):
    assert function(Loss(), X, kwargs={"target": Y, "policy": None, "training": True}) is not None


def test_argument_in_kwargs_reaches_the_model():
    model = Loss()
    loss = mxcompile.audit(model, X, kwargs={"target": Y}).numerics.loss_reference
    assert loss == pytest.approx(float(model(X, Y).detach()), rel=1e-2)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("model", [Loss(), Open()], ids=["named", "open"])
def test_a_misspelt_option_is_an_error(function, model):
    with pytest.raises(OptionError, match=r"'polcy' is neither an option .* \(did you mean 'policy'\?\)"):
        function(model, X, polcy="ocp")


@pytest.mark.parametrize("name", ["explain", "explain_rank", "audit", "tune", "blame", "codegen"])
def test_a_tensor_as_any_option_is_an_error(name):
    function = getattr(mxcompile, name)
    options = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name != "kwargs"
    ]
    needed = {"mesh": "dp=2"} if name == "explain_rank" else {}
    assert "policy" in options
    for name in options:
        message = f"'{name}' is an option of {function.__name__}, not a tensor; to pass the model an argument"
        with pytest.raises(OptionError, match=f"{message} of that name, write kwargs="):
            function(Loss(), X, **needed | {name: Y})


@pytest.mark.parametrize("function", FUNCTIONS)
def test_function_in_place_of_a_module_raises(function):
    with pytest.raises(ModelError, match=r"takes a torch\.nn\.Module, found function"):
        function(lambda x: x, X)


@pytest.mark.parametrize("function", [*FUNCTIONS, mxcompile.blame, mxcompile.quantize_weights_])
def test_lazy_model_before_its_first_call_raises_and_stays_lazy(function):
    model = nn.Sequential(nn.LazyLinear(64), nn.Linear(64, 64))
    with pytest.raises(ModelError, match=r"0\.weight is lazy.*: call the model once"):
        function(model, X)
    assert isinstance(model[0], nn.LazyLinear)


def test_an_argument_of_the_model_goes_through():
    assert mxcompile.explain(Loss(), X, scale=2.0).gemms
    assert mxcompile.explain(Open(), X, scale=2.0).gemms


def test_argument_as_keyword_and_in_kwargs_raises():
    with pytest.raises(OptionError, match="both a keyword and a key of kwargs"):
        mxcompile.explain(Loss(), X, scale=2.0, kwargs={"scale": 3.0})


def test_kwargs_must_be_a_dict():
    with pytest.raises(OptionError, match="kwargs must be a dict"):
        mxcompile.explain(Loss(), X, kwargs=[1])


SCRIPT = """
import torch
from torch import nn
import mxcompile

x = torch.randn(2, 2)
model = nn.Linear(2, 2)
mxcompile.explain(model, x, mask=x, policy="ocp", kwargs={"use_cache": False})
mxcompile.explain(model, x, polcy="ocp")
mxcompile.audit(model, x, los_fn=3)
mxcompile.codegen(model, x, traget="sm_90")
mxcompile.Backend(polcy="ocp")
mxcompile.Backend(strict="yes")
mxcompile.quantize(x, bloc_dim=1)
"""


@pytest.mark.slow
def test_a_type_checker_sees_slips(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context", str(script)]
    process = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False
    )
    lines = {int(line.split(":")[1]) for line in process.stdout.splitlines() if line.startswith(str(script))}
    assert lines == {9, 10, 11, 12, 13, 14}, process.stdout
