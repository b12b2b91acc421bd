"""The changes between two reports of a model.

GEMMs are matched by layer name and kind, the n-th of one report with the n-th of the other. The two products
of an attention are also matched by role. A GEMM fell back if it was quantized and is BF16 now. A GEMM in one
report only is new or removed, never a fallback. Layers with equal changes form one change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from mxcompile.formats import is_quantized, labels
from mxcompile.policy import ATTENTION_PRODUCTS
from mxcompile.report.data.fold import spelled
from mxcompile.report.data.record import GemmRecord, ReportData, Summary
from mxcompile.report.forms.figures import differences
from mxcompile.report.forms.tables import Table, markdown_page, page
from mxcompile.report.forms.words import count, formats, listed, size

KINDS = ("fell back", "gained", "changed", "new", "removed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One change that several layers share.

    kind: see `KINDS`. names: full module paths. role: role of the layers in the new report. gemms: "fprop",
    "dgrad", "wgrad", the GEMMs that changed. what: the changed field (precision, role, formats, kernel,
    reason or size), "" for new and removed layers. before, after: values of the field, "" where a report
    lacks it. code: code of the reason for the new precision (see `mxcompile.policy.Reason`). reason: the
    reason of the first layer, and the number of layers with other reasons.
    """

    kind: str
    names: tuple[str, ...]
    role: str
    gemms: tuple[str, ...]
    what: str
    before: str
    after: str
    code: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """All changes between two reports, and their forms: ``str(difference)`` is the text.

    changes: changes of layers, sorted by kind. words: names of the precisions in both reports, for texts.
    old, new: the summaries. is_unrelated: whether both reports have layers but share none.
    """

    changes: tuple[Change, ...]
    words: str
    old: Summary
    new: Summary
    is_unrelated: bool = False

    @property
    def fell_back(self) -> tuple[str, ...]:
        """Names of layers with a GEMM that was quantized in the old report and is BF16 in the new report."""
        names = (name for change in self.changes if change.kind == "fell back" for name in change.names)
        return tuple(dict.fromkeys(names))

    @property
    def share_drop(self) -> float:
        """Decrease of the quantized share of the FLOPs, −1 to 1; negative if the share rose."""
        return self.old.flop_share - self.new.flop_share

    def __str__(self) -> str:
        return page(self._sentences(), (_table(self.changes), ("layer", "change", "reason")))

    def to_markdown(self) -> str:
        """Returns the changes as Markdown, for a pull request."""
        return markdown_page(self._sentences(), _table(self.changes))

    @property
    def _headline(self) -> str:
        if self.is_unrelated:
            return "no layer in common: these reports are of different models, or all modules have new names"
        if lost := len(self.fell_back):
            return f"{count(lost, 'layer')} fell back from {self.words}"
        return f"no layer fell back from {self.words}" if self.changes else "the same for every layer"

    def _sentences(self) -> list[str]:
        """Returns the headline, each figure of the summary that changed, and new or removed warnings."""
        old, new = self.old, self.new
        pairs = [
            ("target", old.target, new.target),
            ("policy", old.policy, new.policy),
            (f"matmul FLOPs in {self.words}", f"{old.flop_share:.1%}", f"{new.flop_share:.1%}"),
            ("GEMMs", str(old.num_gemms), str(new.num_gemms)),
        ]
        return [
            self._headline,
            *(f"{word}: {before} → {after}" for word, before, after in pairs if before != after),
            *differences(old, new),
            *(f"new warning: {warning}" for warning in new.warnings if warning not in old.warnings),
            *(f"no longer warned: {warning}" for warning in old.warnings if warning not in new.warnings),
        ]


_Key = tuple[str, str, str, int]


