"""One model, captured and taken through the passes once, and run as often as asked for.

    Dynamo ─▶ AOTAutograd joint graph ─▶ all passes ─▶ marks ─▶ partitioner ─▶ interpreter

This is the way of `mxcompile.backend` up to code generation. Every run may have other GEMMs in MXFP8; they
need no new graphs. Outputs are compared, gradients are computed and thrown away.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.eval_frame import OptimizedModule
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext
from torch.utils._pytree import tree_leaves

from mxcompile.audit.interpreter import Interpreter, Run
from mxcompile.audit.keep import Kept, fresh, uncompiled
from mxcompile.audit.sites import Sites, mark
from mxcompile.capture import capture
from mxcompile.compilation import Compilation
from mxcompile.decompositions import table
from mxcompile.errors import ModelError, MXCompileError
from mxcompile.lowering.targets import AUTO, resolve
from mxcompile.options import Options
from mxcompile.policy import Policy
from mxcompile.report import Report

LossFunction = Callable[[Any], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a run gave.

    loss: None without one. logits: the main output, detached. gradients: whether there was a backward.
    """

    loss: float | None
    logits: Tensor | None
    gradients: bool


class Session:
    """A model, what it is called with, and its graphs.

    args, kwargs are copied for every run. loss_fn: from the model's output to the loss, if the output has
    none. Raises `PolicyError` for a policy that is not valid.
    """

    def __init__(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        policy: Policy | str | dict[str, Any] | None = None,
        loss_fn: LossFunction | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ModelError(f"an audit takes a torch.nn.Module, found {type(model).__name__}")
        self.model: nn.Module = model._orig_mod if isinstance(model, OptimizedModule) else model
        self.options = Options.parse(None, {"policy": policy})
        self.sites = Sites()
        self._arguments = (tuple(args), dict(kwargs))
        self._loss_fn = loss_fn
        self._compilations: list[Compilation] = []
        self._compiled = torch.compile(self.model, backend=self._compile)
        self._run = Run(quantized=lambda _: False)
        self._kept: Kept | None = None

    def run(self, run: Run, *, backward: bool = False) -> Outcome:
        """Run the model once as `run` says, with backward if there is a loss to start from.

        Raises `ModelError` if the model cannot be traced or fails.
        """
        self._run = run
        with self._untouched():
            args, kwargs = fresh(self._arguments)
            output = self._call(args, kwargs)
            loss = self._loss(output)
            gradients = False
            if backward and loss is not None and loss.requires_grad:
                gradients = True
                torch.autograd.grad(loss, self._leaves(args, kwargs), allow_unused=True)
            logits = main_output(output)
            return Outcome(
                loss=None if loss is None else float(loss.detach()),
                logits=None if logits is None else logits.detach().clone(),
                gradients=gradients,
            )

    def report(self) -> Report:
        """What the passes did, for every graph."""
        parts = [dataclasses.replace(compilation.part, cache="off") for compilation in self._compilations]
        targets = [compilation.target.name for compilation in self._compilations]
        return Report.of(parts, target=targets[0] if targets else AUTO, policy=self.options.policy.label)

    # -- running -----------------------------------------------------------------------------------

    @contextmanager
    def _untouched(self) -> Iterator[None]:
        """The model is as it was, after."""
        self._kept = Kept(self.model)
        try:
            with uncompiled(self.model), _apart_from_others():
                yield
        finally:
            self._kept.restore()
            self._kept = None

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return self._compiled(*args, **kwargs)
        except MXCompileError:
            raise
        except Exception as error:  # of the user's model, or of tracing it
            inner = getattr(error, "inner_exception", error)
            if isinstance(inner, MXCompileError):
                raise inner from None
            raise ModelError(f"cannot run the model: {type(error).__name__}: {error}") from error

    def _loss(self, output: Any) -> Tensor | None:
        loss = self._loss_fn(output) if self._loss_fn is not None else loss_of(output)
        if self._loss_fn is not None and not _is_scalar(loss):
            raise ModelError(f"loss_fn must return a scalar floating-point tensor, found {_described(loss)}")
        return loss

    def _leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """What a training step computes gradients of."""
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        return [tensor for tensor in (*self.model.parameters(), *given) if tensor.requires_grad]

    # -- capturing ---------------------------------------------------------------------------------

    def _compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """A Dynamo backend: passes and marks, and an interpreter in the place of code."""
        found = capture(gm, example_inputs, self.model)
        target = resolve(self.options.target, found.device)
        options = dataclasses.replace(self.options, target=target.name)
        compilation = Compilation(options, found, gm, target)
        self._compilations.append(compilation)
        written: list[int] = []

        def passes(graph: fx.Graph) -> None:
            compilation.run_passes(graph)
            mark(graph, self.sites)

        def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
            passes(joint.graph)
            return min_cut_rematerialization_partition(joint, inputs, **options)

        def backward(graph: fx.GraphModule, _: Any) -> Any:
            interpreter = Interpreter(graph, self.sites, lambda: self._run)
            return make_boxed_func(lambda *args: interpreter.run(*args))

        def forward(graph: fx.GraphModule, _: Any) -> Any:
            written.extend(_written_inputs())
            return backward(graph, _)

        def inference(graph: fx.GraphModule, inputs: Any) -> Any:
            passes(graph.graph)
            return forward(graph, inputs)

        compiled = aot_autograd(
            fw_compiler=forward,
            bw_compiler=backward,
            inference_compiler=inference,
            partition_fn=partition,
            decompositions=table(),
        )(gm, example_inputs)

        def call(*args: Any) -> Any:
            assert self._kept is not None
            for index in written:
                self._kept.add(args[index])
            return compiled(*args)

        return call


def _written_inputs() -> list[int]:
    """Positions of the inputs that the graph being compiled changes."""
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is None:
        return []
    return [index for index, info in enumerate(metadata.input_info) if info.mutates_data]


@contextmanager
def _apart_from_others() -> Iterator[None]:
    """Keep what this process has compiled out of the capture: limits, and sizes seen before."""
    with torch._dynamo.config.patch(
        recompile_limit=1 << 16, accumulated_recompile_limit=1 << 16, automatic_dynamic_shapes=False
    ):
        yield


# -- outputs ---------------------------------------------------------------------------------------


def loss_of(output: Any) -> Tensor | None:
    """The loss in what a model returns: the output itself, its ``loss``, or its first item, if scalar."""
    return next((value for value in _candidates(output, "loss") if _is_scalar(value)), None)


def main_output(output: Any) -> Tensor | None:
    """The model's output, or its ``logits``, or the first floating-point tensor in it; no scalar."""
    for value in _candidates(output, "logits"):
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 0:
            return value
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    return next((leaf for leaf in leaves if leaf.is_floating_point() and leaf.ndim > 0), None)


def _candidates(output: Any, name: str) -> list[Any]:
    found = [output]
    if isinstance(output, Mapping):
        found.append(output.get(name))
    elif isinstance(output, tuple | list):
        found += output[:1]
    with contextlib.suppress(AttributeError):
        found.append(getattr(output, name))
    return found


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() == 1 and value.ndim == 0


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return type(value).__name__
