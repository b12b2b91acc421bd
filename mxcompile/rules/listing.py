"""Formats the decisions of a policy on a model as text, by rule and by layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import yaml

from mxcompile.policy import ATTENTION_PRODUCTS, Gemm, Layer, Policy, Saved, Sent
from mxcompile.report import GemmRecord
from mxcompile.report.data.fold import Row, fold
from mxcompile.report.forms.tables import drawn
from mxcompile.report.forms.words import count, length
from mxcompile.rules.fit import fits
from mxcompile.rules.layers import folded, layers_of

_GEMMS = tuple(str(gemm) for gemm in Gemm)


def matches(policy: Policy, layers: Sequence[Layer]) -> str:
    """Returns the text that lists the layers of every rule of `policy`, and the layers of the preset."""
    lines = []
    for fit, written in zip(fits(policy, layers), policy.to_dict()["rules"], strict=True):
        taken = f", {len(fit.taken)} more went to earlier rules" if fit.taken else ""
        if not fit.rule.match.in_force:
            taken = f" now, {len(fit.taken)} in {fit.rule.match.steps}"
        rule = f"rule {fit.number}: {_flow(written['match'])} → {_flow(written['use'])}"
        lines += [f"{rule}: {count(len(fit.decides), 'layer')}{taken}", *_names(fit.decides)]
    linear = (layer for layer in layers if layer.role not in ATTENTION_PRODUCTS)
    rest = [layer for layer in linear if policy.rule_for(layer) is None]
    return "\n".join([*lines, f"preset {policy.base.name}: {count(len(rest), 'layer')}", *_names(rest)])


def decisions(policy: Policy, gemms: Iterable[GemmRecord]) -> str:
    """Returns a table of a model's layers: precision of each GEMM, formats, and the rule with its reason.

    gemms: the records of the model's report under `policy`.
    """
    headers = ["layer", "", "role", *_GEMMS, "formats", "decided by"]
    widths = [None] * (len(headers) - 2) + [26, 30]
    table = [headers]
    for row in fold(gemms):
        times = f"×{row.count}" if row.count > 1 else ""
        by_gemm = {gemm.gemm: gemm.precision for gemm in row.gemms}
        precisions = [by_gemm.get(gemm, "") for gemm in _GEMMS]
        decided = _formats(policy, row), _reasons(row.gemms)
        table.append([row.name or "(root)", times, row.gemms[0].role, *precisions, *decided])
    return drawn(table, maxcolwidths=widths)


def _formats(policy: Policy, row: Row) -> str:
    """Returns x's format, the deviations of other operands, and unusual formats of saved or sent copies."""
    operands = {f.operand: f for gemm in row.gemms for f in gemm.formats}
    if not operands:
        return ""
    common = operands.get("x") or next(iter(operands.values()))
    parts = [common.format]
    for operand, form in operands.items():
        pairs = zip(form.words, common.words, strict=True)
        if differs := [word or "plain" for word, usual in pairs if word != usual]:
            parts.append(" ".join((operand, *differs)))
    decisions = [policy.decide(layer) for layer in layers_of(row.gemms)]
    saved = {decision.saved for decision in decisions} - {Saved.COLUMNWISE}
    sent = {decision.sent for decision in decisions} - {Sent.SOURCE}
    parts += [f"saved {form}" for form in sorted(saved)]
    return ", ".join([*parts, *(f"sent {form}" for form in sorted(sent))])


def _reasons(gemms: Sequence[GemmRecord]) -> str:
    """Returns the common reason of all GEMMs, or a reason for each group of GEMMs."""
    by_reason: dict[str, list[str]] = {}
    for gemm in gemms:
        by_reason.setdefault(gemm.reason, []).append(gemm.gemm)
    if len(by_reason) == 1:
        return next(iter(by_reason))
    return "; ".join(f"{', '.join(dict.fromkeys(which))}: {why}" for why, which in by_reason.items())


def _names(layers: Sequence[Layer]) -> list[str]:
    return [
        f"    {row.name or '(root)'}{f' ×{row.count}' if row.count > 1 else ''}  {gemm.role}"
        f"  m={length(gemm.m)} n={length(gemm.n)} k={length(gemm.k)}"
        for row in folded(layers)
        for gemm in row.gemms[:1]
    ]


def _flow(value: Any) -> str:
    """Returns a part of a policy as one line of YAML."""
    if isinstance(value, str):
        return value
    return yaml.safe_dump(
        value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=1 << 16
    ).strip()
