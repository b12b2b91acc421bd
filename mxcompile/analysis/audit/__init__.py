"""Audits: the numerical errors of quantization in a model, measured on a user's batch."""

from mxcompile.analysis.audit.collect import loss_gap, numerics
from mxcompile.analysis.audit.measure import Audit, audit, audited

__all__ = ["Audit", "audit", "audited", "loss_gap", "numerics"]
