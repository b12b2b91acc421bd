"""Finds the uses of a model's parameters in its graphs, without running or lowering the model.

    model ─▶ rehearsal ─▶ each graph after the passes ─▶ uses of parameters

Uses come from the trace alone, never from names: a model that cannot be traced raises an error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mxcompile.compiler.capture.capture import Capture
from mxcompile.compiler.hooks.compilation import Compilation
from mxcompile.compiler.rehearsal import Rehearsal, some_or_all
from mxcompile.compiler.session.options import Options
from mxcompile.models.example_inputs import example_inputs
from mxcompile.models.names import GraphInput
from mxcompile.passes.weights import TileUse, WeightUse
from mxcompile.plan.repeats import LeaveOut
from mxcompile.policy import Policy
from mxcompile.report import GemmRecord

Use = TypeVar("Use", bound=WeightUse | TileUse)
Read = Callable[[fx.Graph, Sequence[GraphInput]], Iterable[Use]]
"""Yields the uses of parameters in a graph after the passes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Uses(Generic[Use]):
    """The uses of each parameter of a model, and the records of its GEMMs."""

    by_path: dict[str, list[Use]]
    gemms: tuple[GemmRecord, ...]


def uses(
    model: nn.Module,
    policy: Policy,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    read: Read[Use],
    *,
    training: bool,
) -> Uses[Use]:
    """Returns the uses that `read` finds for the parameters of `model` under `policy`, and the GEMM records.

    args, kwargs: arguments of a call, whose values have no influence; a Hugging Face or timm model needs
    none. training: whether the graphs have a backward. Raises `ModelError` if the model cannot be traced.
    """
    if not args and not kwargs:
        kwargs = example_inputs(model)
    return some_or_all(
        model, lambda leave_out: _UseReader(model, policy, leave_out, read, training).run(args, kwargs or {})
    )


class _UseReader(Rehearsal[FakeTensorMode], Generic[Use]):
    """A rehearsal that reads every graph after the passes."""

    def __init__(
        self, model: nn.Module, policy: Policy, leave_out: LeaveOut, read: Read[Use], training: bool
    ) -> None:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        options = Options(policy=policy, target="cpu")
        super().__init__(model, options, mode, training=training, leave_out=leave_out)
        self._read = read
        self._uses: defaultdict[str, list[Use]] = defaultdict(list)
        self._gemms: list[GemmRecord] = []

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Uses[Use]:
        self.call(args, kwargs)
        return Uses(by_path=dict(self._uses), gemms=tuple(self._gemms))

    def after(self, capture: Capture, graph: fx.Graph) -> None:
        for use in self._read(graph, capture.inputs):
            for path in (use.path, *self.repeats.others(use.path)):
                self._uses[path].append(use)

    def traced(self, capture: Capture, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Compilation:
        compilation = super().traced(capture, gm, example_inputs)
        self._gemms += self.repeats.expanded(compilation.part.gemms)
        return compilation
