"""Policies: which GEMMs are quantized and in which format, as rules a user writes."""

from mxcompile.policy.kept import keeping
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
    Role,
    Rule,
    Saved,
    Sent,
    Use,
)
from mxcompile.policy.policy import Policy
from mxcompile.policy.reason import Code, Reason

__all__ = [
    "ATTENTION_PRODUCTS",
    "Block",
    "Choice",
    "Code",
    "Decision",
    "Ends",
    "Gemm",
    "Layer",
    "Limit",
    "Match",
    "Policy",
    "Reason",
    "Role",
    "Rule",
    "Saved",
    "Sent",
    "Use",
    "keeping",
]
