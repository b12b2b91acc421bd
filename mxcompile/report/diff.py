"""What changed between two reports of a model.

GEMMs are matched by layer name and kind, the n-th of one report with the n-th of the other; the two products
of an attention by their roles too. A GEMM that was quantized and is in BF16 fell back; what is only in one
report is new or removed, never a fallback. Layers that changed alike are one change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from mxcompile.formats import is_quantized, labels
from mxcompile.policy import ATTENTION_PRODUCTS
from mxcompile.report.fold import spelled
from mxcompile.report.record import GemmRecord, Summary
from mxcompile.report.report import Report
from mxcompile.report.tables import Table, bullets, drawn, fitted, markdown, markdown_table, wrapped
from mxcompile.report.words import byte_count, count, duration, formats, size

KINDS = ("fell back", "gained", "changed", "new", "removed")

_Key = tuple[str, str, str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One change that layers have in common.

    kind: see `KINDS`. names: full module paths. role: of the layers, now. gemms: "fprop", "dgrad", "wgrad",
    those that changed. what: which of precision, role, formats, kernel, reason and size it is, "" for new and
    removed. before, after: its values, "" where there was or is none. reason: for the present precision.
    """

    kind: str
    names: tuple[str, ...]
    role: str
    gemms: tuple[str, ...]
    what: str
    before: str
    after: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Everything that changed.

    changes: those of layers, by kind. words: the precisions of both reports, as texts say them. old, new: the
    summaries.
    """

    changes: tuple[Change, ...]
    words: str
    old: Summary
    new: Summary

    @property
    def fell_back(self) -> tuple[str, ...]:
        """Names of the layers with a GEMM that was quantized and is in BF16."""
        found = (name for change in self.changes if change.kind == "fell back" for name in change.names)
        return tuple(dict.fromkeys(found))

    @property
    def share_drop(self) -> float:
        """By how much the quantized share of the FLOPs fell, 0 to 1; negative if it rose."""
        return self.old.flop_share - self.new.flop_share

    def __str__(self) -> str:
        lines = wrapped([_headline(self), *_facts(self)])
        if self.changes:
            lines += ["", drawn(fitted(_table(self.changes), ("layer", "change", "reason")))]
        return "\n".join(lines)

    def to_markdown(self) -> str:
        """For a pull request."""
        parts = [f"### {markdown(_headline(self))}", bullets(_facts(self))]
        if self.changes:
            parts.append(markdown_table(_table(self.changes)))
        return "\n\n".join(part for part in parts if part) + "\n"


def compare(old: Report, new: Report) -> Difference:
    """What changed from `old` to `new`."""
    before, after = dict(_keyed(old.gemms)), dict(_keyed(new.gemms))
    found: dict[tuple[str, ...], dict[str, set[str]]] = {}
    for key in dict.fromkeys((*after, *before)):
        name, _, kind, _ = key
        for alike in _changes(before.get(key), after.get(key)):
            found.setdefault(alike, {}).setdefault(name, set()).add(kind)
    changes = [
        Change(
            kind=kind, names=tuple(names), role=role, gemms=gemms, what=what, before=a, after=b, reason=reason
        )
        for (role, kind, what, a, b, reason), layers in found.items()
        for gemms, names in _by_gemms(layers)
    ]
    first = {name: position for position, name in reversed([*enumerate(key[0] for key in (*after, *before))])}
    changes.sort(key=lambda change: (KINDS.index(change.kind), first[change.names[0]]))
    words = labels(gemm.precision for gemm in (*old.gemms, *new.gemms))
    return Difference(changes=tuple(changes), words=words, old=old.summary, new=new.summary)


def _keyed(gemms: Iterable[GemmRecord]) -> Iterator[tuple[_Key, GemmRecord]]:
    seen: dict[tuple[str, str, str], int] = {}
    for gemm in gemms:
        product = gemm.role if gemm.role in ATTENTION_PRODUCTS else ""
        which = gemm.name, product, gemm.gemm
        seen[which] = seen.get(which, -1) + 1
        yield (*which, seen[which]), gemm


def _by_gemms(layers: dict[str, set[str]]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """The layers by which of their GEMMs changed."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, gemms in layers.items():
        ordered = tuple(gemm for gemm in ("fprop", "dgrad", "wgrad") if gemm in gemms)
        groups.setdefault(ordered, []).append(name)
    yield from groups.items()


