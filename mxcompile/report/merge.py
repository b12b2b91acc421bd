"""One report for one model: of many graphs, of many ranks, every layer once.

A graph that is compiled again (another shape, another process) says the same of the same layers; the records
of the latest compile stand, and a compile of which nothing stands does not count in the summary. Where it
does not say the same, both stand: another precision for another shape, and one row beside many (decode beside
prefill: Dynamo never covers both by one graph). A layer that a graph calls twice has the records of both
calls. Layers that are planned and not compiled yet come as planned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from mxcompile.errors import OptionError
from mxcompile.formats import is_quantized
from mxcompile.policy import Code
from mxcompile.report.fold import Row, fold
from mxcompile.report.outline import Outline
from mxcompile.report.record import NOT_COMPILED, GemmRecord, Part, Summary, flop_share

_OUTSIDE = "not compiled yet, or run outside of compiled code:"
_NAMED = 4
_Key = tuple[str, str, str, str, str, bool]
_Number = TypeVar("_Number", int, float)


def _key(gemm: GemmRecord) -> _Key:
    """Equal for records that say the same of one layer's GEMM; products are told apart by line."""
    return gemm.name, gemm.role, gemm.gemm, gemm.source, gemm.precision, gemm.m == 1


def _which(gemm: GemmRecord) -> tuple[str, str, bool]:
    """Equal for records of one layer's GEMM, in whatever precision."""
    return gemm.name, gemm.gemm, gemm.m == 1


def _half(gemm: GemmRecord) -> tuple[str, bool]:
    """Equal for the GEMMs of one layer's forward, and for those of its backward."""
    return gemm.name, gemm.gemm == "fprop"


def latest(compiles: Sequence[tuple[object, Sequence[Part]]]) -> tuple[Part, ...]:
    """The parts of `compiles` without the records that a later compile of the same frame repeats.

    compiles: frames, None for one that is not known, and their parts, oldest first. Parts left without a
    record are left out. Of a GEMM that a watch has put into BF16, no record from before stands.
    """
    known: dict[object, set[_Key]] = {}
    fallen: set[tuple[str, str]] = set()
    kept: list[Part] = []
    for frame, parts in reversed(compiles):
        later = known.setdefault(frame, set())
        for part in reversed(parts):
            stands = tuple(
                gemm
                for gemm in part.gemms
                if (frame is None or _key(gemm) not in later) and (gemm.name, gemm.gemm) not in fallen
            )
            if stands or not part.gemms:
                kept.append(dataclasses.replace(part, gemms=stands))
        later.update(_key(gemm) for part in parts for gemm in part.gemms)
        fallen.update(
            (gemm.name, gemm.gemm) for part in parts for gemm in part.gemms if gemm.code == Code.WATCH
        )
    return tuple(reversed(kept))


def of_twins(parts: Sequence[Part], own: Iterable[GemmRecord]) -> Iterator[GemmRecord]:
    """The records of modules that run code compiled for another, of every GEMM those of the last compile.

    Layers that have records of their own of the forward, or of the backward, keep these.
    """
    compiled, covered = {_half(gemm) for gemm in own}, set[tuple[str, str, bool]]()
    for index, part in reversed([*enumerate(parts)]):
        copies = [
            dataclasses.replace(
                gemm, name=path + gemm.name.removeprefix(part.prefix), block=block, graph=index
            )
            for path, block in part.twins
            for gemm in part.gemms
        ]
        yield from (copy for copy in copies if _half(copy) not in compiled and _which(copy) not in covered)
        covered |= {_which(copy) for copy in copies}


def work_of(parts: Sequence[Part]) -> dict[str, Any]:
    """The summary's figures of bytes and casts: of a step, or of a call where none trains.

    The work of modules that have no part of their own counts too. A weight that several graphs read counts
    once, and so does a layer that several graphs compute.
    """
    training = [part for part in parts if part.saved_bytes is not None] or list(parts)
    times = [(part, len(paths)) for part, paths in _running(training)]
    weights: dict[str, list[int]] = {}
    for part, paths in _running(parts, every=True):
        for path in paths:
            weights |= {path + name.removeprefix(part.prefix): sizes for name, *sizes in part.weights}
    return {
        "saved_bytes": total(n * part.saved_bytes for part, n in times if part.saved_bytes is not None),
        "saved_bytes_bf16": total(
            n * part.saved_bytes_bf16 for part, n in times if part.saved_bytes_bf16 is not None
        ),
        "weight_bytes": sum(held for held, _ in weights.values()),
        "weight_bytes_bf16": sum(in_bf16 for _, in_bf16 in weights.values()),
        "casts": sum(part.casts * n for part, n in times),
        "wire_bytes": sum(part.wire_bytes * n for part, n in times),
        "wire_bytes_bf16": sum(part.wire_bytes_bf16 * n for part, n in times),
    }


