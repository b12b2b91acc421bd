"""`explain`: the report of a model that is neither run nor compiled, and need not fit in memory.

The model is copied with fake tensors in place of its parameters, and every graph that Dynamo captures is
traced through AOTAutograd and all passes, on the way a compile takes, up to code generation. Of equal layers
a few are traced and the records of the others follow from theirs (see `repeats`).

Tracing happens on fake CPU tensors whatever the target: without a GPU build of torch an attention on fake
CUDA or meta tensors falls apart into products and a softmax that no GPU would run.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from mxcompile.capture import capture
from mxcompile.compilation import Compilation
from mxcompile.errors import ModelError, MXCompileError
from mxcompile.lowering.targets import AUTO, TARGETS, Target, of_device
from mxcompile.options import Options
from mxcompile.policy import Policy
from mxcompile.repeats import Repeats, fold
from mxcompile.report import Part, Report
from mxcompile.roofline import estimate
from mxcompile.rules import check_rules
from mxcompile.trace import trace

log = logging.getLogger(__name__)


def explain(
    model: nn.Module,
    *args: Any,
    policy: Policy | str | dict[str, Any] | None = None,
    target: str = "auto",
    training: bool = True,
    strict: bool = True,
    **kwargs: Any,
) -> Report:
    """What ``torch.compile(model, backend="mxfp8")`` would do to every matrix product of `model`, and why.

    model: on any device, the meta device too; it is not run and not changed. args, kwargs: what it is called
    with; their values are not looked at. policy: as the backend's option. target: what to compile for;
    "auto" is the device of the model. training: forward and backward, else forward only. strict: a rule
    that matches no layer is an error.

    Returns a `Report` with roofline estimates for the targets that have them. Raises `ModelError` if the
    model cannot be traced, `PolicyError` for a policy that is not valid or, if `strict`, has unused rules.
    """
    options = Options.parse(None, {"policy": policy, "target": target, "strict": strict})
    if options.target == AUTO:
        options = dataclasses.replace(options, target=of_device(_device(model)).name)
    parts = _Explainer(model, options, training).run(args, kwargs)
    report = Report.of(parts, target=options.target, policy=options.policy.label)
    check_rules(options, report.gemms)
    return estimate(report)


def _device(model: nn.Module) -> torch.device:
    """Where `model` is, if on an accelerator; the meta device counts as the CPU."""
    devices = (parameter.device for parameter in model.parameters())
    return next((d for d in devices if d.type not in ("cpu", "meta")), torch.device("cpu"))


class _Explainer:
    """State of one run: the copy of the model, and the parts of the report."""

    def __init__(self, model: nn.Module, options: Options, training: bool) -> None:
        self._options = dataclasses.replace(options, strict=False)
        self._training = training
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._model, self._repeats = _fake_copy(model, self._mode, options.policy)
        self._model.train(training)
        self._parts: list[Part] = []

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Part]:
        """Trace the model called with `args` and `kwargs`."""
        fake = _Faker(self._mode)
        arguments = tree_map_only(Tensor, fake, (tuple(args), dict(kwargs)))
        compiled = torch.compile(self._model, backend=self._trace)
        with _apart_from_others(), self._mode, nullcontext() if self._training else torch.no_grad():
            try:
                compiled(*arguments[0], **arguments[1])
            except MXCompileError:
                raise
            except Exception as error:  # of the user's model, or of tracing it
                inner = getattr(error, "inner_exception", error)
                if isinstance(inner, MXCompileError):
                    raise inner from None
                raise ModelError(f"cannot trace the model: {type(error).__name__}: {error}") from error
        return self._parts

    def _trace(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """A Dynamo backend: note what is decided, and go on with fake results."""
        found = capture(gm, example_inputs, self._model)
        target = TARGETS.get(self._options.target, Target(name=self._options.target, device="cpu"))
        compilation = Compilation(self._options, found, gm, target, self._repeats.count)
        trace(compilation, gm, example_inputs)
        self._parts.append(self._repeats.expand(compilation.part))
        return gm.forward


@contextmanager
def _apart_from_others() -> Iterator[None]:
    """Keep what this process has compiled out of the trace: limits, sizes seen before."""
    with torch._dynamo.config.patch(
        recompile_limit=1 << 16, accumulated_recompile_limit=1 << 16, automatic_dynamic_shapes=False
    ):
        yield


class _Faker:
    """Tensors to fake CPU tensors of the same shape, strides and dtype; the same one for the same tensor."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode

    def __call__(self, tensor: Tensor) -> Tensor:
        with self._mode:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made.requires_grad_(tensor.requires_grad)


def _fake_copy(model: nn.Module, mode: FakeTensorMode, policy: Policy) -> tuple[nn.Module, Repeats]:
    """A copy of `model` on fake tensors, without the layers that equal others."""
    fake = _Faker(mode)
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if isinstance(value, Tensor) and id(value) not in memo:
                memo[id(value)] = fake(value)
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as error:  # whatever the model holds
        raise ModelError(f"cannot copy the model: {type(error).__name__}: {error}") from error
    return copied, fold(copied, policy)
