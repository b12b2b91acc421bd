"""`Report`: everything that was done to the matmuls of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mxcompile.errors import OptionError
from mxcompile.report import files, schema
from mxcompile.report.diff import Difference, compare
from mxcompile.report.forms import FORMS, framed
from mxcompile.report.forms.json import to_json
from mxcompile.report.forms.text import headline, to_text
from mxcompile.report.merge import merge, of_twins, outside, together, with_plan, work_of
from mxcompile.report.outline import Outline
from mxcompile.report.reasons import Reasons, reasons
from mxcompile.report.record import SCHEMA, GemmRecord, Part, ReportData, Summary, flop_share


@dataclass(frozen=True, kw_only=True, slots=True)
class Report(ReportData):
    """One record per GEMM and attention product, none missing, and a summary.

    ``str(report)`` is the text form with equal layers folded; `save` writes the form its suffix names.
    """

    @classmethod
    def of(
        cls,
        parts: Sequence[Part],
        *,
        target: str,
        policy: str,
        planned: Sequence[GemmRecord] = (),
        notes: Sequence[str] = (),
    ) -> Report:
        """The report of a model compiled as several graphs, one part each.

        planned: all its GEMMs, of which those in no part are in the report as not compiled yet. notes:
        warnings beside those of the parts.
        """
        compiled = tuple(
            dataclasses.replace(gemm, graph=index) for index, part in enumerate(parts) for gemm in part.gemms
        )
        compiled += tuple(of_twins(parts, compiled))
        gemms = with_plan(compiled, planned, graph=len(parts))
        pending = (Outline(),) if len(gemms) > len(compiled) else ()
        return cls(
            gemms=gemms,
            graph=(*(part.outline for part in parts), *pending),
            summary=Summary(
                target=target,
                policy=policy,
                num_gemms=len(gemms),
                flop_share=flop_share(gemms),
                **work_of(parts),
                pass_time_us=sum(part.pass_time_us for part in parts),
                graphs=len(parts),
                graph_breaks=sum(part.graph_breaks for part in parts),
                cache=together(part.cache for part in parts),
                warnings=(
                    *notes,
                    *dict.fromkeys(w for part in parts for w in part.warnings),
                    *outside(gemms),
                ),
            ),
        )

    @classmethod
    def merged(cls, reports: Sequence[Report]) -> Report:
        """One report of several of one model (ranks, pipeline stages): every layer is in it once.

        Of equal layers the first report's stands; reports that add nothing do not count in the summary.
        Raises `OptionError` for none, and for reports of different targets or policies.
        """
        contents = [(one.gemms, one.graph) for one in reports]
        gemms, summary, graph = merge([one.summary for one in reports], contents)
        return cls(gemms=tuple(gemms), summary=summary, graph=tuple(graph))

    def __str__(self) -> str:
        return to_text(self)

    def __repr__(self) -> str:
        """Returns one line, for lists of reports and prompts."""
        return f"<{headline(self)}>"

    def _repr_html_(self) -> str:
        """Returns the page in a frame, for notebooks."""
        return framed(FORMS[".html"](self))

    def to_json(self) -> str:
        """The report as JSON, with its kind and the version of its form; `from_json` reads it back."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report `to_json` wrote. Raises `OptionError` with the JSON path of the fault."""
        report = schema.read(cls, schema.opened(text, "report", SCHEMA))
        for number, outline in enumerate(report.graph):
            fault = outline.fault()
            if fault:
                raise OptionError(f"$.graph[{number}]{fault}")
        return report

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """The report kept in the JSON file `path`. Raises `OptionError` that names file and JSON path."""
        return files.load(path, "report", cls.from_json)

    def why(self, layer: str = "*") -> tuple[Reasons, ...]:
        """Returns the evidence for the roles of the layers that the glob `layer` fits, equal layers folded.

        layer: over whole names, as a policy has it; ``re:`` and a regular expression are allowed too.
        Raises `OptionError` if it fits no layer, with the names that come nearest.
        """
        return reasons(self.gemms, layer)

    def since(self, old: ReportData) -> Difference:
        """Returns the changes from the report `old` to this one."""
        return compare(old, self)

    def save(self, path: str | Path) -> None:
        """Write the report to `path` in the form of its suffix (see `FORMS`), whole or not at all.

        Raises `OptionError` if the file cannot be written.
        """
        files.save(path, form_of(path)(self), "report")


def form_of(path: str | Path) -> Callable[[ReportData], str]:
    """Returns the writer for `path`. Raises `OptionError` for a suffix without one."""
    return files.form_of(path, FORMS, "report")
