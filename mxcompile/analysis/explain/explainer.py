"""`explain`: the report of a model that is neither run nor compiled, and need not fit in memory.

The model is copied with fake tensors in place of its parameters, and every graph that Dynamo captures is
traced through AOTAutograd and all passes, on the way a compile takes, up to code generation. Of equal layers
a few are traced and the records of the others follow from theirs (see `repeats`).

Tracing happens on fake CPU tensors whatever the target (see `fakes`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from mxcompile.analysis.explain.advice import advised
from mxcompile.analysis.explain.memory import with_memory
from mxcompile.analysis.explain.parts import eager_records, moved
from mxcompile.analysis.explain.roofline import estimate
from mxcompile.compiler.capture import Capture
from mxcompile.compiler.options import Options
from mxcompile.compiler.plans import no_plan, planned
from mxcompile.compiler.rehearsal import Rehearsal
from mxcompile.lowering.targets import AUTO, Target, of_device
from mxcompile.models.arguments import ModelInput, keywords
from mxcompile.models.assumed import Assuming
from mxcompile.models.names import user_path
from mxcompile.plan.repeats import LeaveOut, some_or_all
from mxcompile.policy import Policy
from mxcompile.report import GemmRecord, Part, Report
from mxcompile.rules import check_mistakes


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
    """Returns what ``torch.compile(model, backend="mxfp8")`` would do to every matrix product, and why.

    model: on any device, the meta device too; it is not run and not changed. args, inputs, kwargs: what it is
    called with (see `models.arguments`); their values are not looked at. policy: as the backend's option.
    target: what to compile for; "auto" is the device of the model. training: forward and backward, else
    forward only. strict: a rule that matches no layer is an error.

    Returns a `Report` with roofline estimates for the targets that have them. Raises `OptionError` for a
    keyword nobody takes, `ModelError` if the model cannot be traced, `PolicyError` for a policy that is not
    valid or, if `strict`, has unused rules.
    """
    given = {"policy": policy, "target": target, "training": training, "strict": strict}
    named = keywords("explain", model, inputs, kwargs, given)
    options = Options.parse(None, {"policy": policy, "target": target, "strict": strict})
    if options.target == AUTO:
        options = dataclasses.replace(options, target=of_device(_device(model)).name)
    parts = some_or_all(
        model, lambda leave_out: _Explainer(model, options, training, leave_out).run(args, named)
    )
    report = Report.of(parts, target=options.target, policy=options.policy.label)
    check_mistakes(options.policy, report.gemms, strict=options.strict)
    return advised(estimate(with_memory(report, model, training=training)))


def _device(model: nn.Module) -> torch.device:
    """Where `model` is, if on an accelerator; the meta device counts as the CPU."""
    devices = (parameter.device for parameter in model.parameters())
    return next((d for d in devices if d.type not in ("cpu", "meta")), torch.device("cpu"))


def _kernel_for(target: Target, gemm: GemmRecord) -> GemmRecord:
    """The record with the kernel's name on `target`: the CPU's attention stands for the accelerator's."""
    if target.device == "cpu":
        return gemm
    return dataclasses.replace(gemm, kernel=gemm.kernel.replace("_for_cpu", ""))


class _Explainer(Rehearsal[Assuming]):
    """The rehearsal that makes the parts of the report."""

    def __init__(self, model: nn.Module, options: Options, training: bool, leave_out: LeaveOut) -> None:
        lenient = dataclasses.replace(options, strict=False)
        super().__init__(model, lenient, Assuming(), training=training, leave_out=leave_out)
        self.mode.names(self.model)
        self._paths = {id(p): user_path(path) for path, p in self.model.named_parameters()}
        self._parts: list[Part] = []

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Part]:
        """Trace the model called with `args` and `kwargs`."""
        self.call(args, kwargs)
        notes = tuple(f"assumed: {note}" for note in self.mode.notes)
        gemms = self._outside(args, kwargs)
        if notes or gemms:
            self._parts.append(self.repeats.expand(Part(gemms=gemms, warnings=notes)))
        return self._parts

    def _outside(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[GemmRecord, ...]:
        """Records of what ran outside of compiled graphs, in the roles it has in the whole model."""
        graph = self.mode.outside.graph
        if not graph.nodes:
            return ()
        plan = planned(self.model, args, kwargs).plan
        known = {} if plan is None else plan.by_name
        return eager_records(graph, known, self.repeats.blocks, training=self.training)

    def graph(
        self, capture: Capture, gm: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        with self.mode.plain():
            compilation = self.traced(capture, gm, example_inputs)
        gemms = tuple(_kernel_for(self.target, gemm) for gemm in compilation.part.gemms)
        missing = capture.planned.missing
        part = dataclasses.replace(
            compilation.part, gemms=gemms, warnings=(no_plan(self.model, missing),) if missing else ()
        )
        self._parts.append(self.repeats.expand(part))
        first = self._owners(example_inputs, capture.module)
        calls = itertools.count()

        def run(*inputs: Any) -> Any:
            if next(calls) > 0:  # code that serves several layers, or one layer several times
                again = Part(gemms=moved(gemms, first, self._owners(inputs, self.mode.module())))
                self._parts.append(self.repeats.expand(again))
            with self.mode.outside.paused():
                return gm.forward(*inputs)

        return run

    def _owners(self, inputs: Sequence[Any], module: str) -> list[str]:
        """The path of the running module, and the paths of `inputs`, "" for other tensors than parameters."""
        return [module, *(self._paths.get(id(value), "") for value in inputs)]
