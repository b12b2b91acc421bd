"""The runs of a model under a policy and variants of it.

    Session   one call under one policy: captured once, run repeatedly, each time with other GEMMs quantized
    Study     the runs that examine a policy, in sessions of the same call, with a progress bar

A run changes neither the model nor its inputs nor the program's random numbers (see `state_guard`), so that
outputs and gradients of runs can be compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from mxcompile.analysis.study.graphs import Graphs
from mxcompile.analysis.study.interpreter import Key, Run
from mxcompile.analysis.study.sites import Sites
from mxcompile.analysis.study.state_guard import SavedState, drawing, fresh, uncompiled
from mxcompile.compiler.session.options import Options
from mxcompile.errors import ModelError, MXCompileError
from mxcompile.formats import UNQUANTIZED, is_quantized
from mxcompile.models.fakes import apart_from_others, failure, unlogged
from mxcompile.models.names import user_path
from mxcompile.policy import Layer, Policy
from mxcompile.report import GemmRecord, Report
from mxcompile.report.data.record import flop_share
from mxcompile.rules import layers_of

LossFunction = Callable[[Any], Tensor]
MAKE_A_LOSS = "let the model return a scalar or an output with .loss; in Python, loss_fn can make one"
"""Advice for a model without a loss."""
NEEDS_VALUES = (
    "the model or its inputs are on the meta device, and this needs values: give them values, or use explain,"
    " which needs none"
)
"""Advice for a model without values."""
Keys = frozenset[Key]
"""Some GEMMs of a model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The results of a run.

    loss: value of the loss, None without a loss. logits: main output, detached. differentiable: whether the
    main output requires gradients. gradients: gradients of the parameters by name; None without a backward.
    drew: whether the run drew random numbers, for dropout or stochastic rounding.
    """

    loss: float | None
    logits: Tensor | None
    differentiable: bool = False
    gradients: dict[str, Tensor] | None
    drew: bool = False


class Session:
    """A model, the arguments of its call, and its graphs.

    args, kwargs: arguments, copied for every run. loss_fn: function from the output to the loss, if the
    output has none. Raises `PolicyError` for an invalid policy.
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
        self.model: nn.Module = model._orig_mod if isinstance(model, OptimizedModule) else model
        self.options = Options.parse(None, {"policy": policy})
        self._arguments = (tuple(args), dict(kwargs))
        self._loss_fn = loss_fn
        self._graphs = Graphs(self.model, self.options)
        self._compiled = torch.compile(self.model, backend=self._graphs)

    def run(self, run: Run, *, backward: bool = False) -> Outcome:
        """Runs the model once as set by `run`, with backward if there is a loss.

        If `run.reach` is set, backward starts from noise at the main output instead. Raises `ModelError` if
        the model cannot be traced or fails.
        """
        kept = SavedState(self.model)
        try:
            with uncompiled(self.model), apart_from_others(), self._graphs.during(run, kept):
                args, kwargs = fresh(self._arguments)
                output = self._call(args, kwargs)
                if on_meta((output, main_output(output), loss_of(output))):
                    raise ModelError(f"cannot run the model: {NEEDS_VALUES}")
                loss_fn = loss_of if self._loss_fn is None else self._loss_fn
                loss, logits = loss_fn(output), main_output(output)
                if self._loss_fn is not None and not _is_scalar(loss):
                    kind = type(loss).__name__
                    if isinstance(loss, Tensor):
                        kind = f"a tensor of shape {tuple(loss.shape)} and {loss.dtype}"
                    raise ModelError(f"loss_fn must return a scalar floating-point tensor, found {kind}")
                start = loss if run.reach is None else noisy(logits)
                gradients = None
                if backward and start is not None and start.requires_grad:
                    gradients = _gradients(self.model, start, (args, kwargs))
                return Outcome(
                    loss=None if loss is None else float(loss.detach()),
                    logits=None if logits is None else logits.detach().clone(),
                    differentiable=logits is not None and logits.requires_grad,
                    gradients=gradients,
                    drew=kept.generators.moved(),
                )
        finally:
            kept.restore()

    def under(self, policy: Policy) -> Session:
        """Returns a session of the same call under `policy`, not traced yet."""
        args, kwargs = self._arguments
        return Session(self.model, args, kwargs, policy=policy, loss_fn=self._loss_fn)

    @property
    def sites(self) -> Sites:
        """The observable GEMMs and casts of the graphs captured so far; none before the first run."""
        return self._graphs.sites

    def report(self) -> Report:
        """Returns the report of the passes over every graph of the last run."""
        graphs = self._graphs
        return Report.from_parts(graphs.parts, target=graphs.target, policy=self.options.policy.title)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            with unlogged():
                return self._compiled(*args, **kwargs)
        except MXCompileError:
            raise
        except Exception as error:  # any error of the user's model or of tracing it
            inner = getattr(error, "inner_exception", error)
            if isinstance(inner, MXCompileError):
                raise inner from None
            message = failure("run", error, self.model)
            if on_meta((*self.model.parameters(), *self.model.buffers(), self._arguments)):
                message = f"{message}; {NEEDS_VALUES}"
            raise ModelError(message) from error


