"""`explain`: the report of a model that is neither run nor compiled, and need not fit in memory.

The model is copied with fake tensors in place of its parameters, and traced like a compile (see `tracer`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from mxcompile.analysis.explain.advice import advised
from mxcompile.analysis.explain.memory import with_memory
from mxcompile.analysis.explain.tracer import Explainer, options_for
from mxcompile.compiler.rehearsal import some_or_all
from mxcompile.errors import OptionError
from mxcompile.models.arguments import ModelInput, keywords
from mxcompile.offline.record_work import estimate
from mxcompile.policy import Policy
from mxcompile.report import Report
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
        raise OptionError("explain is for the whole model: explain_rank(…, mesh=…) explains a rank of a mesh")
    given: dict[str, Any] = {"policy": policy, "target": target, "strict": strict}
    named = keywords("explain", model, inputs, kwargs, {**given, "training": training})
    options = options_for(model, **given)
    parts = some_or_all(
        model, lambda leave_out: Explainer(model, options, training, leave_out).run(args, named)
    )
    report = Report.of(parts, target=options.target, policy=options.policy.label)
    check_mistakes(options.policy, report.gemms, strict=options.strict)
    return advised(estimate(with_memory(report, model, training=training)))
