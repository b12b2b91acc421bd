"""Reports: for every matmul of a model its precision, its kernel and the reason."""

from mxcompile.report.data.numerics import GemmNumerics, Numerics, ParameterNumerics, TensorNumerics
from mxcompile.report.data.outline import Outline, OutlineNode, folded
from mxcompile.report.data.record import STORED, GemmRecord, OperandFormat, Part, Summary
from mxcompile.report.forms import FORMS
from mxcompile.report.registry import REGISTRY, Ledger, clear_reports, gather_reports, reports
from mxcompile.report.report import Report, form_of

__all__ = [
    "FORMS",
    "REGISTRY",
    "STORED",
    "GemmNumerics",
    "GemmRecord",
    "Ledger",
    "Numerics",
    "OperandFormat",
    "Outline",
    "OutlineNode",
    "ParameterNumerics",
    "Part",
    "Report",
    "Summary",
    "TensorNumerics",
    "clear_reports",
    "folded",
    "form_of",
    "gather_reports",
    "reports",
]
