"""Roles of layers whose weight has several axes of outputs, and kinds of the gradients of a complex one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.made import Made
from helpers.reports import report_of
from torch import Tensor, nn
from torch.nn.functional import glu, scaled_dot_product_attention, silu

WIDTH, WIDE = 64, 96
X = torch.randn(2, 20, WIDTH)


def roles(model: nn.Module, x: Tensor) -> dict[str, str]:
    """The role of each layer of `model`."""
    return {gemm.name: gemm.role for gemm in report_of(model, x, training=False).gemms if gemm.name}


class Gated(nn.Module):
    """A feed-forward network with gate and up in one weight, whose product is taken apart by `parts`."""

    def __init__(self, shape: tuple[int, ...], equation: str, parts: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.into, self.out = nn.Parameter(torch.randn(shape) / 8), nn.Parameter(torch.randn(WIDE, WIDTH) / 8)
        self.equation, self.parts = equation, parts

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.parts(torch.einsum(self.equation, self.norm(x), self.into))
        return x + torch.einsum("btf,fd->btd", silu(gate) * up, self.out)


GATED: dict[str, tuple[tuple[int, ...], str, Callable[[Tensor], Any]]] = {
    "d2f, first": ((WIDTH, 2, WIDE), "btd,dcf->cbtf", lambda y: y),
    "d2f, in place": ((WIDTH, 2, WIDE), "btd,dcf->btcf", lambda y: y.unbind(2)),
    "d2f, index": ((WIDTH, 2, WIDE), "btd,dcf->btcf", lambda y: (y[..., 0, :], y[..., 1, :])),
    "df2": ((WIDTH, WIDE, 2), "btd,dfc->btfc", lambda y: y.unbind(3)),
    "2df": ((2, WIDTH, WIDE), "btd,cdf->cbtf", lambda y: y),
    "2fd": ((2, WIDE, WIDTH), "btd,cfd->btcf", lambda y: y.unbind(2)),
    "f2d": ((WIDE, 2, WIDTH), "btd,fcd->btcf", lambda y: y.unbind(2)),
}


@pytest.mark.parametrize("case", GATED)
def test_gate_and_up_in_one_weight_are_the_input_of_the_network(case: str) -> None:
    layer_roles = roles(nn.Sequential(Gated(*GATED[case]), Gated(*GATED[case])), X)
    assert layer_roles == {"0.into": "ffn_in", "0.out": "ffn_out", "1.into": "ffn_in", "1.out": "ffn_out"}


class OneOperator(Made, norm=lambda: nn.RMSNorm(WIDTH), up=(WIDTH, 2 * WIDE), down=(WIDE, WIDTH)):
    """A feed-forward network whose halves `aten.glu` gates, which Inductor's decompositions keep."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(glu(self.up(self.norm(x))))


def test_network_gated_by_one_operator_has_roles() -> None:
    results = roles(nn.Sequential(OneOperator(), OneOperator()), X)
    assert results == {"0.up": "ffn_in", "0.down": "ffn_out", "1.up": "ffn_in", "1.down": "ffn_out"}


