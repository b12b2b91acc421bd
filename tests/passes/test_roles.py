"""Roles from structure: blocks of many kinds, and real models whose every name has been scrambled.

`tests/zoo` scrambles the names of a hundred more.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

import pytest
import torch
from helpers.blocks import (
    WIDTH,
    Adapted,
    Experts,
    Explicit,
    Language,
    Latent,
    LinearAttention,
    Mixer,
    Modulated,
    Parallel,
    Patches,
    Residual,
    StackedExperts,
    block,
    features,
)
from helpers.eager_backend import EagerBackend
from helpers.fresh import forget
from helpers.models import CASES
from helpers.paces import mostly_slow
from helpers.reports import report_of
from torch import Tensor, fx, nn

import mxcompile

ATTENTION = {"b.a": "qkv", "b.b": "qkv", "b.c": "qkv", "b.d": "attn_out"}
SWIGLU = {"b.a": "ffn_in", "b.b": "ffn_in", "b.c": "ffn_out"}
BLOCK = {**{f"0.{k}": v for k, v in ATTENTION.items()}, **{f"1.{k}": v for k, v in SWIGLU.items()}}


def roles_of(model: nn.Module, *args: Tensor) -> dict[str, str]:
    """Layer → role, of the linear layers of `model`, from a training step."""
    return {
        gemm.name: gemm.role
        for gemm in report_of(model, *args).gemms
        if (gemm.gemm == "fprop" and not gemm.role.startswith("attn_")) or gemm.role == "attn_out"
    }


def within(prefix: str, roles: dict[str, str]) -> dict[str, str]:
    return {f"{prefix}.{name}": role for name, role in roles.items()}


X = features(2, 9, WIDTH)
MODELS: dict[str, tuple[Any, ...]] = {
    "one linear": (lambda: nn.Linear(WIDTH, 32), {"": "other"}),
    "classifier": (
        lambda: nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, 10)),
        {"0": "other", "2": "head"},
    ),
    "feed-forward alone": (
        lambda: nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH)),
        {"0": "ffn_in", "2": "ffn_out"},
    ),
    "experts alone": (StackedExperts, {"a": "expert_in", "b": "expert_out"}),
    "residual feed-forward": (
        lambda: Residual(nn.Sequential(nn.Linear(WIDTH, 96), nn.ELU(), nn.Linear(96, WIDTH))),
        {"b.0": "ffn_in", "b.2": "ffn_out"},
    ),
    "block": (block, BLOCK),
    "gated attention": (lambda: block(gated=True), {**BLOCK, "0.b.e": "qkv"}),
    "adapters": (
        lambda: block(Adapted),
        {f"{name}.{part}": role for name, role in BLOCK.items() for part in "abc"},
    ),
    "latent attention": (
        Latent,
        {"a": "qkv", "c": "qkv", "d": "qkv", "f": "qkv", "g": "attn_out"},
    ),
    "parallel": (
        lambda: nn.Sequential(Parallel(), Parallel()),
        {
            f"{i}.{name}": role
            for i in range(2)
            for name, role in {**ATTENTION, "c": "ffn_in", "d": "ffn_out"}.items()
        },
    ),
    "mixer": (Mixer, {"a": "ffn_in", "b": "ffn_out", "d": "ffn_in", "e": "ffn_out"}),
    "experts": (Experts, {"a": "router", "b": "expert_in", "c": "expert_out"}),
    "linear attention": (
        LinearAttention,
        {**dict.fromkeys("abc", "mixer_in"), "d": "mixer_out", "": "other"},
    ),
    "explicit attention": (
        Explicit,
        {"a": "qkv", "b": "qkv", "c": "qkv", "d": "attn_out"},
    ),
    "patches": (
        Patches, {"a": "embedding", **within("b", BLOCK), "c": "head"}, features(2, 9, 48)
    ),
    "projection of a condition": (
        Modulated, {"a": "conditioning", **ATTENTION, "c": "ffn_in", "d": "ffn_out"}, X, features(2, 32)
    ),
    **{
        f"language model, tied {tied}": (
            lambda tied=tied: Language(tied), {**within("b", BLOCK), "c": "head"}, torch.arange(18).view(2, 9)
        )
        for tied in (False, True)
    },
}  # fmt: skip
"""By name, how to build it, its roles, and its inputs if they are not `X`."""


@pytest.mark.parametrize("name", MODELS)
def test_roles_of_each_kind_of_block(name: str):
    build, expected, *inputs = MODELS[name]
    assert roles_of(build(), *(inputs or [X])) == expected


def scramble(graph: fx.Graph) -> None:
    """Replace every name a pass could look at by its hash."""

    def nonsense(text: str) -> str:
        return "x" + hashlib.md5(text.encode()).hexdigest()[:6]

    for node in graph.nodes:
        for key in ("nn_module_stack", "fwd_nn_module_stack"):
            if node.meta.get(key):
                node.meta[key] = {
                    k: (nonsense(path), nonsense(str(kind))) for k, (path, kind) in node.meta[key].items()
                }
        node.meta.pop("stack_trace", None)
        if node.op != "output":
            node._rename(nonsense(node.name) if "tangents" not in node.name else node.name)


@pytest.mark.parametrize("name", mostly_slow(["llama", "torch_encoder"], "torch_encoder"))
def test_scrambled_names_change_nothing(name: str):
    def roles(before) -> Counter[tuple[str, str, int, int, int]]:
        forget()
        torch.manual_seed(0)
        case = CASES[name]()
        case.loss(torch.compile(case.model, backend=EagerBackend(before))(**case.kwargs)).backward()
        (report,) = mxcompile.reports()
        return Counter((g.role, g.gemm, g.m, g.n, g.k) for g in report.gemms)

    assert roles(scramble) == roles(None)
