"""Merges the records of graphs and ranks into one report with each layer once.

A recompile of a graph (another shape, another process) repeats the records of its layers: the records of the
latest compile are kept, and a compile whose records were all replaced does not count in the summary. Two
records of a layer are both kept if their precision differs, or if one has a single row and the other more
(decode and prefill: Dynamo never compiles one graph for both). A layer that a graph calls twice has the
records of both calls. Planned layers without a compiled graph keep their planned records.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from mxcompile.errors import OptionError
from mxcompile.formats import is_quantized
from mxcompile.policy import Code
from mxcompile.report.data.fold import fold
from mxcompile.report.data.outline import Outline
from mxcompile.report.data.record import NOT_COMPILED, GemmRecord, Part, ReportData, Summary, flop_share
from mxcompile.report.forms.words import listed

_OUTSIDE = "not compiled yet, or run outside of compiled code:"
_OUTSIDE_OF_SOME = f"compiled in some of the merged reports; in others {_OUTSIDE}"
_NAMED = 4
_Key = tuple[str, str, str, str, str, bool]
_Number = TypeVar("_Number", int, float)


def _record_key(gemm: GemmRecord) -> _Key:
    """Returns a key, equal for records of one product; products of a layer differ in their source line."""
    return gemm.name, gemm.role, gemm.gemm, gemm.source, gemm.precision, gemm.m == 1


def _gemm_key(gemm: GemmRecord) -> tuple[str, str, bool]:
    """Returns a key that is equal for the records of one GEMM of a layer in any precision."""
    return gemm.name, gemm.gemm, gemm.m == 1


def _direction_key(gemm: GemmRecord) -> tuple[str, bool]:
    """Returns a key that is equal for the forward GEMM of a layer, and for its two backward GEMMs."""
    return gemm.name, gemm.gemm == "fprop"


def latest(compiles: Sequence[tuple[object, Sequence[Part]]]) -> tuple[Part, ...]:
    """Returns the parts of `compiles` without records that a later compile of the same frame repeats.

    compiles: (frame, parts) pairs, oldest first; frame is None if unknown. Parts whose records were all
    removed are left out. If a watch moved a GEMM to BF16, its earlier records are removed too.
    """
    keys_of: dict[object, set[_Key]] = {}
    fallen: set[tuple[str, str]] = set()
    kept: list[Part] = []
    for frame, parts in reversed(compiles):
        later = keys_of.setdefault(frame, set())
        for part in reversed(parts):
            stands = tuple(
                gemm
                for gemm in part.gemms
                if (frame is None or _record_key(gemm) not in later) and (gemm.name, gemm.gemm) not in fallen
            )
            if stands or not part.gemms:
                kept.append(dataclasses.replace(part, gemms=stands))
        later.update(_record_key(gemm) for part in parts for gemm in part.gemms)
        fallen.update(
            (gemm.name, gemm.gemm) for part in parts for gemm in part.gemms if gemm.code == Code.WATCH
        )
    return tuple(reversed(kept))


def of_twins(parts: Sequence[Part], gemms: Iterable[GemmRecord]) -> Iterator[GemmRecord]:
    """Yields the records of modules that run code compiled for another module, from the last compile.

    If a layer has records of its own for its forward or its backward, they replace the twin's.
    """
    compiled, covered = {_direction_key(gemm) for gemm in gemms}, set[tuple[str, str, bool]]()
    for index, part in reversed([*enumerate(parts)]):
        copies = [
            dataclasses.replace(gemm, name=part.name_in(path, gemm.name), block=block, graph=index)
            for path, block in part.twins
            for gemm in part.gemms
        ]
        yield from (
            copy for copy in copies if _direction_key(copy) not in compiled and _gemm_key(copy) not in covered
        )
        covered |= {_gemm_key(copy) for copy in copies}


def figures_of(parts: Sequence[Part]) -> dict[str, Any]:
    """Returns the figures of the summary: work per training step, or per call if no part trains, and sums.

    Modules that run the code of another module count too. A weight that several graphs read, and a layer that
    several graphs compute, count once.
    """
    training = [part for part in parts if part.saved_bytes is not None] or list(parts)
    per_run = [(part, len(paths)) for part, paths in _running(training)]
    once = [(part, 1) for part in parts]
    weights: dict[str, list[int]] = {}
    for part, paths in _running(parts, every=True):
        for path in paths:
            weights |= {part.name_in(path, name): sizes for name, *sizes in part.weights}
    figures: dict[str, Any] = {
        "weight_bytes": sum(size for size, _, _ in weights.values()),
        "weight_bytes_bf16": sum(in_bf16 for _, in_bf16, _ in weights.values()),
        "weight_bytes_quantized": sum(quantized for _, _, quantized in weights.values()),
    }
    for field in dataclasses.fields(Part):
        if field.metadata:
            times = per_run if field.metadata["figure"].per_run else once
            values = [(getattr(part, field.name), n) for part, n in times]
            sums = total(n * value for value, n in values if value is not None)
            figures[field.name] = field.default if sums is None else sums
    return figures


def _running(parts: Sequence[Part], *, every: bool = False) -> Iterator[tuple[Part, list[str]]]:
    """Yields the parts, latest first, with the paths of the modules that run their code.

    A layer counts for the last part that computes it, and for its own part before another module's. `every`
    lists all modules of each part instead.
    """
    all_names = {gemm.name for part in parts for gemm in part.gemms}
    covered: set[str] = set()
    for part in reversed(parts):
        names = {gemm.name for gemm in part.gemms}
        is_new = not names or "" in names or bool(names - covered)  # unnamed layers cannot be compared
        paths = [part.prefix] if every or is_new else []
        covered |= names
        for path, _block in part.twins:
            moved = {part.name_in(path, name) for name in names}
            if not moved & all_names and (moved if every else moved - covered):
                paths.append(path)
                covered |= moved
        yield part, paths


def with_plan(
    gemms: Iterable[GemmRecord], planned: Sequence[GemmRecord], graph: int
) -> tuple[GemmRecord, ...]:
    """Returns `gemms` and the records of `planned` that they lack, in the order of the plan.

    A layer with one of its two gradients in a compiled graph lacks nothing: the other gradient may not be
    needed. graph: graph index of the added records.
    """
    gemms = tuple(gemms)
    if not planned:
        return gemms
    compiled = {_direction_key(gemm) for gemm in gemms}
    missing = (gemm for gemm in planned if _direction_key(gemm) not in compiled)
    pending = tuple(dataclasses.replace(gemm, kernel=NOT_COMPILED, graph=graph) for gemm in missing)
    order = {name: index for index, name in enumerate(dict.fromkeys(gemm.name for gemm in planned))}
    return tuple(sorted((*gemms, *pending), key=lambda gemm: order.get(gemm.name, len(order))))


def outside(gemms: Iterable[GemmRecord], words: str = _OUTSIDE) -> tuple[str, ...]:
    """Returns a warning about the layers of `gemms` that shall be quantized and are in no compiled graph.

    These layers were not called yet, or Dynamo runs them in eager mode, for example in a loop it cannot
    trace. words: the warning without the names of the layers.
    """
    pending = (gemm for gemm in gemms if gemm.kernel == NOT_COMPILED and is_quantized(gemm.precision))
    rows = fold(dataclasses.replace(gemm, source="") for gemm in pending)
    names: dict[str, None] = {}
    for row in rows:
        kinds = dict.fromkeys(gemm.gemm for gemm in row.gemms)
        names[row.name if "fprop" in kinds else f"{row.name} ({', '.join(kinds)})"] = None
    return (f"{words} {listed([*names], _NAMED)}",) if names else ()


def merge(reports: Sequence[ReportData]) -> tuple[list[GemmRecord], Summary, list[Outline]]:
    """Returns the records, summary and outlines of several reports as one.

    Of equal records the first is kept, compiled before planned. The warnings of all reports are kept. Raises
    `OptionError` if targets or policies differ.
    """
    if not reports:
        raise OptionError("nothing to merge: give at least one report")
    for field in ("target", "policy"):
        values = list(dict.fromkeys(getattr(report.summary, field) for report in reports))
        if len(values) > 1:
            raise OptionError(
                f"these reports cannot be merged: reports of one model have one {field}, found"
                f" {', '.join(map(repr, values))}"
            )
    every = [gemm for report in reports for gemm in report.gemms]
    compiled = {(gemm.name, gemm.gemm) for gemm in every if gemm.kernel != NOT_COMPILED}
    pending = {(gemm.name, gemm.gemm): gemm for gemm in every if gemm.kernel == NOT_COMPILED}
    keys: set[_Key] = set()
    gemms: list[GemmRecord] = []
    graphs: list[Outline] = []
    counted: list[Summary] = []
    for report in reports:
        stands = [
            gemm
            for gemm in report.gemms
            if _record_key(gemm) not in keys
            and (gemm.kernel != NOT_COMPILED or (gemm.name, gemm.gemm) not in compiled)
        ]
        keys.update(map(_record_key, stands))
        if stands or not report.gemms:
            gemms += [dataclasses.replace(gemm, graph=gemm.graph + len(graphs)) for gemm in stands]
            graphs += report.graph
            counted.append(report.summary)
    of_all = dict.fromkeys(warning for report in reports for warning in report.summary.warnings)
    warnings = [warning for warning in of_all if not warning.startswith(_OUTSIDE)]
    of_some = outside((gemm for key, gemm in pending.items() if key in compiled), _OUTSIDE_OF_SOME)
    fields: dict[str, Any] = {
        "target": counted[0].target,
        "policy": counted[0].policy,
        "num_gemms": len(gemms),
        "flop_share": flop_share(gemms),
        "cache": together(s.cache for s in counted),
        "warnings": (*warnings, *of_some, *outside(gemms)),
        "estimate_us": total(gemm.estimate_us for gemm in gemms),
        "estimate_bf16_us": total(gemm.estimate_bf16_us for gemm in gemms),
    }
    sums = {field.name for field in dataclasses.fields(Summary)} - fields.keys()
    fields |= {name: total(getattr(s, name) for s in counted) for name in sums}
    return gemms, Summary(**fields), graphs


def total(values: Iterable[_Number | None]) -> _Number | None:
    """Returns the sum of the values that are not None; None if all are."""
    numbers = [value for value in values if value is not None]
    return sum(numbers) if numbers else None


def together(states: Iterable[str]) -> str:
    """Returns the common state of the caches, "partial" if the states differ."""
    words = set(states)
    return words.pop() if len(words) == 1 else "partial" if words else "off"
