"""`RankReport`: GEMMs, shards, collectives, memory and step time of one rank of a mesh."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from mxcompile.mesh.collectives import Collective
from mxcompile.mesh.memory import Memory, MemoryBreakdown
from mxcompile.mesh.shards import Shard
from mxcompile.policy import Gemm
from mxcompile.report import Report, files
from mxcompile.report.data.fold import grouped, spelled
from mxcompile.report.forms.tables import Table, drawn, fitted, wrapped
from mxcompile.report.forms.words import byte_count, count

if TYPE_CHECKING:
    from mxcompile.mesh.pipeline import Pipeline
    from mxcompile.mesh.time import StepTime

SCHEMA = 1
"""Version of the JSON format."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport(files.Document):
    """Rank 0 of a mesh. `explain_rank` returns it; ``print`` shows it as text, `save` writes .txt or .json.

    Attributes:
        mesh: Axes and their sizes.
        ranks: Number of ranks.
        report: Report of the graphs that this rank compiles, with the sizes of its shards.
        memory: Bytes that this rank holds in a step.
        shards: GEMMs that this rank computes in part, or whose decision differs from the whole model's.
        collectives: One entry for each collective in which this rank takes part in a step.
        time: Estimated step time, if link speeds were given.
        pipeline: All ranks of the pipeline, if the mesh has stages. The report then covers its slowest rank.
        warnings: Warnings for the user.
    """

    mesh: str
    ranks: int
    report: Report
    memory: Memory
    shards: tuple[Shard, ...] = ()
    collectives: tuple[Collective, ...] = ()
    time: StepTime | None = None
    pipeline: Pipeline | None = None
    warnings: tuple[str, ...] = ()

    NOUN = "rank report"
    FORMS: ClassVar[Mapping[str, Callable[[Any], str]]] = {
        ".txt": "{}\n".format,
        ".json": lambda report: report.to_json(),
    }

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank contributes to the collectives of a step."""
        return sum(collective.num_bytes for collective in self.collectives)

    def __str__(self) -> str:
        title = f"one rank of {self.mesh} ({count(self.ranks, 'rank')})"
        notes = wrapped(f"warning: {warning}" for warning in self.warnings)
        parts = str(self.report), self._shards(), self._collectives(), self._memory()
        step = (str(part) for part in (self.pipeline, self.time) if part is not None)
        return "\n\n".join(["\n".join([title, *notes]), *parts, *step])

    def _memory(self) -> str:
        memory = self.memory
        always = {"parameters": memory.parameters, "optimizer": memory.optimizer}
        phases = {
            "forward": memory.forward,
            "loss": memory.loss,
            "backward": memory.backward,
            "optimizer's step": memory.update,
        }
        peaks = {phase: peak for phase, peak in phases.items() if peak.total}
        rows = [[name, *[byte_count(size)] * len(peaks)] for name, size in always.items()]
        rows += [
            [field.name, *(byte_count(getattr(peak, field.name)) for peak in peaks.values())]
            for field in dataclasses.fields(MemoryBreakdown)
        ]
        rows += [["together", *(byte_count(sum(always.values()) + peak.total) for peak in peaks.values())]]
        table = drawn([["this rank holds at most", *peaks], *rows])
        return f"{table}\noptimizer: as AdamW, in the dtypes of the parameters"

    def _shards(self) -> str:
        if not self.shards:
            return "no GEMM is split over ranks"
        head = ["layer", "GEMM", "whole m×n×k", "this rank m×n×k", "note"]
        alike: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
        for shard in self.shards:
            if shard.gemm != Gemm.FPROP and not shard.notes:
                continue  # its sizes follow from fprop's
            whole, local = ("×".join(map(str, size)) for size in (shard.whole, shard.local))
            notes = [*shard.notes]
            if shard.experts is not None:
                notes.insert(0, "{} of {} experts".format(*shard.experts))
            alike[shard.gemm, whole, local, "; ".join(notes), shard.role].append(shard.name)
        rows = [[spelled(names), *key[:4]] for key, names in alike.items()]
        return "shards\n" + drawn(fitted([head, *rows], ("layer", "note")))

    def _collectives(self) -> str:
        if not self.collectives:
            return "this rank sends nothing in a step"
        head = ["collective", "of", "modules", "phase", "axis", "dtype", "each", "times", "total"]
        alike = grouped(
            self.collectives, lambda c: (c.kind, c.what, c.phase, c.axis, c.ranks, c.dtype, c.num_bytes)
        )
        rows = [
            [
                *(same[0].kind, same[0].what),
                spelled(dict.fromkeys(collective.name or "(root)" for collective in same)),
                *(same[0].phase, f"{same[0].axis} ({same[0].ranks})", same[0].dtype),
                *(byte_count(same[0].num_bytes), str(len(same)), byte_count(sum(c.num_bytes for c in same))),
            ]
            for same in alike.values()
        ]
        return (
            f"collectives of a step: this rank gives {_beside(self.collectives)}\n"
            f"{drawn(fitted([head, *rows], ('modules',)))}\n\n{drawn(self._sums())}"
        )

    def _sums(self) -> Table:
        by_kind = grouped(self.collectives, lambda c: (c.kind, c.what, c.axis))
        rows = [[*kind, str(len(same)), _beside(same)] for kind, same in sorted(by_kind.items())]
        return [["collective", "of", "axis", "times", "this rank gives"], *rows]

    def to_json(self) -> str:
        """Returns the report as JSON, with its kind and schema version."""
        data = {
            "kind": "rank",
            "schema": SCHEMA,
            "mesh": self.mesh,
            "ranks": self.ranks,
            "warnings": self.warnings,
            "memory": {**dataclasses.asdict(self.memory), "total": self.memory.total},
            "shards": [dataclasses.asdict(shard) for shard in self.shards],
            "collectives": [dataclasses.asdict(collective) for collective in self.collectives],
            **({} if self.time is None else {"time": self.time.as_data()}),
            **({} if self.pipeline is None else {"pipeline": self.pipeline.as_data()}),
            "report": json.loads(self.report.to_json()),
        }
        return json.dumps(data, indent=1)


def _beside(collectives: Sequence[Collective]) -> str:
    """Returns the bytes of `collectives`, and the bytes without mxcompile if they differ."""
    total, without = (sum(getattr(c, name) for c in collectives) for name in ("num_bytes", "without_bytes"))
    more = "" if total == without else f", without mxcompile {byte_count(without)} ({total / without:.0%})"
    return f"{byte_count(total)}{more}"
