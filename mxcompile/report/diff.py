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
from mxcompile.report.data.change import KINDS, Change, Changes
from mxcompile.report.data.record import GemmRecord, ReportData
from mxcompile.report.forms.changes import to_markdown, to_text
from mxcompile.report.forms.words import formats, size

_Key = tuple[str, str, str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference(Changes):
    """All changes between two reports, and their forms: ``str(difference)`` is the text."""

    def __str__(self) -> str:
        return to_text(self)

    def to_markdown(self) -> str:
        """Returns the changes as Markdown, for a pull request."""
        return to_markdown(self)


def compare(old: ReportData, new: ReportData) -> Difference:
    """Returns the changes from `old` to `new`."""
    before, after = dict(_keyed(old.gemms)), dict(_keyed(new.gemms))
    groups: dict[tuple[str, ...], dict[str, set[str]]] = {}
    sentences: dict[tuple[str, ...], dict[str, None]] = {}
    for key in dict.fromkeys((*after, *before)):
        name, _, kind, _ = key
        for alike in _changes(before.get(key), after.get(key)):
            groups.setdefault(alike, {}).setdefault(name, set()).add(kind)
            sentences.setdefault(alike, {})[_sentence(after.get(key), alike)] = None
    changes = [
        Change(
            kind=kind,
            names=tuple(names),
            role=role,
            gemms=gemms,
            what=field,
            before=a,
            after=b,
            code=code,
            reason=_joined(sentences[role, kind, field, a, b, code]),
        )
        for (role, kind, field, a, b, code), layers in groups.items()
        for gemms, names in _by_gemms(layers)
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


def _by_gemms(layers: dict[str, set[str]]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Yields the layers, grouped by the GEMMs that changed."""
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


def _sentence(gemm: GemmRecord | None, alike: tuple[str, ...]) -> str:
    """Returns the reason of `gemm`; "" if the reason is the field that changed."""
    return "" if gemm is None or not alike[-1] else gemm.reason


def _joined(sentences: Iterable[str]) -> str:
    first, *others = sentences
    return f"{first} and {len(others)} more" if others else first
