"""Converts the results of an audit's runs to `Numerics`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from mxcompile.analysis.study.interpreter import Run, Sensitivity
from mxcompile.analysis.study.session import MAKE_A_LOSS, Outcome, Session
from mxcompile.analysis.study.sites import CastSite
from mxcompile.analysis.study.stats import PIECE, CastStats, Sums
from mxcompile.formats import precisions
from mxcompile.graph.tags import hint
from mxcompile.policy import Gemm
from mxcompile.report import GemmNumerics, GemmRecord, Numerics, ParameterNumerics, TensorNumerics
from mxcompile.report.forms.words import main_dtype
from mxcompile.rules import unused_rules


def numerics(
    session: Session, run: Run, outcome: Outcome, reference: Outcome, reach: Sensitivity
) -> Numerics:
    """Returns the errors in `run`, whose result is `outcome`, against the unquantized `reference`."""
    assert reference.logits is not None or not reach.squares
    size = 0.0 if reference.logits is None else float(reference.logits.double().square().sum())
    products, casts, report = session.sites.products, session.sites.casts, session.report()
    logits, gemms = compared(reference.logits, outcome.logits), []
    for index, stats in sorted(run.products.items()):
        tag = products[index].tag
        squares = reach.squares.get(tag.name) if size and tag.gemm == Gemm.FPROP else None
        gemms.append(
            GemmNumerics(
                output_change=None if squares is None else math.sqrt(squares / size),
                name=tag.name,
                role=str(tag.role),
                gemm=str(tag.gemm),
                batch=hint(tag.batch),
                m=hint(tag.m),
                n=hint(tag.n),
                k=hint(tag.k),
                calls=stats.calls,
                **_measures(stats.sums),
            )
        )
    return Numerics(
        tensors=tuple(_tensor(casts[index], cast) for index, cast in sorted(run.casts.items())),
        gemms=tuple(gemms),
        parameters=tuple(parameters(report.gemms, reference, outcome)),
        precision=precisions.labels(gemm.precision for gemm in report.gemms),
        own_dtype=main_dtype(report.gemms),
        policy=session.options.policy.title,
        gradients=outcome.gradients is not None,
        loss=outcome.loss,
        loss_reference=reference.loss,
        loss_gap=loss_gap(outcome.loss, reference.loss),
        logits_sqnr_db=None if logits is None else logits.sqnr_db,
        logits_cosine=None if logits is None else logits.cosine,
        notes=_notes(session, report.gemms, outcome),
    )


def loss_gap(loss: float | None, reference: float | None) -> float | None:
    """Returns loss / reference − 1, 0 for equal losses; None if either is missing."""
    if loss is None or reference is None:
        return None
    if loss == reference:
        return 0.0
    return loss / reference - 1 if reference else math.inf


def compared(reference: Tensor | None, actual: Tensor | None) -> Sums | None:
    """Returns the error sums of `actual` against `reference`; None if one is missing or the shapes differ."""
    if reference is None or actual is None or reference.shape != actual.shape:
        return None
    sums = Sums()
    for x, q in zip(reference.reshape(-1).split(PIECE), actual.reshape(-1).split(PIECE), strict=True):
        sums.add(x, q)
    return sums


def parameters(
    gemms: Iterable[GemmRecord], reference: Outcome, outcome: Outcome
) -> Iterator[ParameterNumerics]:
    """Yields the errors of the gradients, with the FLOPs of the wgrad that computed each."""
    flops: Counter[str] = Counter()
    roles = {}
    for gemm in gemms:
        roles[gemm.name] = gemm.role
        flops[gemm.name] += gemm.flops if gemm.gemm == Gemm.WGRAD else 0
    for name, expected in (reference.gradients or {}).items():
        sums = compared(expected, (outcome.gradients or {}).get(name))
        if sums is None:
            continue
        layer = name if name in roles else name.rpartition(".")[0]
        yield ParameterNumerics(
            name=name,
            role=roles.get(layer, ""),
            flops=flops[layer] if expected.ndim > 1 else 0,
            numel=expected.numel(),
            **_measures(sums),
        )


def _tensor(site: CastSite, stats: CastStats) -> TensorNumerics:
    first, operand = site.readers[0]
    others = dict.fromkeys(tag.name for tag, _ in site.readers if tag.name != first.name)
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
        amax_of=str(site.fmt.amax),
        calls=stats.calls,
        numel=stats.sums.numel,
        amax=stats.amax,
        underflow=stats.underflow / (stats.nonzero or 1),
        saturation=stats.saturation / (stats.finite or 1),
        lost=stats.lost / (stats.magnitude or 1.0),
        flops=stats.calls * sum(tag.flops for tag, _ in site.readers),
        scale_histogram=tuple((byte, count) for byte, count in enumerate(stats.histogram) if count),
        **_measures(stats.sums),
    )


def _measures(sums: Sums) -> dict[str, Any]:
    names = ("sqnr_db", "cosine", "mse", "rel_error", "not_finite")
    return {name: getattr(sums, name) for name in names}


def _notes(session: Session, gemms: Sequence[GemmRecord], outcome: Outcome) -> tuple[str, ...]:
    if not gemms:
        return ("no matrix product was captured: no graph that torch.compile traced of this model has one",)
    notes = [*unused_rules(session.options.policy, gemms)]
    if not session.sites.products:
        notes.append(f"{session.options.policy.label} quantizes no GEMM of this model")
    if outcome.loss is None:
        notes.append(
            f"gradients were not audited: the model returned no loss (most do with labels); {MAKE_A_LOSS}"
        )
    elif outcome.gradients is None:
        notes.append(
            "gradients were not audited: the loss requires no gradient (torch.no_grad, or no parameter with"
            " requires_grad)"
        )
    return tuple(notes)
