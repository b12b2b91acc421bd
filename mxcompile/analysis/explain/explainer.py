"""`explain`: the report of a model that is neither run nor compiled, and need not fit in memory.

The model is copied with fake tensors in place of its parameters, and traced on the way a compile takes (see
`tracer`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, overload

import torch
from torch import nn

from mxcompile.analysis.explain.advice import advised
from mxcompile.analysis.explain.memory import with_memory
from mxcompile.analysis.explain.rank import explain_rank
from mxcompile.analysis.explain.tracer import Explainer
from mxcompile.compiler.options import Options
from mxcompile.compiler.rehearsal import some_or_all
from mxcompile.errors import OptionError
from mxcompile.lowering.targets import AUTO, of_device
from mxcompile.mesh.report import RankReport
from mxcompile.models.arguments import ModelInput
from mxcompile.offline.roofline import estimate
from mxcompile.policy import Policy
from mxcompile.ranks.built import Factory, named_inputs
from mxcompile.report import Report
from mxcompile.rules import check_mistakes


@overload
def explain(
    model: nn.Module,
    *args: Any,
    policy: Policy | str | dict[str, Any] | None = None,
    target: str = "auto",
    training: bool = True,
    strict: bool = True,
    mesh: None = None,
    parallel: None = None,
    links: None = None,
    node: None = None,
    schedule: None = None,
    microbatches: None = None,
    kwargs: Mapping[str, Any] | None = None,
    **inputs: ModelInput,
) -> Report: ...


@overload
def explain(
    model: nn.Module | Factory,
    *args: Any,
    policy: Policy | str | dict[str, Any] | None = None,
    target: str = "auto",
    training: bool = True,
    strict: bool = True,
    mesh: str,
    parallel: str | None = None,
    links: str | None = None,
    node: int | None = None,
    schedule: str | None = None,
    microbatches: int | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **inputs: ModelInput,
) -> RankReport: ...


def explain(
    model: nn.Module | Factory,
    *args: Any,
    policy: Policy | str | dict[str, Any] | None = None,
    target: str = "auto",
    training: bool = True,
    strict: bool = True,
    mesh: str | None = None,
    parallel: str | None = None,
    links: str | None = None,
    node: int | None = None,
    schedule: str | None = None,
    microbatches: int | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **inputs: ModelInput,
) -> Report | RankReport:
    """Returns what ``torch.compile(model, backend="mxfp8")`` would do to every matrix product, and why.

    model: on any device, the meta device too; it is not run and not changed. args, inputs, kwargs: what it is
    called with (see `models.arguments`); their values are not looked at. policy: as the backend's option.
    target: what to compile for; "auto" is the device of the model. training: forward and backward, else
    forward only. strict: a rule that matches no layer is an error.

    mesh: explain one rank of a mesh, such as ``dp=128,tp=8``, that need not exist. parallel: ways to
    parallelise a plain model on it, ``fsdp``, ``ep``, ``tp=llama``, several with commas. Without, `model` is
    a function of the `DeviceMesh` that parallelises a model itself and returns (model, args, kwargs).
    links: estimate the time of a step with these links, such as ``nvlink=900,net=50``, in 10⁹ bytes a second
    each way of a GPU. node: GPUs that NVLink joins, 8 if it is not given. schedule, microbatches: of a mesh
    with an axis ``pp``, whose ranks have stages of the model; 1F1B and as many as stages if not given.

    Returns a `Report` with roofline estimates for the targets that have them; with `mesh` a `RankReport`.
    Raises `OptionError` for a keyword nobody takes, a mesh or links that are not valid, or a mesh in a
    process that has a process group; `ModelError` if the model cannot be traced, `PolicyError` for a policy
    that is not valid or, if `strict`, has unused rules.
    """
    given: dict[str, Any] = {"policy": policy, "target": target, "strict": strict}
    own = {**given, "training": training, "mesh": mesh, "parallel": parallel, "links": links, "node": node}
    own |= {"schedule": schedule, "microbatches": microbatches}
    named = named_inputs("explain", model, mesh, args, inputs, kwargs, own)
    options = Options.parse(None, given)
    if options.target == AUTO:
        options = dataclasses.replace(options, target=of_device(_device(model)).name)
    if mesh is not None:
        return explain_rank(
            model,
            args,
            named,
            mesh=mesh,
            parallel=parallel,
            options=options,
            training=training,
            links=links,
            node=node,
            schedule=schedule,
            microbatches=microbatches,
        )
    if links is not None or node is not None:
        raise OptionError("links are between the ranks of a mesh: give `mesh`, such as dp=128,tp=8")
    if schedule is not None or microbatches is not None:
        raise OptionError("a schedule is of the ranks of a mesh: give `mesh`, such as pp=4,dp=8")
    assert isinstance(model, nn.Module)
    parts = some_or_all(
        model, lambda leave_out: Explainer(model, options, training, leave_out).run(args, named)
    )
    report = Report.of(parts, target=options.target, policy=options.policy.label)
    check_mistakes(options.policy, report.gemms, strict=options.strict)
    return advised(estimate(with_memory(report, model, training=training)))


def _device(model: object) -> torch.device:
    """Where `model` is, if on an accelerator; the meta device counts as the CPU, and so does a factory."""
    devices = (parameter.device for parameter in model.parameters()) if isinstance(model, nn.Module) else ()
    return next((d for d in devices if d.type not in ("cpu", "meta")), torch.device("cpu"))
