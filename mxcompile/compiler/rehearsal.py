"""Rehearsals: traces of a model on fake tensors that follow a real compile but run no code.

    model ─▶ copy on fake tensors ─▶ Dynamo ─▶ AOTAutograd ─▶ passes ─▶ lowering │ code generation

`explain`, `codegen` and the choice of weights to store are rehearsals, which differ in their use of each
graph. One of several equal layers may stand for the others (see `plan.repeats`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import fx, nn
from torch._dynamo.eval_frame import remove_from_cache
from torch._functorch import config as functorch_config
from torch._inductor.compile_fx import compile_fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mxcompile.compiler.capture.capture import Capture, captured
from mxcompile.compiler.capture.prepare import copied as copied_graph
from mxcompile.compiler.hooks.compilation import Compilation
from mxcompile.compiler.session.decompositions import table
from mxcompile.compiler.session.options import Options
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
    """One rehearsal. Subclasses override `graph`, `after` or `parted`.

    model: copy of the user's model. mode: mode of its fake tensors. repeats: the folded layers.
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
        with contextlib.suppress(NotImplementedError):  # an exported program has one mode
            self.model.train(training)
        self.options = options
        self.target = TARGETS.get(options.target, Target(name=options.target, device="cpu"))
        self.training = training

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Traces the model called with `args` and `kwargs`. Returns its fake result. Raises `ModelError`."""
        fakes: dict[str, Any] = {"mode": self.mode, "device": self.target.device}
        return call(self.model, args, dict(kwargs), backend=self._backend, training=self.training, **fakes)

    def _backend(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        current = dataclasses.replace(captured(gm, example_inputs, self.model), blocks=self.repeats.blocks)
        return self.graph(current, gm, example_inputs)

    def graph(
        self, capture: Capture, gm: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """Compiles one graph as far as needed. Returns the function that Dynamo then runs on fakes."""
        self.traced(capture, gm, example_inputs)
        return gm.forward

    def traced(self, capture: Capture, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Compilation:
        """Compiles one graph up to code generation."""
        compilation = self.compilation(capture, gm)
        trace(compilation, gm, example_inputs)
        return compilation

    def compilation(self, capture: Capture, gm: fx.GraphModule, *, tapped: bool = False) -> Compilation:
        """Returns a new compilation of one graph."""
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
        """Observes every joint or inference graph after the passes."""

    def parted(self, capture: Capture, forward: fx.Graph, backward: fx.Graph) -> None:
        """Observes the forward and backward of a joint graph."""


def trace(
    compilation: Compilation,
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    inner_compile: Callable[..., Any] | None = None,
    patches: Mapping[str, Any] | None = None,
) -> None:
    """Runs the hooks of `compilation` on a copy of `gm`, through compile_fx without caches.

    Inductor's own passes run too, so that the result equals a compile. inner_compile: replaces Inductor's
    code generation. Default: only the last hook. patches: overrides of Inductor's configuration.
    """

    def lowered(graph: fx.GraphModule, _: Any, **__: Any) -> Any:
        compilation.lower(graph.graph)
        return Unused()

    with (
        functorch_config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True),
        torch._guards.tracing(None),  # separate from an enclosing compile
    ):
        compile_fx(
            copied_graph(gm),
            list(example_inputs),
            inner_compile=inner_compile or lowered,
            config_patches={**compilation.config_patches(), "force_disable_caches": True, **(patches or {})},
            decompositions=table(),
        )


class Unused:
    """Placeholder for compiled code that is never called."""

    _boxed_call = True

    def __call__(self, *_: Any) -> Any:
        """Raises `AssertionError`."""
        raise AssertionError("code that was only traced or generated is called")


def apart(rehearse: Callable[[], Result]) -> Result:
    """Returns the result of `rehearse`, called in a child process.

    A rehearsal runs the model's Python code between graph breaks, and Dynamo applies side effects of graphs.
    If no child can start, `rehearse` runs in this process, with a warning. Within ``torch.inference_mode()``
    it runs as under ``torch.no_grad()``, because inference tensors take no gradients.
    """
    gradients = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(gradients):
        try:
            return isolated(rehearse, tools=True)
        except NoChildError as error:
            log.warning(
                "%s: the model runs in this process instead, where side effects of its code remain", error
            )
            return rehearse()


def some_or_all(model: nn.Module, rehearse: Callable[[LeaveOut], Result]) -> Result:
    """Returns the result of `rehearse` with equal layers folded; if this fails, with all layers."""

    def in_turn() -> Result:  # both attempts in one child process
        try:
            return rehearse(fold)
        except ModelError as error:
            log.info("tracing every layer, since tracing one of each group of equal layers failed: %s", error)
        for kind in {type(module) for module in model.modules()}:
            remove_from_cache(kind.forward)  # else Dynamo skips the frames that failed above
        return rehearse(keep_all)

    return apart(in_turn)
