"""`blame`: finds the layers and GEMMs that make the difference between two policies on a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from tqdm import tqdm

from mxcompile.analysis.audit.session import LossFunction
from mxcompile.analysis.blame import plan as plans
from mxcompile.analysis.blame.blamed import Blamed
from mxcompile.analysis.blame.effects import MEASURES, Effect
from mxcompile.analysis.blame.plan import RunPlan
from mxcompile.analysis.blame.search import Findings, Search
from mxcompile.analysis.blame.trials import BlameTrials
from mxcompile.analysis.tune.measure import ModelCall
from mxcompile.errors import ModelError, OptionError, not_allowed
from mxcompile.models.arguments import ModelInput, keywords
from mxcompile.policy import Policy
from mxcompile.report.fold import spelled

MAX_RUNS = 64
REMOVE = 0.5


def blame(
    model: nn.Module,
    *args: Any,
    policy: Policy | str | dict[str, Any] | None = None,
    against: Policy | str | dict[str, Any] = "bf16",
    of: str | None = None,
    remove: float = REMOVE,
    max_runs: int = MAX_RUNS,
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
    given = {
        "policy": policy, "against": against, "of": of, "remove": remove, "max_runs": max_runs,
        "repeats": repeats, "loss_fn": loss_fn, "announce": announce,
    }  # fmt: skip
    named = keywords("blame", model, inputs, kwargs, given)
    plans.check(max_runs, repeats, remove)
    if of is not None and of not in MEASURES:
        raise OptionError(f"of: {not_allowed('measure', of, MEASURES)}")
    asked, reference = Policy.resolve(policy), Policy.resolve(against)
    plans.check_different(asked, reference)
    tell = announce or (lambda _: None)
    tell(f"blame: at most {max_runs} runs of the model")
    call = ModelCall(model=model, args=args, kwargs=named, loss_fn=loss_fn)
    with tqdm(desc="blame: tracing", unit="run", disable=None, leave=False) as bar:

        def on_run(what: str) -> None:
            bar.set_description(f"blame: {what}", refresh=False)
            bar.update()

        trials = BlameTrials(call, asked, reference, of in (None, "gradients"), on_run)
        plan = _plan(trials, max_runs, repeats)
        bar.total = plan.runs
        trials.repeat(plan.repeats)
        own = trials.effect(frozenset(), "the reference")
        measure = _measure(own, of)
        findings, notes = Findings(whole=own, left=own), _obstacles(trials, own, measure, asked, reference)
        if not notes:
            tell(f"blame: {plan}")
            findings, notes = Search(trials, plan, measure, remove).findings(), trials.notes()
            if not findings.parts:
                notes.insert(0, f"what differs between the policies leaves the {measure} as they are")
    if trials.drew and plan.repeats == 1:
        notes.append("the model draws random numbers and each effect was measured once: no error bar")
    return _blamed(trials, plan, findings, measure, asked, reference, remove, notes)


def _plan(trials: BlameTrials, max_runs: int, repeats: int | None) -> RunPlan:
    """Returns the plan of the runs for the differences in `trials`."""
    different = trials.differences
    return RunPlan.of(
        len({name for name, _ in different.keys}),
        len({gemm for _, gemm in different.keys}) if different.switched else 1,
        repeats=plans.repeats_of(repeats, trials.drew, max_runs),
        max_runs=max_runs,
        more=trials.to_come,
    )


def _obstacles(trials: BlameTrials, own: Effect, measure: str, asked: Policy, reference: Policy) -> list[str]:
    """Returns why a search cannot find anything; empty if it can. own: effect of the reference on itself."""
    if not trials.differences.keys:
        return [f"nothing differs: {asked.label} treats all GEMMs of this run as {reference.label} does"]
    if math.isinf(own.on(measure).mean):
        return [
            f"the {measure} {'are' if measure == 'gradients' else 'is'} not finite under {reference.label}"
            f" either: what {asked.label} quantizes is not the cause"
        ]
    return []


def _measure(own: Effect, of: str | None) -> str:
    """Returns the measure of the search. Raises `ModelError` if the model lacks it."""
    present = [measure for measure in MEASURES if getattr(own, measure) is not None]
    if of is None:
        order = ("gradients", "output", "loss")
        of = next((measure for measure in order if measure in present), "output")
    if of not in present:
        wanted = {
            "output": "a floating-point tensor as its main output",
            "loss": "a loss: let the model return a scalar or an output with .loss, or pass loss_fn",
            "gradients": "a loss that needs gradients: let the model return a scalar or an output with .loss,"
            " or pass loss_fn",
        }
        has = f"this run has {' and '.join(present)}" if present else "this run has nothing to measure"
        raise ModelError(f"blame of {of!r} needs {wanted[of]}; {has}")
    return of


def _blamed(
    trials: BlameTrials,
    plan: RunPlan,
    findings: Findings,
    measure: str,
    asked: Policy,
    reference: Policy,
    remove: float,
    notes: list[str],
) -> Blamed:
    """Returns the result with `findings` and the policy that follows from them."""
    policy, uses = trials.without(findings.worst) if findings.worst else (asked, {})
    keys = trials.differences.keys
    gemms: dict[str, list[str]] = {}
    for name, gemm in (key for key in keys if key in findings.worst):
        gemms.setdefault(name, []).append(gemm)
    comments = [
        f"{spelled(names)}: {', '.join(gemms[names[0]])} as in {reference.label}" for names in uses.values()
    ]
    return Blamed(
        policy=policy,
        asked=asked.label,
        against=reference.label,
        measure=measure,
        remove=remove,
        whole=findings.whole,
        left=findings.left,
        parts=findings.parts,
        kinds=findings.kinds,
        gemms=findings.gemms,
        worst=tuple(key for key in keys if key in findings.worst),
        num_layers=len({name for name, _ in keys}),
        num_gemms=len(keys),
        runs=trials.runs,
        max_runs=plan.runs,
        repeats=plan.repeats,
        flop_share_before=trials.flop_share(),
        flop_share=trials.flop_share(findings.worst),
        comments=tuple(comments),
        notes=tuple(notes),
    )
