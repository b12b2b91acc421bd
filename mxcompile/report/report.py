"""`Report`: the record of every matmul of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from mxcompile.errors import OptionError
from mxcompile.report import files
from mxcompile.report.data import schema
from mxcompile.report.data.outline import Outline
from mxcompile.report.data.record import SCHEMA, GemmRecord, Part, ReportData, Summary, flop_share
from mxcompile.report.diff import Difference, compare
from mxcompile.report.forms import FORMS, to_json
from mxcompile.report.forms.text import headline, to_text
from mxcompile.report.merge import figures_of, merge, of_twins, outside, together, with_plan
from mxcompile.report.reasons import Reasons, reasons


@dataclass(frozen=True, kw_only=True, slots=True)
class Report(ReportData, files.LoadedDocument):
    """One record per GEMM and attention product of a model, and a summary.

    ``str(report)`` is the text form with equal layers folded. `save` writes a file in the form of its suffix:
    ``.txt``, ``.md``, ``.json`` or ``.html``.
    """

    NOUN = "report"
    FORMS = FORMS

    @classmethod
    def from_parts(
        cls,
        parts: Sequence[Part],
        *,
        target: str,
        policy: str,
        planned: Sequence[GemmRecord] = (),
        notes: Sequence[str] = (),
    ) -> Report:
        """Returns the report of a model that was compiled as several graphs.

        Args:
            parts: one part per graph.
            target: name of the target.
            policy: name of the policy.
            planned: all GEMMs of the model; GEMMs in no part enter the report as not compiled yet.
            notes: warnings in addition to the warnings of the parts.
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
                **figures_of(parts),
                graphs=len(parts),
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
        """Merges reports of one model, for example of ranks or pipeline stages; each layer is in it once.

        Args:
            reports: the reports. For equal layers the record of the first report is kept. The figures of a
                report that adds no record do not count in the summary; its warnings stay.

        Raises:
            OptionError: if `reports` is empty, or if targets or policies differ.
        """
        gemms, summary, graph = merge(reports)
        return cls(gemms=tuple(gemms), summary=summary, graph=tuple(graph))

    def __str__(self) -> str:
        return to_text(self)

    def __repr__(self) -> str:
        """Returns one line, for lists of reports and prompts."""
        return f"<{headline(self)}>"

    def to_json(self) -> str:
        """Returns the report as JSON, with kind and schema version. `from_json` reads it."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Returns the report that `to_json` wrote. Raises `OptionError` with the JSON path of a fault."""
        report = schema.read(cls, schema.opened(text, "report", SCHEMA))
        for number, outline in enumerate(report.graph):
            fault = outline.fault()
            if fault:
                raise OptionError(f"$.graph[{number}]{fault}")
        return report

    def why(self, layer: str = "*") -> tuple[Reasons, ...]:
        """Returns the evidence for the roles of layers, with equal layers folded.

        Args:
            layer: glob over full layer names, as in a policy; ``re:`` precedes a regular expression.

        Raises:
            OptionError: if no layer matches; the message lists similar names.
        """
        return reasons(self.gemms, layer)

    def since(self, old: ReportData) -> Difference:
        """Returns the changes from the report `old` to this report."""
        return compare(old, self)
