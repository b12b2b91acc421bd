"""Audits: the numerical errors of quantization in a model, measured on a user's batch."""

from mxcompile.analysis.audit.collect import loss_gap, numerics
from mxcompile.analysis.audit.interpreter import Run
from mxcompile.analysis.audit.measure import Audit, audit, form_of
from mxcompile.analysis.audit.session import Outcome, Session

__all__ = ["Audit", "Outcome", "Run", "Session", "audit", "form_of", "loss_gap", "numerics"]
