"""`Explainer`: the parts of the report of a model that is neither run nor compiled.

Every graph that Dynamo captures is traced through AOTAutograd and all passes like in a compile, up to code
generation. Only a few of equal layers are traced, and the records of the others follow from them (see
`repeats`). Tracing uses fake CPU tensors for every target (see `fakes`). The records of code that is not
compiled, and of code that runs again for another layer, come from no captured graph.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._guards import TracingContext

from mxcompile.compiler.capture.capture import Capture
from mxcompile.compiler.rehearsal import Rehearsal
from mxcompile.compiler.session.options import Options
from mxcompile.compiler.session.session import no_plan, planned
from mxcompile.formats import UNQUANTIZED
from mxcompile.graph.opsets import packet
from mxcompile.graph.tags import gradient_tags, set_tag, tags_of
from mxcompile.lowering.targets import AUTO, of_device
from mxcompile.models.blocks import Blocks
from mxcompile.models.fake_copy import checkpointed_copy
from mxcompile.models.names import moved, moves, user_path
from mxcompile.models.value_tracking_mode import ValueTrackingMode
from mxcompile.passes.apply_plan import ApplyPlan
from mxcompile.passes.classify import Classify
from mxcompile.passes.find import Find
from mxcompile.passes.record import record_of, records
from mxcompile.plan.plan import Layers
from mxcompile.plan.repeats import LeaveOut
from mxcompile.policy import Choice, Code, Reason
from mxcompile.report import GemmRecord, Part


def options_for(model: object, **settings: Any) -> Options:
    """Returns the options `settings`. The target "auto" becomes the accelerator of `model`, else the CPU."""
    options = Options.parse(None, settings)
    if options.target != AUTO:
        return options
    devices = (parameter.device for parameter in model.parameters()) if isinstance(model, nn.Module) else ()
    device = next((d for d in devices if d.type not in ("cpu", "meta")), torch.device("cpu"))
    return dataclasses.replace(options, target=of_device(device).name)


class Explainer(Rehearsal[ValueTrackingMode]):
    """Rehearses the compile of a model and collects the parts of its report."""

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        training: bool,
        leave_out: LeaveOut,
        copied: Callable[[nn.Module, ValueTrackingMode], nn.Module] = checkpointed_copy,
    ) -> None:
        lenient = dataclasses.replace(options, strict=False)
        super().__init__(
            model, lenient, ValueTrackingMode(), training=training, leave_out=leave_out, copied=copied
        )
        self.mode.names(self.model)
        self._paths = {id(p): user_path(path) for path, p in self.model.named_parameters()}
        self._parts: list[Part] = []

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Part]:
        """Traces the model, called with `args` and `kwargs`. Returns the parts."""
        self.call(args, kwargs)
        notes = tuple(f"assumed: {note}" for note in self.mode.notes)
        gemms: tuple[GemmRecord, ...] = ()
        outside = self.mode.outside.graph  # products that ran outside of compiled graphs
        if outside.nodes:
            plan = planned(self.model, args, kwargs).plan
            by_name = {} if plan is None else plan.by_name  # with roles of the whole model
            gemms = _eager_records(outside, by_name, self.repeats.blocks, training=self.training)
        if notes or gemms:
            self._parts.append(self.repeats.expand(Part(gemms=gemms, warnings=notes)))
        return self._parts

    def graph(
        self, capture: Capture, gm: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """Adds the part of one graph to the report. Returns a callable that runs it on fake tensors."""
        context = TracingContext.try_get()
        fakes = None if context is None else context.fake_mode
        with self.mode.plain(None if fakes is None else fakes.shape_env):
            compilation = self.traced(capture, gm, example_inputs)
        gemms = compilation.part.gemms
        if self.target.device != "cpu":  # fake CPU tensors select the CPU's attention
            gemms = tuple(dataclasses.replace(g, kernel=g.kernel.replace("_for_cpu", "")) for g in gemms)
        missing = capture.planned.missing
        part = dataclasses.replace(
            compilation.part, gemms=gemms, warnings=(no_plan(self.model, missing),) if missing else ()
        )
        self._parts.append(self.repeats.expand(part))
        first = self._owners(example_inputs, capture.module)
        calls = itertools.count()

        def run(*inputs: Any) -> Any:
            if next(calls) > 0:  # the same code runs for another layer, or again
                heads = moves(first, self._owners(inputs, self.mode.module()))
                repeated = tuple(dataclasses.replace(gemm, name=moved(gemm.name, heads)) for gemm in gemms)
                self._parts.append(self.repeats.expand(Part(gemms=repeated)))
            with self.mode.outside.paused():
                return gm.forward(*inputs)

        return run

    def _owners(self, inputs: Sequence[Any], module: str) -> list[str]:
        """Returns the path of the running module, then of each of `inputs`, "" if it is not a parameter."""
        return [module, *(self._paths.get(id(value), "") for value in inputs)]


def _eager_records(
    graph: fx.Graph, planned: Layers, blocks: Blocks, *, training: bool
) -> tuple[GemmRecord, ...]:
    """Returns records of the products in `graph`, which ran outside of compiled graphs.

    planned: GEMMs of the whole model by name, with their roles and the gradients that the call needs. blocks:
    blocks of the model. training: whether to include the products of their gradients.
    """
    Find(blocks=blocks).apply(graph)
    Classify(is_cut=True).apply(graph)
    ApplyPlan(planned=planned).apply(graph)
    kept = Choice(precision=UNQUANTIZED.name, reason=Reason(Code.NOT_COMPILED))
    for node in graph.nodes:
        kernel = str(packet(node))
        set_tag(node, *(dataclasses.replace(tag, choice=kept, kernel=kernel) for tag in tags_of(node)))
    forward = records(graph)
    if not training:
        return forward
    differentiated = any(any(of_plan.gradients) for tags in planned.values() for of_plan in tags)
    gemms: list[GemmRecord] = []
    for tag, fprop in zip((tag for node in graph.nodes for tag in tags_of(node)), forward, strict=True):
        needs = [of_plan.gradients for of_plan in planned.get(tag.name, ()) if differentiated]
        wanted = map(any, zip(*needs, strict=True)) if needs else itertools.repeat(True)
        gradients = itertools.compress(gradient_tags(tag), wanted)
        gemms += [fprop, *(record_of(gradient, fprop.dtype) for gradient in gradients)]
    return tuple(gemms)
