"""A rehearsal: a model traced on fake tensors, as a compile for a target would do it, without running it.

    model ─▶ copy on fake tensors ─▶ Dynamo ─▶ AOTAutograd ─▶ passes ─▶ lowering │ code generation

`explain`, `codegen` and the choice of weights to store are rehearsals that differ in what they do with each
graph that Dynamo captures. Of equal layers a few may be traced (see `plan.repeats`).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from torch import fx, nn
from torch._dynamo.eval_frame import remove_from_cache
from torch._subclasses.fake_tensor import FakeTensorMode

from mxcompile.compiler.capture.capture import Capture, captured
from mxcompile.compiler.hooks.compilation import Compilation
from mxcompile.compiler.hooks.trace import trace
from mxcompile.compiler.options import Options
from mxcompile.errors import ModelError
from mxcompile.lowering.targets import TARGETS, Target
from mxcompile.models.fake_copy import fake_copy
from mxcompile.models.fakes import call
from mxcompile.models.isolated import NoChildError, isolated
from mxcompile.plan.repeats import LeaveOut, fold, keep_all

log = logging.getLogger(__name__)

Result = TypeVar("Result")
Mode = TypeVar("Mode", bound=FakeTensorMode)


class Rehearsal(Generic[Mode]):
    """One rehearsal. Subclasses override `graph`, which is called for every graph.

    model: a copy of the user's model, by `copied`. mode: of its fake tensors. repeats: which layers stand for
    which.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        mode: Mode,
        *,
        training: bool,
        leave_out: LeaveOut = keep_all,
        copied: Callable[[nn.Module, Mode], nn.Module] = fake_copy,
    ) -> None:
        self.mode = mode
        self.model = copied(model, mode)
        self.repeats = leave_out(self.model, options.policy)
        self.model.train(training)
        self.options = options
        self.target = TARGETS.get(options.target, Target(name=options.target, device="cpu"))
        self.training = training

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Trace the model called with `args` and `kwargs`. Raises `ModelError` where that cannot be done.

        Returns what the copy returns, on fakes.
        """
        return call(
            self.model, args, dict(kwargs), mode=self.mode, backend=self._backend, training=self.training
        )

    def _backend(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        current = dataclasses.replace(captured(gm, example_inputs, self.model), blocks=self.repeats.blocks)
        return self.graph(current, gm, example_inputs)

    def graph(
        self, capture: Capture, gm: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """Compile one graph as far as is wanted. Returns what Dynamo calls for it: the graph on fakes."""
        self.traced(capture, gm, example_inputs)
        return gm.forward

    def traced(self, capture: Capture, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Compilation:
        """The compile of one graph up to code generation."""
        compilation = self.compilation(capture, gm)
        trace(compilation, gm, example_inputs)
        return compilation

    def compilation(self, capture: Capture, gm: fx.GraphModule, *, tapped: bool = False) -> Compilation:
        """The state of the compile of one graph."""
        return Compilation(
            self.options,
            capture,
            gm,
            self.target,
            self.repeats.count,
            tapped=tapped,
            after=functools.partial(self.after, capture),
            parted=functools.partial(self.parted, capture),
        )

    def after(self, capture: Capture, graph: fx.Graph) -> None:
        """Called with every joint or inference graph when the passes are done with it."""

    def parted(self, capture: Capture, forward: fx.Graph, backward: fx.Graph) -> None:
        """Called with the two graphs that a joint graph becomes."""


def apart(rehearse: Callable[[], Result]) -> Result:
    """Returns what `rehearse` returns, a rehearsal, in a process of its own.

    A rehearsal runs the model's Python around graph breaks, and Dynamo applies what graphs change outside of
    them. If there can be no such process, `rehearse` runs in this one, with a warning.
    """
    try:
        return isolated(rehearse, tools=True)
    except NoChildError as error:
        log.warning("%s: this process keeps what the model's code changes beside tensors", error)
        return rehearse()


def some_or_all(model: nn.Module, rehearse: Callable[[LeaveOut], Result]) -> Result:
    """Returns `rehearse` of `model` with some layers standing for others, or with all if that fails."""

    def in_turn() -> Result:  # in one process: Dynamo leaves to Python what has failed in the first
        try:
            return rehearse(fold)
        except ModelError as error:
            log.info("tracing every layer, since some do not stand for all: %s", error)
        for kind in {type(module) for module in model.modules()}:
            remove_from_cache(kind.forward)  # but not the model's own code
        return rehearse(keep_all)

    return apart(in_turn)
