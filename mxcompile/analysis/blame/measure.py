"""`blame`: finds the layers and GEMMs that make the difference between two policies on a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from tqdm import tqdm

from mxcompile.analysis.blame.blamed import MEASURES, Blamed, Effect, Findings
from mxcompile.analysis.blame.search import LEAST, REPEATS, RunPlan, Search, check, check_different
from mxcompile.analysis.blame.trials import BlameTrials
from mxcompile.analysis.study.session import MAKE_A_LOSS, LossFunction, Session, Study
from mxcompile.errors import ModelError, OptionError, not_allowed
from mxcompile.models.arguments import ModelInput, keywords
from mxcompile.policy import Policy


def blame(
    model: nn.Module,
    *args: Any,
    policy: Policy | str | dict[str, Any] | None = None,
    against: Policy | str | dict[str, Any] = "bf16",
    of: str | None = None,
    remove: float = 0.5,
    max_runs: int = 64,
    repeats: int | None = None,
    loss_fn: LossFunction | None = None,
    announce: Callable[[str], object] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **inputs: ModelInput,
) -> Blamed:
    """Finds the layers and GEMMs of `model` that make the difference between two policies on one call.

    Args:
        model: model as for `audit`. It is not changed.
        *args: positional arguments of the call.
        policy: the policy to examine, as in the backend's option.
        against: reference policy, by default the model's own dtype.
        of: measure of the difference: "gradients", "loss" or "output". The default is the gradients if there
            is a loss, else the output. Without gradients no backward runs and only forward GEMMs are
            compared.
        remove: share of the difference that the resulting policy removes, above 0 and at most 1, with as few
            GEMMs as possible.
        max_runs: limit of the runs of the model, at least 8 per repeat.
        repeats: runs per effect with different random numbers; by default 3 if the model draws any, else 1.
        loss_fn: as for `audit`.
        announce: called with a sentence about the number of runs, before the first run and when the layers
            are known.
        kwargs: keyword arguments of the call that are also options of this function.
        **inputs: keyword arguments of the call (see `models.arguments`).

    Returns:
        A `Blamed`. It has no parts if nothing differs or the reference is not finite; notes give the cause.

    Raises:
        OptionError: for invalid options.
        ModelError: if the model cannot be captured or lacks the measure `of`.
        PolicyError: for an invalid policy.
    """
    named = keywords("blame", locals())
    check(max_runs, repeats, remove)
    if of is not None and of not in MEASURES:
        raise OptionError(f"of: {not_allowed('measure', of, MEASURES)}")
    requested, reference = Policy.resolve(policy), Policy.resolve(against)
    check_different(requested, reference)
    announced = announce or (lambda _: None)
    announced(f"blame: at most {max_runs} runs of the model")
    session = Session(model, args, named, policy=requested, loss_fn=loss_fn)
    with tqdm(desc="blame: tracing", unit="run", disable=None, leave=False) as bar:
        study, backward = Study(session, bar, "blame"), of in (None, "gradients")
        trials = BlameTrials(study, requested, reference, backward)
        several = min(REPEATS, max_runs // LEAST) if trials.drew else 1
        plan = RunPlan.from_counts(
            len(trials.layers),
            len({gemm for _, gemm in trials.keys}) if trials.switched else 1,
            repeats=several if repeats is None else repeats,
            max_runs=max_runs,
            more=1 - len(trials.references),
        )
        bar.total = plan.runs
        trials.repeat(plan.repeats)
        measure = _measure(of, trials.self_effect)
        findings = Findings(whole=trials.self_effect, left=trials.self_effect)
        notes = trials.obstacles(measure)
        if not notes:
            announced(f"blame: {plan}")
            findings, notes = Search(trials, plan, measure, remove).findings(), trials.notes()
            if not findings.parts:
                notes.insert(0, f"the policies differ, but not in the {measure} of this run")
    if trials.drew and plan.repeats == 1:
        notes.append(
            "the model draws random numbers and each effect was measured once, so without error bars"
        )
    policy, comments = trials.without(frozenset(findings.worst)) if findings.worst else (requested, ())
    return Blamed(
        **vars(findings),
        num_layers=len(trials.layers),
        num_gemms=len(trials.keys),
        runs=study.runs,
        max_runs=plan.runs,
        repeats=plan.repeats,
        flop_share_before=study.flop_share(),
        flop_share=study.flop_share(frozenset(findings.worst)),
        policy=policy,
        comments=comments,
        notes=tuple(notes),
        asked=requested.label,
        against=reference.label,
        measure=measure,
        remove=remove,
    )


def _measure(wanted: str | None, effect: Effect) -> str:
    """Returns `wanted`, or the first of gradients, output and loss in `effect`. Raises `ModelError`."""
    present = [name for name in MEASURES if getattr(effect, name) is not None]
    measure = wanted or next((name for name in ("gradients", "output", "loss") if name in present), "output")
    if measure not in present:
        needs = {
            "output": "a floating-point tensor as its main output",
            "loss": f"a loss: {MAKE_A_LOSS}",
            "gradients": f"a loss that needs gradients: {MAKE_A_LOSS}",
        }
        has = f"this run has {' and '.join(present)}" if present else "this run has nothing to measure"
        raise ModelError(f"blame of {measure!r} needs {needs[measure]}; {has}")
    return measure
