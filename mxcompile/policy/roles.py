"""The roles of matmuls: one row each, with all that is known of a role but its statement (`passes.roles`)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Self


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleRow:
    """The facts about one role.

    colour: of a report's page, a variable of its style sheet. quantized: whether presets quantize its layers;
    layers of other roles are fragile. per_token: whether its layers have a row for each token. ends_branch:
    whether its input comes from the layers it belongs with, not from the residual stream. formula: of a
    product of an attention; such products stay in BF16.
    """

    colour: str = "head"
    quantized: bool = False
    per_token: bool = False
    ends_branch: bool = False
    formula: str = ""


class Role(StrEnum):
    """The role of a matmul in the model. Closed set. row: what else is known of it."""

    row: RoleRow

    def __new__(cls, word: str, row: RoleRow = RoleRow()) -> Self:
        """The role that policies and reports call `word`."""
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
