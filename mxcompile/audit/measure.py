"""`audit`: what MXFP8 does to the numbers of a model on a batch of the user's own."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from tqdm import tqdm

from mxcompile.audit.interpreter import Run
from mxcompile.audit.session import LossFunction, Outcome, Session
from mxcompile.audit.sites import CastSite
from mxcompile.audit.stats import CastStats, ProductStats, Sums
from mxcompile.errors import OptionError, not_allowed
from mxcompile.plan.inputs import ModelInput, keywords
from mxcompile.policy import Policy
from mxcompile.report import GemmNumerics, Numerics, Report, TensorNumerics
from mxcompile.rules import unused_rules

SCHEMA = 1
"""Version of the JSON form."""

_KEYS = ("schema", "report", "numerics")


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """What was quantized and how well: the report of the model and the numbers measured.

    ``str(audit)`` is a summary and the worst GEMMs and tensors, at most 120 columns wide. `save` writes all
    there is in the form its suffix names.
    """

    report: Report
    numerics: Numerics

    def __str__(self) -> str:
        from mxcompile.audit.text import to_text

        return to_text(self.numerics, rows=20)

    def to_json(self) -> str:
        """The report and the numbers as JSON with ``"schema": 1``; `from_json` reads it back."""
        report = json.loads(self.report.to_json())
        data = {"schema": SCHEMA, "report": report, "numerics": self.numerics.to_dict()}
        return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Audit:
        """The audit `to_json` wrote. Raises `OptionError` for anything else."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise OptionError(f"not an mxcompile audit: {error}") from None
        if not isinstance(data, dict) or data.get("schema") != SCHEMA or {*data} != {*_KEYS}:
            raise OptionError(
                f"not an mxcompile audit of schema {SCHEMA}: expected the keys {', '.join(_KEYS)}"
            )
        report = Report.from_json(json.dumps(data["report"]))
        return cls(report=report, numerics=Numerics.from_dict(data["numerics"]))

    def save(self, path: str | Path) -> None:
        """Write the audit to `path`: ``.txt``, ``.md``, ``.json`` or ``.html``. Raises `OptionError`."""
        path, form = Path(path), form_of(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(form(self), encoding="utf-8")

    def plot(self, folder: str | Path) -> list[Path]:
        """Draw gemms.png, tensors.png and scales.png into `folder`; returns what was written.

        Needs matplotlib. Raises `OptionError` without it.
        """
        from mxcompile.audit.plot import plot

        return plot(self.numerics, Path(folder))


def _text(audit: Audit) -> str:
    from mxcompile.audit.text import to_text

    return f"{to_text(audit.numerics)}\n\n{audit.report}\n"


def _markdown(audit: Audit) -> str:
    from mxcompile.audit.text import to_markdown

    return to_markdown(audit.numerics)


def _html(audit: Audit) -> str:
    from mxcompile.report.html import to_html

    return to_html(audit.report, audit.numerics)


FORMS: dict[str, Callable[[Audit], str]] = {
    ".txt": _text,
    ".md": _markdown,
    ".json": Audit.to_json,
    ".html": _html,
}
"""How an audit is written, by file suffix."""


def form_of(path: str | Path) -> Callable[[Audit], str]:
    """The writer for `path`. Raises `OptionError` for a suffix without one."""
    suffix = Path(path).suffix
    if suffix not in FORMS:
        raise OptionError(f"audit {str(path)!r}: {not_allowed('suffix', suffix, FORMS)}")
    return FORMS[suffix]


def audit(
    model: nn.Module,
    *args: Any,
    policy: Policy | str | dict[str, Any] | None = None,
    loss_fn: LossFunction | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **inputs: ModelInput,
) -> Audit:
    """Measure what `policy` does to the numbers of one call of `model`, forward and backward.

    model: on any device that can run it, in training or evaluation mode as it is. It is left as it is, bit
    for bit: weights, buffers, gradients, random number generators. args, inputs, kwargs: what it is called
    with (see `plan.inputs`). policy: as the backend's option. loss_fn: from the output of the model to a
    scalar loss; by default the output itself if it is a scalar, or its ``loss``. Without a loss, or where
    gradients are off, backward is not audited and a note says so.

    The model runs twice: with nothing in MXFP8, for comparison, and under the policy. Returns an `Audit`.
    Raises `OptionError` for a keyword nobody takes, `ModelError` if the model cannot be captured or fails,
    `PolicyError` for an invalid policy.
    """
    named = keywords("audit", model, inputs, kwargs, {"policy": policy, "loss_fn": loss_fn})
    session = Session(model, args, named, policy=policy, loss_fn=loss_fn)
    with tqdm(desc="audit", unit="gemm", disable=None, leave=False) as bar:
        reference = session.run(Run(quantized=lambda _: False))
        bar.reset(total=len(session.sites.products))
        run = Run(quantized=lambda _: True, observe=True, on_product=bar.update)
        outcome = session.run(run, backward=True)
    return Audit(report=session.report(), numerics=numerics(session, run, outcome, reference))


def numerics(session: Session, run: Run, outcome: Outcome, reference: Outcome) -> Numerics:
    """What was observed in `run`, which ended with `outcome`, held to the BF16 run that gave `reference`."""
    products, casts = session.sites.products, session.sites.casts
    logits = _compared(reference.logits, outcome.logits)
    return Numerics(
        tensors=tuple(_tensor(casts[index], stats) for index, stats in sorted(run.casts.items())),
        gemms=tuple(_gemm(products[index], stats) for index, stats in sorted(run.products.items())),
        policy=session.options.policy.label,
        gradients=outcome.gradients,
        loss=outcome.loss,
        loss_reference=reference.loss,
        loss_gap=loss_gap(outcome.loss, reference.loss),
        logits_sqnr_db=None if logits is None else logits.sqnr_db,
        logits_cosine=None if logits is None else logits.cosine,
        notes=_notes(session, outcome),
    )


def loss_gap(loss: float | None, reference: float | None) -> float | None:
    """The share by which a loss exceeds the reference, 0 for equal losses; None if either is missing."""
    if loss is None or reference is None:
        return None
    if loss == reference:
        return 0.0
    return loss / reference - 1 if reference else math.inf


def _compared(reference: Tensor | None, logits: Tensor | None) -> Sums | None:
    if reference is None or logits is None or reference.shape != logits.shape:
        return None
    sums = Sums()
    for start in range(0, reference.shape[0], rows := max(1, reference.shape[0] // 64)):
        sums.add(reference[start : start + rows], logits[start : start + rows])
    return sums


def _tensor(site: CastSite, stats: CastStats) -> TensorNumerics:
    first, operand = site.readers[0]
    others = dict.fromkeys(tag.name for tag, _ in site.readers if tag.name != first.name)
    numel = stats.sums.numel or 1
    return TensorNumerics(
        name=first.name,
        role=str(first.role),
        operand=operand,
        layout="rowwise" if site.rowwise else "columnwise",
        gemms=tuple(dict.fromkeys(str(tag.gemm) for tag, _ in site.readers)),
        shared_with=tuple(others),
        elem=site.fmt.elem.name,
        rounding=site.fmt.derivation,
        block=str(site.fmt.tile),
        elements=str(site.fmt.elements),
        calls=stats.calls,
        numel=stats.sums.numel,
        amax=stats.amax,
        underflow=stats.underflow / numel,
        saturation=stats.saturation / numel,
        scale_histogram=tuple((byte, count) for byte, count in enumerate(stats.histogram) if count),
        **_measures(stats.sums),
    )


def _gemm(site: Any, stats: ProductStats) -> GemmNumerics:
    tag = site.tag
    return GemmNumerics(
        name=tag.name,
        role=str(tag.role),
        gemm=str(tag.gemm),
        batch=tag.batch,
        m=tag.m,
        n=tag.n,
        k=tag.k,
        calls=stats.calls,
        **_measures(stats.sums),
    )


def _measures(sums: Sums) -> dict[str, Any]:
    return {
        "sqnr_db": sums.sqnr_db,
        "cosine": sums.cosine,
        "mse": sums.mse,
        "rel_error": sums.rel_error,
        "not_finite": sums.not_finite,
    }


def _notes(session: Session, outcome: Outcome) -> tuple[str, ...]:
    gemms = session.report().gemms
    if not gemms:
        return ("no matrix product was captured: torch.compile made no graph of one in this model",)
    notes = [*unused_rules(session.options.policy, gemms)]
    if not session.sites.products:
        notes.append(f"{session.options.policy.label} puts nothing of this model in MXFP8")
    if outcome.loss is None:
        notes.append(
            "gradients were not audited: the model returned no loss; let it return a scalar or an output with"
            " .loss (most models do when given labels), or pass loss_fn"
        )
    elif not outcome.gradients:
        notes.append(
            "gradients were not audited: the loss needs none (no_grad, or no parameter requires_grad)"
        )
    return tuple(notes)