_FIELDS: dict[str, Callable[[GemmRecord], str]] = {
    "role": lambda gemm: gemm.role,
    "formats": lambda gemm: formats(gemm.formats),
    "kernel": lambda gemm: gemm.kernel,
    "reason": lambda gemm: gemm.reason,
    "size": size,
}


def _changes(old: GemmRecord | None, new: GemmRecord | None) -> Iterator[tuple[str, ...]]:
    """role, kind, what, before, after and reason of every change from `old` to `new`."""
    if new is None:
        assert old is not None
        yield old.role, "removed", "", old.precision, "", ""
    elif old is None:
        yield new.role, "new", "", "", new.precision, new.reason
    elif old.precision != new.precision:
        before, after = is_quantized(old.precision), is_quantized(new.precision)
        kind = "changed" if before and after else "gained" if after else "fell back"
        yield new.role, kind, "precision", old.precision, new.precision, new.reason
    else:
        for what, value in _FIELDS.items():
            if value(old) != value(new):
                reason = "" if what == "reason" else new.reason
                yield new.role, "changed", what, value(old), value(new), reason


def _headline(found: Difference) -> str:
    lost = len(found.fell_back)
    if lost:
        return f"{count(lost, 'layer')} fell back from {found.words}"
    return f"no layer fell back from {found.words}" if found.changes else "the same for every layer"


def _facts(found: Difference) -> list[str]:
    """The numbers of the summary that changed."""
    old, new = found.old, found.new
    pairs: list[tuple[str, str, str]] = [
        ("target", old.target, new.target),
        ("policy", old.policy, new.policy),
        (f"matmul FLOPs in {found.words}", f"{old.flop_share:.1%}", f"{new.flop_share:.1%}"),
        ("GEMMs", str(old.num_gemms), str(new.num_gemms)),
        ("saved for backward", _bytes(old.saved_bytes), _bytes(new.saved_bytes)),
        ("weights of linear layers", _bytes(old.weight_bytes), _bytes(new.weight_bytes)),
        ("copies of weights kept", byte_count(old.cached_bytes), byte_count(new.cached_bytes)),
        ("casts in each run", f"{old.casts:,}", f"{new.casts:,}"),
        ("sent by each rank", byte_count(old.wire_bytes), byte_count(new.wire_bytes)),
        ("graphs", str(old.graphs), str(new.graphs)),
        ("graph breaks", str(old.graph_breaks), str(new.graph_breaks)),
        ("roofline estimate", _estimate(old.estimate_us), _estimate(new.estimate_us)),
    ]
    facts = [f"{what}: {before} → {after}" for what, before, after in pairs if before != after]
    gone = [f"no longer warned: {warning}" for warning in old.warnings if warning not in new.warnings]
    return (
        facts + [f"new warning: {warning}" for warning in new.warnings if warning not in old.warnings] + gone
    )


def _bytes(number: int | None) -> str:
    return "nothing" if number is None else byte_count(number)


def _estimate(us: float | None) -> str:
    return "none" if us is None else duration(us)


def _table(changes: Iterable[Change]) -> Table:
    table = [["", "layer", "", "role", "GEMMs", "change", "reason"]]
    for change in changes:
        what = f"{change.what}: " if change.kind == "changed" else ""
        arrow = " → " if change.before and change.after else ""
        empty = "" if change.before or change.after else "–"
        table.append(
            [
                change.kind,
                spelled(change.names) or "(root)",
                f"×{len(change.names)}" if len(change.names) > 1 else "",
                change.role,
                "all" if len(change.gemms) == 3 else ", ".join(change.gemms),
                f"{what}{change.before}{arrow}{change.after}{empty}",
                change.reason,
            ]
        )
    return table