class Study:
    """The runs of one call of a model.

    session: session of the policy that is studied; variants have sessions of their own. bar: progress bar.
    title: first word of its descriptions. runs: number of runs so far.
    """

    def __init__(self, session: Session, bar: tqdm[Any], title: str) -> None:
        self.session, self.bar, self.title = session, bar, title
        self.runs = 0

    @cached_property
    def gemms(self) -> tuple[GemmRecord, ...]:
        """Records of all GEMMs under the policy, once it has run."""
        return self.session.report().gemms

    @cached_property
    def layers(self) -> dict[str, Layer]:
        """Layers of the GEMMs, by name."""
        return {layer.name: layer for layer in layers_of(self.gemms)}

    @cached_property
    def quantized(self) -> Keys:
        """GEMMs that the policy quantizes."""
        return frozenset((gemm.name, gemm.gemm) for gemm in self.gemms if is_quantized(gemm.precision))

    def run(
        self,
        session: Session,
        quantized: Callable[[Key], bool] = lambda _: True,
        description: str = "",
        *,
        observe: bool = False,
        backward: bool = False,
        seed: int | None = None,
    ) -> tuple[Run, Outcome]:
        """Runs the model once in `session`. Raises `ModelError` if it cannot be traced or fails.

        quantized, observe: see `Run`. description: text in the progress bar; "" keeps the last.
        backward: whether to run backward. seed: seed of the random numbers; None keeps their state.
        """
        if description:
            self.bar.set_description(f"{self.title}: {description}")
        run = Run(quantized=quantized, observe=observe)
        with drawing(seed):
            outcome = session.run(run, backward=backward)
        self.runs += 1
        self.bar.update()
        return run, outcome

    def flop_share(self, removed: Keys = frozenset()) -> float:
        """Returns the quantized share of the FLOPs of all GEMMs with `removed` unquantized."""
        unquantized = UNQUANTIZED.name
        return flop_share(
            dataclasses.replace(gemm, precision=unquantized) if (gemm.name, gemm.gemm) in removed else gemm
            for gemm in self.gemms
        )


def on_meta(values: Any) -> bool:
    """Whether any tensor in `values` is on the meta device."""
    return any(leaf.is_meta for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def _gradients(model: nn.Module, loss: Tensor, inputs: Any) -> dict[str, Tensor]:
    """Returns the gradients of parameters, as a training step computes them."""
    named = {user_path(name): p for name, p in model.named_parameters() if p.requires_grad}
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    gradients = torch.autograd.grad(loss, [*named.values(), *leaves], allow_unused=True)
    return {name: grad for name, grad in zip(named, gradients, strict=False) if grad is not None}


def noisy(output: Tensor | None) -> Tensor | None:
    """Returns the sum of `output` times independent standard normal numbers, the same in every call."""
    if output is None:
        return None
    noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
    return (output * noise.to(output)).sum()


def loss_of(output: Any) -> Tensor | None:
    """Returns the scalar loss in a model's output: the output itself, its ``loss``, or its first item."""
    return next((value for value in _candidates(output, "loss") if _is_scalar(value)), None)


def main_output(output: Any) -> Tensor | None:
    """Returns the output, its ``logits``, or the first floating-point tensor in it; never a scalar."""
    values = (*_candidates(output, "logits"), *tree_leaves(output))
    tensors = (value for value in values if isinstance(value, Tensor))
    return next((tensor for tensor in tensors if tensor.is_floating_point() and tensor.ndim > 0), None)


def _candidates(output: Any, name: str) -> list[Any]:
    candidates = [output]
    if isinstance(output, Mapping):
        candidates.append(output.get(name))
    elif isinstance(output, tuple | list):
        candidates += output[:1]
    with contextlib.suppress(AttributeError):
        candidates.append(getattr(output, name))
    return candidates


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 0
