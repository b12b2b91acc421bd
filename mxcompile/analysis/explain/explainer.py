"""`explain`: the report of a model that is neither run nor compiled, and need not fit in memory.

The model is copied with fake tensors in place of its parameters. Every graph that Dynamo captures is traced
through AOTAutograd and all passes like in a compile, up to code generation. Only a few of equal layers are
traced, and the records of the others follow from them (see `repeats`). Tracing uses fake CPU tensors for
every target (see `fakes`). The records of code that is not compiled, and of code that runs again for another
layer, come from no captured graph.

The peak memory of a step follows from the parameters and the report:

    training     parameters + buffers + gradients + tensors saved for backward
    inference    parameters + buffers + input and output of the largest product

Gradients have the dtype of their parameters. The optimizer, the allocator's cache and workspaces are not
included.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._guards import TracingContext

from mxcompile.analysis.explain.sweep import advised
from mxcompile.compiler.capture.capture import Capture
from mxcompile.compiler.rehearsal import Rehearsal, some_or_all
from mxcompile.compiler.session.options import Options
from mxcompile.compiler.session.session import no_plan, planned
from mxcompile.errors import OptionError
from mxcompile.formats import UNQUANTIZED
from mxcompile.graph.opsets import packet
from mxcompile.graph.tags import gradient_tags, set_tag, tags_of
from mxcompile.lowering.targets import AUTO, of_device
from mxcompile.models.arguments import ModelInput, keywords
from mxcompile.models.blocks import Blocks
from mxcompile.models.fake_copy import checkpointed_copy
from mxcompile.models.names import moved, moves, user_path
from mxcompile.models.value_tracking_mode import ValueTrackingMode
from mxcompile.offline.record_work import estimate
from mxcompile.passes.apply_plan import ApplyPlan
from mxcompile.passes.classify import Classify
from mxcompile.passes.find import Find
from mxcompile.passes.record import record_of, records
from mxcompile.plan.plan import Layers
from mxcompile.plan.repeats import LeaveOut
from mxcompile.policy import Choice, Code, Policy, Reason
from mxcompile.report import GemmRecord, Part, Report
from mxcompile.rules import check_mistakes
from mxcompile.storage.tensor import stored_bytes

_BF16_BYTES = 2


def explain(
    model: nn.Module,
    *args: Any,
    policy: Policy | str | dict[str, Any] | None = None,
    target: str = "auto",
    training: bool = True,
    strict: bool = True,
    kwargs: Mapping[str, Any] | None = None,
    **inputs: ModelInput,
) -> Report:
    """Returns a report of everything that ``torch.compile(model, backend="mxfp8")`` would do, and why.

    Args:
        model: model on any device, also the meta device. It is not run and not changed.
        *args: positional arguments of the call. Their values are not used.
        policy: policy as in the backend's option.
        target: target of the compile; "auto" is the device of the model.
        training: whether to trace forward and backward, else forward only.
        strict: whether a rule that matches no layer is an error.
        kwargs: keyword arguments of the call that are also options of this function.
        **inputs: keyword arguments of the call (see `models.arguments`).

    Returns:
        The report, with estimates for targets with known peaks.

    Raises:
        OptionError: for a keyword that neither `explain` nor the model accepts.
        ModelError: if the model cannot be traced.
        PolicyError: for an invalid policy or, if `strict`, an unused rule.
    """
    if isinstance(inputs.get("mesh"), str):
        raise OptionError("explain takes no mesh: call explain_rank(…, mesh=…) for a rank of a mesh")
    named = keywords("explain", locals())
    options = options_for(model, policy=policy, target=target, strict=strict)
    parts = some_or_all(
        model, lambda leave_out: Explainer(model, options, training, leave_out).run(args, named)
    )
    report = Report.from_parts(parts, target=options.target, policy=options.policy.title)
    check_mistakes(options.policy, report.gemms, strict=options.strict)
    parameters = sum(map(stored_bytes, (*model.parameters(), *model.buffers())))
    gradients = sum(stored_bytes(p) for p in model.parameters() if p.requires_grad) if training else 0
    both = ((g.flops // (2 * g.n) + g.flops // (2 * g.k)) for g in report.gemms if g.flops and g.n and g.k)
    beside = report.summary.saved_bytes if training else _BF16_BYTES * max(both, default=0)
    figures: dict[str, Any] = {"parameter_bytes": parameters, "gradient_bytes": gradients}
    figures["peak_bytes"] = parameters + gradients + (beside or 0)
    summary = dataclasses.replace(report.summary, **figures)
    return advised(estimate(dataclasses.replace(report, summary=summary)))


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

    planned: GEMMs of the whole model by name, with their roles and the gradients that the call needs.
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
