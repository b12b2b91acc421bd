"""The pictures of the HTML form, with the details of their nodes."""

from __future__ import annotations

from html import escape

from mxcompile.formats import labels
from mxcompile.report.fold import spelled
from mxcompile.report.forms.html_layers import gemm_details
from mxcompile.report.forms.html_parts import role_badge, source_line
from mxcompile.report.forms.picture import picture
from mxcompile.report.forms.words import count
from mxcompile.report.outline import PHASES, Outline, OutlineNode
from mxcompile.report.record import GemmRecord, ReportData

_MOST = 12
_Records = dict[tuple[int, str], list[GemmRecord]]


def graphs(report: ReportData) -> str:
    """The section with a picture of every compiled graph; "" if there is none."""
    records: _Records = {}
    for gemm in report.gemms:
        records.setdefault((gemm.graph, gemm.name), []).append(gemm)
    drawn = [
        _graph(number, outline, records, len(report.graph))
        for number, outline in enumerate(report.graph[:_MOST])
        if outline.nodes
    ]
    if not drawn:
        return ""
    more = len(report.graph) - _MOST
    rest = f'<p class="hint">and {count(more, "more graph")}</p>' if more > 0 else ""
    roles = dict.fromkeys(n.role for o in report.graph for n in o.nodes if n.role)
    words = labels(gemm.precision for gemm in report.gemms)
    return f"""<section id="graph"><h2>Graph</h2>
<p class="legend"><span class="key quantized">{words}</span><span class="key bf16">BF16</span>\
<span class="key cast">cast</span>{"".join(map(role_badge, roles))}</p>{"".join(drawn)}{rest}</section>"""


def _graph(number: int, outline: Outline, records: _Records, total: int) -> str:
    phases = [phase for phase in PHASES if any(node.phase == phase for node in outline.nodes)]
    tabs = "".join(
        f'<button type="button" role="tab" aria-selected="{str(i == 0).lower()}"'
        f' aria-controls="g{number}-{phase}">{phase}</button>'
        for i, phase in enumerate(phases)
    )
    panes = "".join(
        f'<div class="pane" id="g{number}-{phase}" role="tabpanel"{"" if i == 0 else " hidden"}>'
        f"{picture(outline, phase, f'{number}-{phase}')}</div>"
        for i, phase in enumerate(phases)
    )
    details = "".join(_details(i, node, number, records) for i, node in enumerate(outline.nodes))
    heading = f"<h3>graph {number + 1} of {total}</h3>" if total > 1 else ""
    omitted = (
        f'<p class="hint">{count(outline.omitted, "more node")} not drawn</p>' if outline.omitted else ""
    )
    return f"""<div class="graph" data-graph="{number}">{heading}
<div class="tabs" role="tablist" aria-label="phase">{tabs}</div>
<div class="canvas"><div class="panes">{panes}</div><aside class="details" aria-live="polite">
<p class="hint">Click a node, or press Enter on it, for its details.</p></aside></div>
{omitted}<div hidden>{details}</div></div>"""


def _details(index: int, node: OutlineNode, graph: int, records: _Records) -> str:
    said: list[tuple[str, str]] = [
        ("path", f"<code>{escape(spelled(node.names) or '(root)')}</code>"),
        ("layers", str(len(node.names)) if len(node.names) > 1 else ""),
        ("role", role_badge(node.role) if node.role else ""),
        ("shape", escape(node.shape)),
        ("operators" if node.kind == "glue" else "format", escape(node.detail)),
    ]
    listed = "".join(f"<dt>{term}</dt><dd>{value}</dd>" for term, value in said if value)
    found = records.get((graph, node.names[0]), []) if node.kind in ("gemm", "attention") else []
    if node.kind == "gemm":
        found = [gemm for gemm in found if gemm.role == node.role]
    inside = gemm_details(found, ()) if found else f'<p class="about">{source_line(node.source)}</p>'
    kind = "" if node.kind == "attention" else f"<small>{escape(_KINDS[node.kind])}</small>"
    return f'<div data-details="{index}"><h3>{escape(node.label)} {kind}</h3><dl>{listed}</dl>{inside}</div>'


_KINDS = {"gemm": "matmul", "cast": "cast", "glue": "left as it is", "input": "of the graph"}
