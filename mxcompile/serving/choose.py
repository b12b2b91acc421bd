"""Which weights of a model a policy stores in MXFP8, and along which dimension: asked of the passes.

    model ─▶ copy on fake tensors ─▶ Dynamo, AOTAutograd, passes ─▶ what its products cast (passes/weights)

So a weight is stored exactly where ``backend="mxfp8"`` would cast it in forward, in that format. Of equal
layers a few are traced (see `plan.repeats`). Nothing is guessed from names: a model that cannot be called is
an error.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mxcompile.compiler.capture import capture
from mxcompile.compiler.compilation import Compilation
from mxcompile.compiler.options import Options
from mxcompile.compiler.trace import trace
from mxcompile.errors import ModelError
from mxcompile.lowering.targets import Target
from mxcompile.passes.weights import WeightUse, weight_uses
from mxcompile.plan.bare import fake_copy
from mxcompile.plan.fakes import call
from mxcompile.plan.repeats import Repeats, fold
from mxcompile.policy import Policy

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """What is decided for one parameter.

    role: of its layers, the first of several. reason: why it is stored in MXFP8, or why not. block_dim: the
    dimension its blocks run along, negative. elem_dtype: None where it is not stored in MXFP8. rounding: of
    its scales.
    """

    role: str
    reason: str
    block_dim: int = -1
    elem_dtype: torch.dtype | None = None
    rounding: str = ""


def choose(
    model: nn.Module, policy: Policy, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Chosen]:
    """What `policy` decides for every weight of a linear layer or embedding of `model`, by parameter path.

    args, kwargs: what the model is called with; their values are not looked at. Raises `ModelError` where the
    model cannot be traced.
    """
    try:
        uses = _Tracer(model, policy, fold).run(args, kwargs)
    except ModelError as error:
        log.info("tracing every layer, since some do not stand for all: %s", error)
        uses = _Tracer(model, policy, _keep_all).run(args, kwargs)
    return {path: _decided(each) for path, each in uses.items()}


def _keep_all(_: nn.Module, __: Policy) -> Repeats:
    return Repeats()


def _decided(uses: Sequence[WeightUse]) -> Chosen:
    """One decision from all that is done with a weight: it is stored if that is one and the same cast."""
    first = uses[0]
    for use in uses:
        if use.elem_dtype is None:
            return Chosen(role=use.role, reason=use.reason)
    formats = {(use.block_dim, use.elem_dtype, use.rounding) for use in uses}
    if len(formats) > 1:
        return Chosen(role=first.role, reason="its layers cast it in different ways")
    return Chosen(
        role=first.role,
        reason=first.reason,
        block_dim=first.block_dim - first.rank,
        elem_dtype=first.elem_dtype,
        rounding=first.rounding,
    )


class _Compilation(Compilation):
    """A compile that is only traced, and notes the weights of each graph after the passes."""

    uses: tuple[WeightUse, ...] = ()

    def run_passes(self, graph: fx.Graph) -> None:
        super().run_passes(graph)
        self.uses = (*self.uses, *weight_uses(graph, self.found.inputs))


class _Tracer:
    """State of one run: the copy of the model, and the uses of its parameters by path."""

    def __init__(
        self, model: nn.Module, policy: Policy, leave_out: Callable[[nn.Module, Policy], Repeats]
    ) -> None:
        self._options = Options(policy=policy, target="cpu")
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._model = fake_copy(model, self._mode)
        self._repeats = leave_out(self._model, policy)
        self._model.eval()
        self._uses: defaultdict[str, list[WeightUse]] = defaultdict(list)

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, list[WeightUse]]:
        call(self._model, args, dict(kwargs), mode=self._mode, backend=self._trace, training=False)
        return dict(self._uses)

    def _trace(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """A Dynamo backend: note what is decided, and go on with fake results."""
        found = capture(gm, example_inputs, self._model)
        target = Target(name="cpu", device="cpu")
        compilation = _Compilation(self._options, found, gm, target, self._repeats.count)
        trace(compilation, gm, example_inputs)
        for use in compilation.uses:
            path = f"{found.path}.{use.path}".lstrip(".")
            for each in (path, *self._repeats.others(path)):
                self._uses[each].append(use)
        return gm.forward
