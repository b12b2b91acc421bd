"""Shared by the programs: small models, a policy for every layer, and the reading of records and messages."""

from __future__ import annotations

import importlib
import logging
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional as F

import mxcompile
from mxcompile.errors import UnsupportedError

EVERYTHING = {"version": 1, "rules": [{"match": {"name": "*"}, "use": "mxfp8"}]}
REFUSED = (UnsupportedError, BackendCompilerFailed)
"""Errors of strict mode: Dynamo wraps those raised while it compiles."""
torch.manual_seed(0)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Cut(nn.Module):
    """Two blocks with a graph break between them; `between` is applied before it."""

    def __init__(self, between: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.first, self.last = Mlp(), Mlp()
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = self.between(self.first(x))
        torch._dynamo.graph_break()
        return self.last(x)


class Dropped(nn.Module):
    """Runs those of its layers that a call names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(4))

    def forward(self, x: Tensor, kept: tuple[bool, ...]) -> Tensor:
        for layer, runs in zip(self.layers, kept, strict=False):
            x = layer(x) if runs else x
        return x


def compiled(model: Any, policy: Any = EVERYTHING, *, strict: bool = True) -> Any:
    """`model` compiled by a process that has compiled nothing and has no reports."""
    torch._dynamo.reset()
    mxcompile.clear_reports()
    return torch.compile(model, backend="mxfp8", options={"policy": policy, "strict": strict})


def gemms() -> list[Any]:
    return [gemm for report in mxcompile.reports() for gemm in report.gemms]


def linears(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def messages() -> list[str]:
    """The list that mxcompile's messages go to from now on."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mxcompile").addHandler(handler)
    return texts


def check_edits(returned: str, *calls: tuple[Any, ...]) -> None:
    """Lines of a model's file move: outputs, of `returned`, are MXFP8 and the same bits with a warm cache."""
    outputs = []
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        sys.path.insert(0, folder)
        for lines in (0, 5):
            text = f"""
from shared import F, Mlp
class Model(Mlp):
    def forward(self, x, *args):
        return {returned}
"""
            Path(folder, "edited.py").write_text("\n" * lines + text, encoding="utf-8")
            sys.modules.pop("edited", None)
            torch.manual_seed(0)
            model = importlib.import_module("edited").Model()
            call = compiled(model)
            outputs.append([call(*args) for args in calls])
            assert {gemm.precision for gemm in gemms()} == {"mxfp8"}, gemms()
        eager = [model(*args) for args in calls]
    for cold, warm, exact in zip(*outputs, eager, strict=True):
        assert torch.equal(cold, warm), "an edit changed the output"
        assert not torch.allclose(warm, exact, atol=1e-5), "the output is FP32's"
