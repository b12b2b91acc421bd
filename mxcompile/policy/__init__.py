"""Policies: which GEMMs go to MXFP8 and in which format, as rules a user writes."""

from mxcompile.policy.model import (
    ATTENTION_PRODUCTS,
    Block,
    Choice,
    Decision,
    Ends,
    Gemm,
    Layer,
    Limit,
    Match,
    Precision,
    Role,
    Rule,
    Saved,
    Use,
)
from mxcompile.policy.policy import Policy

__all__ = [
    "ATTENTION_PRODUCTS",
    "Block",
    "Choice",
    "Decision",
    "Ends",
    "Gemm",
    "Layer",
    "Limit",
    "Match",
    "Policy",
    "Precision",
    "Role",
    "Rule",
    "Saved",
    "Use",
]
