"""What the graphs of a model do with its parameters, without running or lowering it.

    model ─▶ copy on fake tensors ─▶ Dynamo, AOTAutograd, passes ─▶ what is read of each graph

Of equal layers a few are traced (see `plan.repeats`). Nothing is guessed from names: a model that cannot be
called is an error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mxcompile.compiler.capture import capture
from mxcompile.compiler.compilation import Compilation
from mxcompile.compiler.options import Options
from mxcompile.compiler.trace import trace
from mxcompile.lowering.targets import Target
from mxcompile.models.fake_copy import fake_copy
from mxcompile.models.fakes import call
from mxcompile.models.names import GraphInput, joined
from mxcompile.plan.repeats import LeaveOut, some_or_all
from mxcompile.policy import Policy
from mxcompile.report import GemmRecord


class OfParameter(Protocol):
    """Something about the parameter at `path`, relative to the graph's frame."""

    @property
    def path(self) -> str: ...  # noqa: D102


Use = TypeVar("Use", bound=OfParameter)
Read = Callable[[fx.Graph, Sequence[GraphInput]], Iterable[Use]]
"""What there is to say of the parameters of a graph that the passes are done with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Uses(Generic[Use]):
    """What was read of a model. by_path: of its parameters. gemms: the records of its products."""

    by_path: dict[str, list[Use]]
    gemms: tuple[GemmRecord, ...]


def uses(
    model: nn.Module,
    policy: Policy,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    read: Read[Use],
    *,
    training: bool,
) -> Uses[Use]:
    """What `read` says of the parameters of `model` under `policy`, and its products.

    args, kwargs: what the model is called with; their values are not looked at. training: whether the graphs
    have a backward. Raises `ModelError` where the model cannot be traced.
    """
    return some_or_all(
        model, lambda leave_out: _Tracer(model, policy, leave_out, read, training).run(args, kwargs)
    )


class _Compilation(Compilation, Generic[Use]):
    """A compile that is only traced; what is read of each graph after the passes."""

    read: Read[Use]
    found_uses: tuple[Use, ...] = ()

    def run_passes(self, graph: fx.Graph) -> None:
        super().run_passes(graph)
        self.found_uses = (*self.found_uses, *self.read(graph, self.found.inputs))


class _Tracer(Generic[Use]):
    """State of one run: the copy of the model, and the uses of its parameters by path."""

    def __init__(
        self,
        model: nn.Module,
        policy: Policy,
        leave_out: LeaveOut,
        read: Read[Use],
        training: bool,
    ) -> None:
        self._options = Options(policy=policy, target="cpu")
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._model = fake_copy(model, self._mode)
        self._repeats = leave_out(self._model, policy)
        self._model.train(training)
        self._training = training
        self._read = read
        self._uses: defaultdict[str, list[Use]] = defaultdict(list)
        self._gemms: list[GemmRecord] = []

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Uses[Use]:
        call(self._model, args, dict(kwargs), mode=self._mode, backend=self._trace, training=self._training)
        return Uses(by_path=dict(self._uses), gemms=tuple(self._gemms))

    def _trace(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """A Dynamo backend: note what is decided, and go on with fake results."""
        found = replace(capture(gm, example_inputs, self._model), blocks=self._repeats.blocks)
        target = Target(name="cpu", device="cpu")
        compilation: _Compilation[Use] = _Compilation(self._options, found, gm, target, self._repeats.count)
        compilation.read = self._read
        trace(compilation, gm, example_inputs)
        self._gemms += self._repeats.expanded(compilation.part.gemms)
        for use in compilation.found_uses:
            path = joined(found.path, use.path)
            for each in (path, *self._repeats.others(path)):
                self._uses[each].append(use)
        return gm.forward