def _running(parts: Sequence[Part], *, every: bool = False) -> Iterator[tuple[Part, list[str]]]:
    """The parts, latest first, and the paths of the modules that run the code of each.

    A layer is of the last part that computes it, of a module's own before a twin's; with `every` of all.
    """
    own = {gemm.name for part in parts for gemm in part.gemms}
    covered: set[str] = set()
    for part in reversed(parts):
        names = {gemm.name for gemm in part.gemms}
        is_new = not names or "" in names or bool(names - covered)  # what has no name is not known again
        paths = [part.prefix] if every or is_new else []
        covered |= names
        for path, _block in part.twins:
            moved = {path + name.removeprefix(part.prefix) for name in names}
            if not moved & own and (moved if every else moved - covered):
                paths.append(path)
                covered |= moved
        yield part, paths


def with_plan(
    gemms: Iterable[GemmRecord], planned: Sequence[GemmRecord], graph: int
) -> tuple[GemmRecord, ...]:
    """`gemms`, and the records of `planned` whose name and GEMM they lack, in the order of the plan.

    A layer with one gradient in a compiled graph has all that it needs there. graph: position that records of
    the plan are given.
    """
    gemms = tuple(gemms)
    if not planned:
        return gemms
    compiled = {_half(gemm) for gemm in gemms}
    missing = (gemm for gemm in planned if _half(gemm) not in compiled)
    pending = tuple(dataclasses.replace(gemm, kernel=NOT_COMPILED, graph=graph) for gemm in missing)
    place = {name: index for index, name in enumerate(dict.fromkeys(gemm.name for gemm in planned))}
    return tuple(sorted((*gemms, *pending), key=lambda gemm: place.get(gemm.name, len(place))))


def outside(gemms: Iterable[GemmRecord]) -> tuple[str, ...]:
    """A warning about the layers in `gemms` that are to be quantized and that no compiled graph has; or none.

    They are yet to be called, or run where Dynamo left Python to itself: in a loop that it could not follow.
    """
    pending = (gemm for gemm in gemms if gemm.kernel == NOT_COMPILED and is_quantized(gemm.precision))
    rows = fold(dataclasses.replace(gemm, source="") for gemm in pending)
    names = list(dict.fromkeys(f"{row.name}{_gradients_alone(row)}" for row in rows))
    if not names:
        return ()
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (f"{_OUTSIDE} {', '.join(names[:_NAMED])}{more}",)


def _gradients_alone(row: Row) -> str:
    """Which GEMMs `row` has, if its forward is not one of them."""
    gemms = list(dict.fromkeys(gemm.gemm for gemm in row.gemms))
    return "" if "fprop" in gemms else f" ({', '.join(gemms)})"


def merge(
    summaries: Sequence[Summary], contents: Sequence[tuple[Sequence[GemmRecord], Sequence[Outline]]]
) -> tuple[list[GemmRecord], Summary, list[Outline]]:
    """One report of several, in their order: of equal records the first stands, compiled before planned.

    contents: records and graphs, by report. Raises `OptionError` if targets or policies differ.
    """
    _check_alike(summaries)
    compiled = {
        (gemm.name, gemm.gemm) for gemms, _ in contents for gemm in gemms if gemm.kernel != NOT_COMPILED
    }
    known: set[_Key] = set()
    gemms: list[GemmRecord] = []
    graphs: list[Outline] = []
    counted: list[Summary] = []
    for summary, (records, outlines) in zip(summaries, contents, strict=True):
        stands = [
            gemm
            for gemm in records
            if _key(gemm) not in known
            and (gemm.kernel != NOT_COMPILED or (gemm.name, gemm.gemm) not in compiled)
        ]
        known.update(map(_key, stands))
        if stands or not records:
            gemms += [dataclasses.replace(gemm, graph=gemm.graph + len(graphs)) for gemm in stands]
            graphs += outlines
            counted.append(summary)
    return gemms, _sum(counted, gemms), graphs


def _check_alike(summaries: Sequence[Summary]) -> None:
    if not summaries:
        raise OptionError("nothing to merge: give at least one report")
    for what in ("target", "policy"):
        values = list(dict.fromkeys(getattr(summary, what) for summary in summaries))
        if len(values) > 1:
            raise OptionError(
                f"these reports cannot be merged: reports of one model have one {what}, found"
                f" {', '.join(map(repr, values))}"
            )


def _sum(summaries: Sequence[Summary], gemms: Sequence[GemmRecord]) -> Summary:
    """`summaries` as one, `gemms` its records: every figure that is not of these is a sum."""
    first = summaries[0]
    warnings = dict.fromkeys(w for s in summaries for w in s.warnings if not w.startswith(_OUTSIDE))
    known: dict[str, Any] = {
        "target": first.target,
        "policy": first.policy,
        "num_gemms": len(gemms),
        "flop_share": flop_share(gemms),
        "cache": together(s.cache for s in summaries),
        "warnings": (*warnings, *outside(gemms)),
        "estimate_us": total(gemm.estimate_us for gemm in gemms),
        "estimate_bf16_us": total(gemm.estimate_bf16_us for gemm in gemms),
    }
    figures = {field.name for field in dataclasses.fields(Summary)} - known.keys()
    return Summary(**known | {name: total(getattr(s, name) for s in summaries) for name in figures})


def total(values: Iterable[_Number | None]) -> _Number | None:
    """The sum of what is known; None if nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def together(states: Iterable[str]) -> str:
    """Returns the state of the cache for all: one word if all have the same, "partial" if not."""
    words = set(states)
    return words.pop() if len(words) == 1 else "partial" if words else "off"
