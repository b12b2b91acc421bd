"""`explain` of calls that are not a tensor and a plain module: a right report, or an error of one line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from helpers.eager_backend import EagerBackend
from helpers.made import Made
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional as F

import mxcompile
from mxcompile.errors import ModelError

WIDTH, WIDE, ROWS = 64, 96, 8


class Net(Made, up=(WIDTH, WIDE), down=(WIDE, WIDTH), read=lambda: lambda x: x):
    """Two layers, whose input `read` takes from the arguments."""

    def forward(self, *args: Any) -> Tensor:
        return self.down(F.relu(self.up(self.read(*args))))


@dataclass
class Batch:
    x: Tensor


def data(**settings: Any) -> Tensor:
    return torch.randn(ROWS, WIDTH, **settings)


def traced(call: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Two layers as `call` returns them."""
    return call(nn.Sequential(nn.Linear(WIDTH, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDTH)).eval())


REPORTED: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "None": lambda: (Net(read=lambda x: torch.ones(ROWS, WIDTH) if x is None else x), (None,)),
    "no inputs": lambda: (Net(read=lambda: torch.ones(ROWS, WIDTH)), ()),
    "nested dict": lambda: (Net(read=lambda batch: batch["a"]["x"][0]), ({"a": {"x": [data()]}},)),
    "dataclass": lambda: (Net(read=lambda batch: batch.x), (Batch(data()),)),
    "array of numpy": lambda: (Net(read=torch.from_numpy), (np.zeros((ROWS, WIDTH), dtype=np.float32),)),
    "meta tensor": lambda: (Net(), (data(device="meta"),)),
    "sparse matrix": lambda: (Net(read=lambda a, x: a @ x), (torch.eye(ROWS).to_sparse(), data())),
    "complex": lambda: (Net(read=lambda x: x.real), (data(dtype=torch.complex64).conj(),)),
    "tensor of inference mode": lambda: (Net(), (torch.inference_mode()(data)(),)),
    "graph of fx": lambda: (traced(torch.fx.symbolic_trace), (data(),)),
    "exported program": lambda: (
        traced(lambda model: torch.export.export(model, (data(),)).module()),
        (data(),),
    ),
}
"""By name, a model with the layers of `Net`, and its arguments."""


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", REPORTED)
def test_odd_call_gives_the_report_of_a_plain_one(name: str, training: bool) -> None:
    model, args = REPORTED[name]()
    report = mxcompile.explain(model, *args, policy="nvidia", training=training)
    names = ("0", "2") if name in ("graph of fx", "exported program") else ("up", "down")
    sizes = {gemm.name: (gemm.m, gemm.n, gemm.k) for gemm in report.gemms if gemm.gemm == "fprop"}
    layers = {path: size for path, size in sizes.items() if path}
    assert layers == {names[0]: (ROWS, WIDE, WIDTH), names[1]: (ROWS, WIDTH, WIDE)}
    assert {gemm.gemm for gemm in report.gemms} == ({"fprop", "dgrad", "wgrad"} if training else {"fprop"})


def nested(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([torch.randn(rows, WIDTH) for rows in (5, 9)], layout=layout)


REFUSED: dict[str, tuple[Callable[[], tuple[nn.Module, tuple[Any, ...]]], str]] = {
    "None": (lambda: (Net(), (None,)), "in up .*must be Tensor, not NoneType"),
    "no inputs": (lambda: (Net(read=lambda x: x), ()), "missing 1 required positional argument: 'x'"),
    "missing key": (lambda: (Net(read=lambda batch: batch["y"]), ({"x": data()},)), "KeyError: 'y'"),
    "wrong shape": (
        lambda: (Net(), (torch.randn(ROWS, 63),)),
        "a and b must have same reduction dim, but got",
    ),
    "wrong dtype": (
        lambda: (nn.Embedding(9, 32), (torch.ones(2, 3),)),
        "cannot trace the model.*RuntimeError: Expected tensor for argument #1 'indices'",
    ),
    "module": (lambda: (Net(), (Net(),)), "must be Tensor, not Net"),
    "jagged": (
        lambda: (Net(), (nested(torch.jagged),)),
        "a nested tensor of layout torch.jagged: give a plain",
    ),
    "nested": (lambda: (Net(), (nested(torch.strided),)), "a nested tensor of layout torch.strided: give a"),
    "quantized": (
        lambda: (Net(), (torch.quantize_per_tensor(data(), 0.1, 0, torch.quint8),)),
        "a tensor of dtype torch.quint8: give its dequantized values",
    ),
    "scripted module": (
        lambda: (traced(torch.jit.script), (data(),)),
        "takes a module of Python code, found a scripted one: pass its original",
    ),
    "module without forward": (lambda: (nn.ModuleList([Net()]), (data(),)), "missing the required"),
    "lazy module": (lambda: (nn.LazyLinear(WIDE), (data(),)), "call the model once before explain"),
}
"""By name, a model, its arguments, and what the error says."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # of torch 2.15
@pytest.mark.parametrize("name", REFUSED)
def test_impossible_call_raises_an_error_of_one_line(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    make, message = REFUSED[name]
    model, args = make()
    with pytest.raises(ModelError, match=message) as caught:
        mxcompile.explain(model, *args)
    assert "\n" not in str(caught.value)
    assert "AssertionError" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    assert "Traceback" not in capfd.readouterr().err


def test_product_of_two_dtypes_is_left_to_the_error_of_pytorch() -> None:
    model = Net().bfloat16()
    (reason,) = {gemm.reason for gemm in mxcompile.explain(model, data()).gemms if gemm.gemm == "fprop"}
    assert reason == "operands of two dtypes, float32 and bfloat16: PyTorch raises an error"
    with pytest.raises(RuntimeError, match="same dtype"):
        torch.compile(model, backend=EagerBackend())(data())
    with pytest.raises(BackendCompilerFailed, match="up fprop: operands of two dtypes"):
        torch.compile(model, backend=EagerBackend(strict=True))(data())
