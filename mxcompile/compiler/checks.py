"""Checks of the compiled layers against the plan of the whole model: before a compile, and after a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from mxcompile.compiler.compilation import Compilation
from mxcompile.compiler.frames import is_running
from mxcompile.compiler.options import Options
from mxcompile.compiler.places import settle
from mxcompile.compiler.plans import known_plan, no_plan, planned
from mxcompile.errors import UnsupportedError
from mxcompile.formats import is_quantized
from mxcompile.graph.tags import GemmTag
from mxcompile.lowering.targets import resolve
from mxcompile.plan.plan import Plan
from mxcompile.report import REGISTRY, Ledger
from mxcompile.rules import check_layers, complaints, spelled

log = logging.getLogger(__name__)

_CHECKED: WeakKeyDictionary[nn.Module, dict[str, Plan | None]] = WeakKeyDictionary()
_RAN: WeakKeyDictionary[nn.Module, dict[str, Plan]] = WeakKeyDictionary()
"""By model and options, the plan that was held against: what the policy says, and what has run."""


def check_plan(compilation: Compilation, parts: Sequence[str] | None = None) -> None:
    """Hold the policy against the whole model, before any part of it is compiled, once for a policy.

    From then on every layer of the plan is in the report.

    parts: paths of all modules that will be compiled, if known. Raises what strict mode raises:
    `UnsupportedError` for layers that cannot go or are in no part, `PolicyError` for rules.
    """
    planned, root = compilation.capture.planned, compilation.capture.root
    if root is None:
        return
    plan, checked = planned.plan, _CHECKED.setdefault(root, {})
    if plan is None:
        if planned.missing and planned.missing not in checked:
            log.warning(no_plan(root, planned.missing))
            checked[planned.missing] = None
        return
    options = compilation.options
    if checked.get(options.group) is plan:
        return
    outside = _outside(plan, options, parts) if parts is not None else []
    refused = [*_refused(plan, options), *outside] if options.strict else []
    for layer in outside if not options.strict else ():
        log.warning("%s; name a module that holds it in blocks=…", layer)
    layers = () if compilation.capture.stage else plan.layers  # rules are for the layers of other stages too
    if refused:
        message = "strict: the policy sends these to MXFP8, but they cannot go there:\n  " + "\n  ".join(
            refused
        )
        raise UnsupportedError("\n".join([message, *(complaints(options.policy, layers) if layers else ())]))
    if layers:
        check_layers(options.policy, layers, strict=options.strict)
    checked[options.group] = plan
    REGISTRY.plan(root, options.group, plan.records(options.policy))


def check_ran(compilation: Compilation) -> None:
    """Hold what was compiled against the plan, once the call that it was made for is over.

    A backward that is lowered late tells: the forward has run then, and a layer without a record ran where
    Dynamo left Python to itself. Strict mode raises `UnsupportedError`, else there is a warning.
    """
    plan, root = compilation.capture.planned.plan, compilation.capture.root
    if plan is not None and root is not None and not is_running(root):
        _check_ran(root, compilation.options, plan)


def check_call(
    root: nn.Module, options: Options, parts: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Hold what was compiled of `root` against the plan, now that its call with `args` and `kwargs` is over.

    parts: paths of the modules that were to be compiled. Strict mode raises `UnsupportedError`, else there is
    a warning, for layers that ran outside of compiled code, or if nothing was compiled.
    """
    if REGISTRY.knows(root, options.group):
        plan = known_plan(root)
        if plan is not None:
            _check_ran(root, options, plan)
        return
    plan = planned(root, args, kwargs).plan
    if plan is not None:
        device = next((parameter.device for parameter in root.parameters()), torch.device("cpu"))
        REGISTRY.plan(root, options.group, plan.records(options.policy))
        REGISTRY.open(
            object(),
            Ledger(
                target=resolve(options.target, device).name,
                policy=options.policy.label,
                path=options.report,
                group=options.group,
                model=root,
            ),
        )
    named = [part for part in parts if part]
    most = f"does not call {_listed(named)} as modules, or " if named else ""
    _tell(
        f"nothing of {type(root).__name__} was compiled: its forward {most}is left to Python by Dynamo"
        " (see TORCH_LOGS=graph_breaks), or torch.compile is turned off",
        options,
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _tell(message: str, options: Options) -> None:
    """Warn with `message`, or raise it in strict mode."""
    if options.strict:
        raise UnsupportedError(f"strict: {message}")
    log.warning("%s", message)


def _check_ran(root: nn.Module, options: Options, plan: Plan) -> None:
    settle(root, options.group)
    ran = _RAN.setdefault(root, {})
    if ran.get(options.group) is plan:
        return
    ran[options.group] = plan
    pending = REGISTRY.pending(root, options.group)
    names = [gemm.name for gemm in pending if is_quantized(gemm.precision)]
    if not names:
        return
    layers = [layer for layer in plan.layers if layer.name in set(names)]
    _tell(
        f"{options.policy.label} quantizes these, but they ran outside of compiled code (see"
        f" TORCH_LOGS=graph_breaks): {spelled(layers)}",
        options,
    )


def _outside(plan: Plan, options: Options, parts: Sequence[str]) -> list[str]:
    """The layers of `plan` that the policy quantizes and no module in `parts` holds."""
    return [
        f"{tag.name}: not in a module that is compiled"
        for tag in _quantized(plan, options)
        if not any(tag.name == part or tag.name.startswith(f"{part}.") for part in parts)
    ]


def _refused(plan: Plan, options: Options) -> list[str]:
    """The layers of `plan` that the policy sends where they cannot go, with the reason."""
    sent = _quantized(plan, options)
    return [f"{tag.name}: {plan.obstacles[tag.name]}" for tag in sent if tag.name in plan.obstacles]


def _quantized(plan: Plan, options: Options) -> list[GemmTag]:
    """The layers of `plan` that the policy quantizes."""
    decide = options.policy.decide
    return [tag for tag in plan.tags if tag.is_layer and decide(tag.as_layer()).fprop.formats is not None]
