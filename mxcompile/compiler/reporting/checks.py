"""Checks compiled layers against the plan of the whole model, before a compile and after a run."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from mxcompile.compiler.hooks.compilation import Compilation
from mxcompile.compiler.reporting import unplanned
from mxcompile.compiler.session.frames import Running
from mxcompile.compiler.session.options import Options
from mxcompile.compiler.session.session import gemms_of_call, planned, session_of
from mxcompile.errors import UnsupportedError
from mxcompile.formats import is_quantized, labels
from mxcompile.graph.tags import GemmTag
from mxcompile.lowering.targets import resolve
from mxcompile.models.names import within
from mxcompile.plan.plan import Plan
from mxcompile.policy import Gemm
from mxcompile.report import REGISTRY
from mxcompile.report.forms.words import listed
from mxcompile.rules import check_layers, spelled, with_complaints

log = logging.getLogger(__name__)

_HINT = "(see TORCH_LOGS=graph_breaks)"


def check_plan(compilation: Compilation, parts: Sequence[str] | None = None) -> None:
    """Compares the policy with the plan of the whole model, once per policy, before a part is compiled.

    Then adds every layer of the plan to the report. parts: paths of all modules that will be compiled, if
    known. In strict mode raises `UnsupportedError` for layers that cannot be quantized or are in no part, and
    for a model without a plan, and `PolicyError` for complaints about rules.
    """
    plan, root = compilation.capture.planned.plan, compilation.capture.root
    if root is None:
        return
    if plan is None:
        unplanned.check(compilation.capture, compilation.options)
        return
    options, checked = compilation.options, session_of(root).checked
    if checked.get(options.group) is plan:
        return
    sent = _quantized(plan, options)
    unfit = [tag for tag in sent if tag.name in plan.obstacles]
    outside = [tag for tag in sent if parts is not None and not _is_in(tag.name, parts)]
    texts = [f"{tag.name}: not in a module that is compiled" for tag in outside]
    for text in texts if not options.strict else ():
        log.warning("%s; add a module that contains it to blocks=…", text)
    is_part = compilation.capture.stage or session_of(root).name
    layers = () if is_part else plan.layers  # rules may be for other stages, or other models of a function
    if options.strict and (unfit or outside):
        refused = [*(f"{tag.name}: {plan.obstacles[tag.name]}" for tag in unfit), *texts]
        wanted = (options.policy.decide(tag.as_layer()).fprop.precision for tag in (*unfit, *outside))
        error = UnsupportedError.from_refused(refused, labels(wanted))
        raise with_complaints(error, options.policy, layers) if layers else error
    if layers:
        check_layers(options.policy, layers, strict=options.strict)
    checked[options.group] = plan
    REGISTRY.plan(root, options.group, plan.records(options.policy))


def check_call(
    root: nn.Module,
    options: Options,
    call: Running,
    runs: Mapping[tuple[str, Gemm], int],
    parts: Sequence[str] = (),
    idle: Sequence[str] = (),
) -> None:
    """Compares the compiled layers of `root` with its plan, after the call `call` of `root`.

    Reports layers that ran outside of compiled code, and a model without compiled code: as a warning, or in
    strict mode as an `UnsupportedError`.

    runs: how often compiled code computes each GEMM in the call and its backward, by layer name and GEMM.
    parts: paths of the modules that should be compiled. idle: those that were not called.
    """
    if REGISTRY.knows(root, options.group):
        plan = session_of(root).plan
        if plan is not None and session_of(root).ran.get(options.group) is not plan:
            check_ran(root, options, plan, call, idle)
            _check_runs(root, options, plan, call, runs)
        return
    plan = planned(root, call.args, call.kwargs).plan
    if plan is not None and not plan.tags:
        return
    device = next((parameter.device for parameter in root.parameters()), torch.device("cpu"))
    REGISTRY.open(object(), options.ledger(resolve(options.target, device).name, root))
    gemms = unplanned.records(root) if plan is None else plan.records(options.policy)
    REGISTRY.plan(root, options.group, tuple(gemms))
    named = [part for part in parts if part]
    most = f"does not call {listed(named, 3)} as modules, or " if named else ""
    _report_or_raise(
        f"nothing of {type(root).__name__} was compiled: its forward {most}is left to Python by Dynamo"
        " (see TORCH_LOGS=graph_breaks), or torch.compile is turned off",
        options,
    )


def check_modules(
    root: nn.Module,
    options: Options,
    call: Running,
    modules: Sequence[str],
    runs: Iterable[tuple[str, Gemm]],
) -> None:
    """Reports layers that a call of `root` ran outside of compiled code, although other calls compile them.

    modules: paths of compiled modules that the call ran. runs: GEMMs that compiled code computed. Raises
    `UnsupportedError` in strict mode.
    """
    plan = session_of(root).plan
    if plan is None:
        return
    pending = {gemm.name for gemm in REGISTRY.pending(root, options.group) if gemm.gemm == Gemm.FPROP}
    expected = {tag.name for tag in _quantized(plan, options) if _is_in(tag.name, modules)}
    missing = expected - pending - {name for name, gemm in runs if gemm == Gemm.FPROP}
    missing &= _layers_of_call(root, call) or set() if missing else set()
    if missing:
        names = spelled([layer for layer in plan.layers if layer.name in missing])
        message = f"a call ran layers outside of compiled code that other calls compile {_HINT}: {names}"
        _report_or_raise(message, options)
        REGISTRY.note(message, options.group, model=root, frame=None)


def report_uncompiled(
    message: str, options: Options, *, root: nn.Module | None, frame: int, path: str | None = None
) -> bool:
    """Reports `message` about a frame that runs as Python from now on. Returns whether it reported it.

    frame: Dynamo's number of the frame. path: path of the module of `root` whose method the frame is. Frames
    without products to quantize are not reported. Raises `UnsupportedError` in strict mode.
    """
    parts = REGISTRY.parts(options.group, frame=frame)
    gemms = [gemm for part in parts for gemm in part.gemms]
    if root is not None and path is not None and not gemms:
        is_cut = not parts or any(part.graph_breaks for part in parts)
        published = REGISTRY.parts(options.group, model=root) if is_cut else ()
        gemms_of_parts = (gemm for part in published for gemm in part.gemms)
        gemms = [gemm for gemm in gemms_of_parts if _is_in(gemm.name, [path])]
    is_reported = any(is_quantized(gemm.precision) for gemm in gemms)
    if is_reported:
        _report_or_raise(message, options)
        REGISTRY.note(message, options.group, model=root, frame=frame)
    return is_reported


def _report_or_raise(message: str, options: Options) -> None:
    if options.strict:
        raise UnsupportedError(f"strict: {message}")
    log.warning("%s", message)


def check_ran(
    root: nn.Module, options: Options, plan: Plan, call: Running | None = None, idle: Sequence[str] = ()
) -> None:
    """Reports the layers of `plan` that ran as Python, without a compiled record, after the forward has run.

    call: the finished call of `root`, which need not run all layers of the plan. idle: paths of modules that
    were not called. Raises `UnsupportedError` in strict mode.
    """
    checked = session_of(root).ran
    if checked.get(options.group) is plan:
        return
    recomputed = {tag.name for tag in plan.tags if tag.recomputed}  # their backward may be compiled later
    missing: dict[str, set[str]] = {}
    for gemm in REGISTRY.pending(root, options.group):
        if is_quantized(gemm.precision) and (gemm.gemm == Gemm.FPROP or gemm.name not in recomputed):
            missing.setdefault(gemm.name, set()).add(gemm.gemm)
    is_sure = not plan.guess
    if missing and not is_sure and call is not None:
        ran = _layers_of_call(root, call)
        is_sure = ran is not None
        may_have_run = ran if ran is not None else {name for name in missing if not _is_in(name, idle)}
        missing = {name: gemms for name, gemms in missing.items() if name in may_have_run}
    if missing:
        forward = [layer for layer in plan.layers if Gemm.FPROP in missing.get(layer.name, ())]
        backward = [layer for layer in plan.layers if layer.name in missing and layer not in forward]
        subjects = {
            "gradients that no compiled graph contains": backward,
            "layers that ran outside of compiled code": forward,
        }
        if not is_sure:
            unsure = "layers that no compiled graph contains; they may not have run, or ran uncompiled"
            subjects = {unsure: [*forward, *backward]}
        texts = [f"{subject} {_HINT}: {spelled(layers)}" for subject, layers in subjects.items() if layers]
        _report_or_raise(f"{options.policy.label} quantizes {', and '.join(texts)}", options)
    checked[options.group] = plan


def _check_runs(
    root: nn.Module, options: Options, plan: Plan, call: Running, runs: Mapping[tuple[str, Gemm], int]
) -> None:
    """Reports the layers of `plan` whose GEMMs compiled code and Python both compute in a call.

    call: the finished call of `root`. runs: how often compiled code computes each GEMM in it.
    """
    recomputed = {tag.name for tag in plan.tags if tag.recomputed}
    names = {tag.name for tag in _quantized(plan, options)}
    compiled = {key for key in runs if key[0] in names and (key[1] == Gemm.FPROP or key[0] not in recomputed)}
    rarer = {key for key in compiled if runs[key] < plan.runs[key]}
    exact = gemms_of_call(root, call.args, call.kwargs) if rarer else None
    rarer = {key for key in rarer if exact is not None and runs[key] < exact[key]}
    forward = {name for name, gemm in rarer if gemm == Gemm.FPROP}
    backward = {name for name, _ in rarer} - forward
    for subject, rarer_names in (("layers that a call ran", forward), ("gradients computed", backward)):
        if not rarer_names:
            continue
        layers = spelled([layer for layer in dict.fromkeys(plan.layers) if layer.name in rarer_names])
        message = (
            f"{options.policy.label} quantizes {subject} in compiled code and outside of it {_HINT}: {layers}"
        )
        _report_or_raise(message, options)
        REGISTRY.note(message, options.group, model=root, frame=None)


def _layers_of_call(root: nn.Module, call: Running) -> set[str] | None:
    """Returns the layers that a call of `root` runs, or None if that depends on tensor values."""
    gemms = gemms_of_call(root, call.args, call.kwargs)
    return None if gemms is None else {name for name, _ in gemms}


def _is_in(name: str, parts: Iterable[str]) -> bool:
    """Whether the layer `name` is in one of the modules at `parts`."""
    return any(within(name, part) for part in parts)


def _quantized(plan: Plan, options: Options) -> list[GemmTag]:
    """Returns the layers of `plan` that the policy quantizes and that a result depends on."""
    decide, layers = options.policy.decide, (tag for tag in plan.tags if tag.is_layer and not tag.unread)
    return [tag for tag in layers if decide(tag.as_layer()).fprop.formats is not None]