def compare(old: ReportData, new: ReportData) -> Difference:
    """Returns the changes from `old` to `new`."""
    before, after = dict(_keyed(old.gemms)), dict(_keyed(new.gemms))
    groups: dict[tuple[str, ...], dict[str, set[str]]] = {}
    sentences: dict[tuple[str, ...], dict[str, None]] = {}
    for key in dict.fromkeys((*after, *before)):
        name, _, kind, _ = key
        now = after.get(key)
        for alike in _changes(before.get(key), now):
            groups.setdefault(alike, {}).setdefault(name, set()).add(kind)
            reason = now.reason if now is not None and alike[-1] else ""  # "" if it is the field that changed
            sentences.setdefault(alike, {})[reason] = None
    changes = []
    for alike, layers in groups.items():
        role, kind, field, a, b, code = alike
        by_gemms: dict[tuple[str, ...], list[str]] = {}
        for name, changed in layers.items():
            ordered = tuple(gemm for gemm in ("fprop", "dgrad", "wgrad") if gemm in changed)
            by_gemms.setdefault(ordered, []).append(name)
        changes += [
            Change(
                kind=kind,
                names=tuple(alike_names),
                role=role,
                gemms=gemms,
                what=field,
                before=a,
                after=b,
                code=code,
                reason=listed([*sentences[alike]], 1),
            )
            for gemms, alike_names in by_gemms.items()
        ]
    first = {name: position for position, name in reversed([*enumerate(key[0] for key in (*after, *before))])}
    changes.sort(key=lambda change: (KINDS.index(change.kind), first[change.names[0]]))
    words = labels(gemm.precision for gemm in (*old.gemms, *new.gemms))
    names = [{key[0] for key in keys} for keys in (before, after)]
    return Difference(
        changes=tuple(changes),
        words=words,
        old=old.summary,
        new=new.summary,
        is_unrelated=all(names) and names[0].isdisjoint(names[1]),
    )


def _keyed(gemms: Iterable[GemmRecord]) -> Iterator[tuple[_Key, GemmRecord]]:
    seen: dict[tuple[str, str, str], int] = {}
    for gemm in gemms:
        product = gemm.role if gemm.role in ATTENTION_PRODUCTS else ""
        which = gemm.name, product, gemm.gemm
        seen[which] = seen.get(which, -1) + 1
        yield (*which, seen[which]), gemm


_FIELDS: dict[str, Callable[[GemmRecord], str]] = {
    "role": lambda gemm: gemm.role,
    "formats": lambda gemm: formats(gemm.formats),
    "kernel": lambda gemm: gemm.kernel,
    "reason": lambda gemm: gemm.reason,
    "size": size,
}


def _changes(old: GemmRecord | None, new: GemmRecord | None) -> Iterator[tuple[str, ...]]:
    """Yields (role, kind, field, before, after, code of the reason) for every change from `old` to `new`."""
    if new is None:
        assert old is not None
        yield old.role, "removed", "", old.precision, "", ""
    elif old is None:
        yield new.role, "new", "", "", new.precision, _code(new)
    elif old.precision != new.precision:
        before, after = is_quantized(old.precision), is_quantized(new.precision)
        kind = "changed" if before and after else "gained" if after else "fell back"
        yield new.role, kind, "precision", old.precision, new.precision, _code(new)
    else:
        for field, value in _FIELDS.items():
            if value(old) != value(new):
                code = "" if field == "reason" else _code(new)
                yield new.role, "changed", field, value(old), value(new), code


def _code(gemm: GemmRecord) -> str:
    """Returns the code by which reasons are grouped, or the sentence if the file has no codes."""
    return gemm.code or gemm.reason


def _table(changes: Iterable[Change]) -> Table:
    table = [["", "layer", "", "role", "GEMMs", "change", "reason"]]
    for change in changes:
        field = f"{change.what}: " if change.kind == "changed" else ""
        arrow = " → " if change.before and change.after else ""
        empty = "" if change.before or change.after else "–"
        table.append(
            [
                change.kind,
                spelled(change.names) or "(root)",
                f"×{len(change.names)}" if len(change.names) > 1 else "",
                change.role,
                "all" if len(change.gemms) == 3 else ", ".join(change.gemms),
                f"{field}{change.before}{arrow}{change.after}{empty}",
                change.reason,
            ]
        )
    return table
