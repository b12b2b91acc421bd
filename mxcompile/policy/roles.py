"""The roles of matmuls, one row each. `passes.roles` recognises them in a graph."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Self


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleRow:
    """The properties of one role.

    colour: colour in a report's page, the name of a CSS variable. quantized: whether presets quantize its
    layers; other roles are sensitive to quantization. per_token: whether its layers have one row per token.
    ends_branch: whether its input comes from layers of the same branch, not from the residual stream.
    formula: formula of a product of attention; these products stay in BF16.
    """

    colour: str = "head"
    quantized: bool = False
    per_token: bool = False
    ends_branch: bool = False
    formula: str = ""


class Role(StrEnum):
    """The role of a matmul in the model, a closed set. row: the properties of the role."""

    row: RoleRow

    def __new__(cls, word: str, row: RoleRow = RoleRow()) -> Self:
        """Returns the role with the name `word` in policies and reports."""
        role = str.__new__(cls, word)
        role._value_, role.row = word, row
        return role

    QKV = "qkv", RoleRow(colour="qkv", quantized=True, per_token=True)
    ATTN_OUT = "attn_out", RoleRow(colour="attn", quantized=True, per_token=True, ends_branch=True)
    FFN_IN = "ffn_in", RoleRow(colour="ffn", quantized=True, per_token=True)
    FFN_OUT = "ffn_out", RoleRow(colour="ffn", quantized=True, per_token=True, ends_branch=True)
    EXPERT_IN = "expert_in", RoleRow(colour="expert", quantized=True)
    EXPERT_OUT = "expert_out", RoleRow(colour="expert", quantized=True, ends_branch=True)
    ROUTER = "router", RoleRow(colour="router")
    MIXER_IN = "mixer_in", RoleRow(colour="qkv", quantized=True, per_token=True)
    MIXER_OUT = "mixer_out", RoleRow(colour="attn", quantized=True, per_token=True, ends_branch=True)
    CONDITIONING = "conditioning", RoleRow(colour="router")
    ATTN_SCORES = "attn_scores", RoleRow(colour="attn", formula="q · kᵀ")
    ATTN_VALUES = "attn_values", RoleRow(colour="attn", formula="softmax · v")
    EMBEDDING = "embedding"
    HEAD = "head", RoleRow(per_token=True)
    OTHER = "other", RoleRow(per_token=True)


ATTENTION_PRODUCTS = frozenset(role for role in Role if role.row.formula)
