"""The text and Markdown forms of the changes between two reports."""

from __future__ import annotations

from collections.abc import Iterable

from mxcompile.report.data.change import Change, Changes
from mxcompile.report.data.fold import spelled
from mxcompile.report.forms.figures import differences
from mxcompile.report.forms.tables import Table, bullets, drawn, fitted, markdown, markdown_table, wrapped
from mxcompile.report.forms.words import count


def to_text(changes: Changes) -> str:
    """Returns `changes` as text for a terminal."""
    lines = wrapped([_headline(changes), *_facts(changes)])
    if changes.changes:
        lines += ["", drawn(fitted(_table(changes.changes), ("layer", "change", "reason")))]
    return "\n".join(lines)


def to_markdown(changes: Changes) -> str:
    """Returns `changes` as Markdown for a pull request."""
    parts = [f"### {markdown(_headline(changes))}", bullets(_facts(changes))]
    if changes.changes:
        parts.append(markdown_table(_table(changes.changes)))
    return "\n\n".join(part for part in parts if part) + "\n"


def _headline(changes: Changes) -> str:
    lost = len(changes.fell_back)
    if changes.is_unrelated:
        return "no layer in common: these reports are of different models, or all modules have new names"
    if lost:
        return f"{count(lost, 'layer')} fell back from {changes.words}"
    return f"no layer fell back from {changes.words}" if changes.changes else "the same for every layer"


def _facts(changes: Changes) -> list[str]:
    """Returns a line for each figure of the summary that changed, and for each new or removed warning."""
    old, new = changes.old, changes.new
    pairs = [
        ("target", old.target, new.target),
        ("policy", old.policy, new.policy),
        (f"matmul FLOPs in {changes.words}", f"{old.flop_share:.1%}", f"{new.flop_share:.1%}"),
        ("GEMMs", str(old.num_gemms), str(new.num_gemms)),
    ]
    facts = [f"{word}: {before} → {after}" for word, before, after in pairs if before != after]
    facts += differences(old, new)
    gone = [f"no longer warned: {warning}" for warning in old.warnings if warning not in new.warnings]
    return (
        facts + [f"new warning: {warning}" for warning in new.warnings if warning not in old.warnings] + gone
    )


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