class Fused(nn.Module):
    """An attention with queries, keys and values in one weight."""

    def __init__(self, shape: tuple[int, ...], equation: str, dim: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Parameter(torch.randn(shape) / 8), nn.Parameter(torch.randn(4, 16, WIDTH) / 8)
        self.equation, self.dim = equation, dim

    def forward(self, x: Tensor) -> Tensor:
        heads = torch.einsum(self.equation, self.norm(x), self.qkv).unbind(self.dim)
        return x + torch.einsum("bhtk,hkd->btd", scaled_dot_product_attention(*heads), self.out)


@pytest.mark.parametrize(
    ("shape", "equation", "dim"),
    [
        ((WIDTH, 3, 4, 16), "btd,dchk->cbhtk", 0),
        ((3, WIDTH, 4, 16), "btd,cdhk->cbhtk", 0),
        ((WIDTH, 4, 3, 16), "btd,dhck->bhctk", 2),
    ],
)
def test_queries_keys_and_values_in_one_weight_are_qkv(shape: Any, equation: str, dim: int) -> None:
    assert roles(Fused(shape, equation, dim), X) == {"qkv": "qkv", "out": "attn_out"}


class Experts(
    Made,
    router=(WIDTH, 4),
    into=lambda: nn.Parameter(torch.randn(4, WIDTH, WIDE)),
    out=lambda: nn.Parameter(torch.randn(4, WIDE, WIDTH)),
):
    """Experts that all run, weighted by a softmax: the first axis of a weight is theirs."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = silu(torch.einsum("td,edf->tef", x, self.into))
        return x + torch.einsum("tef,efd,te->td", hidden, self.out, self.router(x).softmax(-1))


def test_stack_whose_results_do_not_gate_each_other_is_one_of_experts() -> None:
    layer_roles = roles(Experts(), torch.randn(40, WIDTH))
    assert (layer_roles["into"], layer_roles["out"]) == ("expert_in", "expert_out")


class Latent(nn.Module):
    """Multi-head latent attention, and nothing around it."""

    def __init__(self, heads: int = 4, rank: int = 32, rotary: int = 8) -> None:
        super().__init__()
        self.heads, self.rank, self.rotary = heads, rank, rotary
        self.q = nn.Linear(WIDTH, heads * (16 + rotary), bias=False)
        self.kv_a = nn.Linear(WIDTH, rank + rotary, bias=False)
        self.norm = nn.RMSNorm(rank)
        self.kv_b = nn.Linear(rank, heads * 32, bias=False)
        self.o = nn.Linear(heads * 16, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        latent, rotary = self.kv_a(x).split([self.rank, self.rotary], -1)
        k, v = self.kv_b(self.norm(latent)).unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(2, -1)
        k = torch.cat([k, rotary.unsqueeze(1).expand(-1, self.heads, -1, -1)], -1)
        return self.o(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Absorbed(Latent):
    """The same attention over latent vectors: queries and results of each head go through `kv_b`."""

    def forward(self, x: Tensor) -> Tensor:
        q, rotated = self.q(x).unflatten(-1, (self.heads, -1)).split([16, self.rotary], -1)
        latent, rotary = self.kv_a(x).split([self.rank, self.rotary], -1)
        latent, (w_k, w_v) = self.norm(latent), self.kv_b.weight.unflatten(0, (self.heads, -1)).chunk(2, 1)
        scores = torch.einsum("bthn,hnc,bsc->bhts", q, w_k, latent)
        scores = (scores + torch.einsum("bthr,bsr->bhts", rotated, rotary)).softmax(-1)
        return self.o(torch.einsum("bhts,bsc,hvc->bthv", scores, latent, w_v).flatten(2))


def test_absorbed_latent_attention_alone_has_all_roles() -> None:
    results = roles(Absorbed(), X)
    assert results == {"q": "qkv", "kv_a": "qkv", "kv_b": "attn_out", "o": "attn_out"}


@pytest.mark.parametrize("rotary", [8, 16])
def test_latent_attention_alone_has_all_roles(rotary: int) -> None:
    layer_roles = roles(Latent(rotary=rotary), X)
    assert layer_roles.pop("o") == "attn_out"
    assert set(layer_roles.values()) == {"qkv"}


def test_gradients_of_a_complex_layer_are_dgrad_and_wgrad() -> None:
    layer = nn.Linear(WIDTH, WIDE, dtype=torch.complex64)
    x = torch.randn(40, WIDTH, dtype=torch.complex64, requires_grad=True)
    report = report_of(lambda x: layer(x).abs(), x, policy="bf16")
    assert sorted((g.gemm, g.m, g.n, g.k) for g in report.gemms) == [
        ("dgrad", 40, WIDTH, WIDE),
        ("fprop", 40, WIDE, WIDTH),
        ("wgrad", WIDE, WIDTH, 40),
    ]
