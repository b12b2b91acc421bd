"""`explain`: the report of a model that is neither run nor compiled, and need not fit in memory.

The model is copied with fake tensors in place of its parameters, and traced like a compile (see `tracer`).
The peak memory of a step follows from the parameters and the report:

    training     parameters + buffers + gradients + tensors saved for backward
    inference    parameters + buffers + input and output of the largest product

Gradients have the dtype of their parameters. The optimizer, the allocator's cache and workspaces are not
included.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn

from mxcompile.analysis.explain.sweep import advised
from mxcompile.analysis.explain.tracer import Explainer, options_for
from mxcompile.compiler.rehearsal import some_or_all
from mxcompile.errors import OptionError
from mxcompile.models.arguments import ModelInput, keywords
from mxcompile.offline.record_work import estimate
from mxcompile.policy import Policy
from mxcompile.report import Report
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
