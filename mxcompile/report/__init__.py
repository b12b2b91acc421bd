"""Reports: for every matmul of a model its precision, its kernel and the reason."""

from mxcompile.report.data.numerics import GemmNumerics as GemmNumerics
from mxcompile.report.data.numerics import Numerics as Numerics
from mxcompile.report.data.numerics import ParameterNumerics as ParameterNumerics
from mxcompile.report.data.numerics import TensorNumerics as TensorNumerics
from mxcompile.report.data.outline import Outline as Outline
from mxcompile.report.data.outline import OutlineNode as OutlineNode
from mxcompile.report.data.outline import folded as folded
from mxcompile.report.data.record import STORED as STORED
from mxcompile.report.data.record import GemmRecord as GemmRecord
from mxcompile.report.data.record import OperandFormat as OperandFormat
from mxcompile.report.data.record import Part as Part
from mxcompile.report.data.record import Summary as Summary
from mxcompile.report.forms import FORMS as FORMS
from mxcompile.report.registry import REGISTRY as REGISTRY
from mxcompile.report.registry import Ledger as Ledger
from mxcompile.report.registry import clear_reports as clear_reports
from mxcompile.report.registry import gather_reports as gather_reports
from mxcompile.report.registry import reports as reports
from mxcompile.report.report import Report as Report
