"""An audit as text and Markdown: a summary, then GEMMs, casts and gradients, most harm first.

`mxcompile.report.forms.tables` draws the tables; `mxcompile.report.data.numerics` defines harm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from mxcompile.errors import OptionError, not_allowed
from mxcompile.report import GemmNumerics, Numerics, ParameterNumerics, TensorNumerics
from mxcompile.report.data.numerics import Group, by_block, by_role
from mxcompile.report.forms.tables import NAMES, Table, markdown, markdown_page, markdown_table, page, section

_TENSOR_HEADERS = ["layer", "cast", "dB", "cosine", "error", "to 0", "lost", "cut", "2^"]

_GEMM_TITLE = "Outputs of GEMMs against FP32, most harm first: SQNR in dB, relative error"
_TENSOR_TITLE = (
    "Casts, by FLOPs × (error² + lost): SQNR in dB, cosine, relative error, share of elements cast to zero,"
    " share of magnitude lost with them, share saturated (cut), exponents of the scales"
)
_PARAMETER_TITLE = "Gradients of parameters against the unquantized model's, by FLOPs × error²"


def to_text(numerics: Numerics, rows: int | None = None) -> str:
    """Returns `numerics` as text for a terminal. rows: limit of rows per table."""
    sections = (section(title, table, rows, "with less harm") for title, table in _tables(numerics))
    return "\n\n".join([page(_facts(numerics)), *sections])


def to_markdown(numerics: Numerics) -> str:
    """Returns `numerics` as Markdown for a pull request."""
    tables = (f"\n{markdown(title)}\n\n{markdown_table(table)}\n" for title, table in _tables(numerics))
    return "".join([markdown_page(_facts(numerics)), *tables])


def _by_underflow(numerics: Numerics) -> Table:
    losing = sorted(numerics.tensors, key=lambda tensor: (tensor.lost, tensor.underflow), reverse=True)
    return [_TENSOR_HEADERS, *map(_tensor, (tensor for tensor in losing if tensor.underflow))]


VIEWS: dict[str, Callable[[Numerics], Table]] = {
    "role": lambda numerics: _groups("role", by_role(numerics)),
    "block": lambda numerics: _groups("block", by_block(numerics)),
    "underflow": _by_underflow,
}
"""Tables in other orders, by the argument of `view`."""


def view(numerics: Numerics, by: str) -> str:
    """Returns the table `by`, one of `VIEWS`, for a terminal. Raises `OptionError` for other words."""
    if by not in VIEWS:
        raise OptionError(not_allowed("view", by, VIEWS))
    table = VIEWS[by](numerics)
    text = page(_facts(numerics), (table, [header for header in table[0] if header in NAMES]))
    return text if table[1:] else f"{text}\n\nno rows by {by}: this audit has no GEMM or cast for them"


def headline(numerics: Numerics) -> str:
    """Returns `numerics` in one line."""
    return (
        f"{numerics.precision} audit, policy {numerics.policy}: {len(numerics.gemms)} GEMMs,"
        f" {len(numerics.tensors)} cast tensors{'' if numerics.gradients else ', forward only'}"
    )


def _facts(numerics: Numerics) -> list[str]:
    facts = [headline(numerics)]
    if numerics.loss is not None and numerics.loss_reference is not None and numerics.loss_gap is not None:
        facts.append(
            f"loss {numerics.loss:.6g}, in {numerics.own_dtype} {numerics.loss_reference:.6g}:"
            f" gap {numerics.loss_gap:+.4%}"
        )
    if numerics.logits_sqnr_db is not None and numerics.logits_cosine is not None:
        facts.append(
            f"main output against {numerics.own_dtype}: SQNR {decibels(numerics.logits_sqnr_db)} dB,"
            f" cosine {numerics.logits_cosine:.6f}"
        )
    if numerics.gradient_error is not None and numerics.gradient_cosine is not None:
        facts.append(
            f"parameter gradients against {numerics.own_dtype}, weighted by FLOPs: relative error"
            f" {percent(numerics.gradient_error)}, cosine {numerics.gradient_cosine:.6f}"
        )
    return facts + [f"note: {' '.join(note.split())}" for note in numerics.notes]


def _tables(numerics: Numerics) -> list[tuple[str, Table]]:
    title, gemms = _GEMM_TITLE, [["layer", "role", "GEMM", "m×n×k", "dB", "cosine", "MSE", "error"]]
    for gemm in numerics.worst_gemms():
        batch = f"{gemm.batch}·" if gemm.batch > 1 else ""
        size = f"{batch}{gemm.m}×{gemm.n}×{gemm.k}"
        gemms.append([_named(gemm.name, 0, gemm.calls), gemm.role, gemm.gemm, size, *_errors(gemm)])
    changes = [gemm.output_change for gemm in numerics.worst_gemms()]
    if any(change is not None for change in changes):
        title += ", and by how much a forward GEMM alone changes the model's output (an estimate)"
        texts = ["output", *("" if change is None else percent(change) for change in changes)]
        gemms = [[*row, text] for row, text in zip(gemms, texts, strict=True)]
    flops = sum(row.flops for row in numerics.parameters) or 1
    parameters = [
        [row.name, row.role, f"{row.flops / flops:.1%}", *_errors(row)] for row in numerics.worst_parameters()
    ]
    tables: list[tuple[str, Table]] = [
        (title, gemms),
        (_TENSOR_TITLE, [_TENSOR_HEADERS, *map(_tensor, numerics.worst_tensors())]),
        (_PARAMETER_TITLE, [["layer", "role", "FLOPs", "dB", "cosine", "MSE", "error"], *parameters]),
    ]
    return [(title, table) for title, table in tables if len(table) > 1]


def _tensor(tensor: TensorNumerics) -> list[str]:
    unusual = [tensor.block] if tensor.block != "1x32" else []
    unusual += [tensor.elements] if tensor.elements != "nearest" else []
    how = " ".join([tensor.layout.removesuffix("wise"), tensor.elem, tensor.rounding, *unusual])
    scales = {byte for byte, _ in tensor.scale_histogram}
    exponents = [byte - 127 for byte in scales - {0, 255}]
    spread = [f"{min(exponents)}…{max(exponents)}"] if exponents else []
    spread += [word for byte, word in ((0, "0"), (255, "NaN")) if byte in scales]  # blocks of zeros, and NaN
    return [
        _named(tensor.name, len(tensor.shared_with), tensor.calls),
        f"{tensor.operand} {how}",
        decibels(tensor.sqnr_db),
        f"{tensor.cosine:.5f}",
        percent(tensor.rel_error),
        percent(tensor.underflow),
        percent(tensor.lost),
        percent(tensor.saturation),
        ", ".join(spread),
    ]


def _errors(row: GemmNumerics | ParameterNumerics) -> list[str]:
    return [decibels(row.sqnr_db), f"{row.cosine:.5f}", f"{row.mse:.1e}", percent(row.rel_error)]


def _groups(by: str, groups: Sequence[Group]) -> Table:
    rows = [
        [
            group.name,
            f"{group.num_gemms}",
            f"{group.flop_share:.1%}",
            percent(group.rel_error),
            decibels(group.lowest_sqnr_db),
            "" if group.underflow is None else percent(group.underflow),
            group.worst.name or "(root)",
            group.worst.gemm,
        ]
        for group in groups
    ]
    return [[by, "GEMMs", "FLOPs", "error", "lowest dB", "to 0", "most harm in", ""], *rows]


def _named(name: str, others: int, calls: int) -> str:
    """Returns the layer, the number of other layers that share its tensor, and the calls if above 1."""
    shared = f" +{others}" if others else ""
    return f"{name or '(root)'}{shared}{f' ({calls} calls)' if calls > 1 else ''}"


def decibels(value: float) -> str:
    """Returns an SQNR as text: ``28.31``, ``exact`` without any error, ``NaN`` for non-finite values."""
    if math.isnan(value):
        return "NaN"
    return ("exact" if value > 0 else "-inf") if math.isinf(value) else f"{value:.2f}"


def percent(value: float) -> str:
    """Returns a share as text: ``2.400%``, ``0`` or ``3e-04%``."""
    if value == 0:
        return "0"
    return f"{value:.3%}" if value >= 1e-5 else f"{100 * value:.0e}%"
