"""Policies: user-written rules that select the GEMMs to quantize and their formats."""

from mxcompile.policy.model import (
    Backward,
    Block,
    Choice,
    Decision,
    Ends,
    Gemm,
    Layer,
    Limit,
    Match,
    Rule,
    Saved,
    Sent,
    StepRange,
    Use,
)
from mxcompile.policy.policy import Policy, keeping
from mxcompile.policy.reason import Code, Reason
from mxcompile.policy.roles import ATTENTION_PRODUCTS, Role

__all__ = [
    "ATTENTION_PRODUCTS",
    "Backward",
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
    "StepRange",
    "Use",
    "keeping",
]
