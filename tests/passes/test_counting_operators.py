"""Products by unusual operators have a record with their FLOPs, and the share of a report includes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.reports import EVERYTHING
from torch import Tensor, nn
from torch.nn import functional as F

import mxcompile

ROWS, WIDTH, WIDE = 32, 64, 96
LAYER = 2 * ROWS * WIDTH * WIDTH
"""FLOPs of the linear layer in front of every operator."""


@torch.library.custom_op("mx_counting::product", mutates_args=())
def _product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.t()


@torch.library.custom_op("mx_counting::batched", mutates_args=())
def _batched(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


@torch.library.custom_op("mx_counting::norm", mutates_args=())
def _norm(x: Tensor, residual: Tensor) -> Tensor:
    return F.rms_norm(x + residual, x.shape[-1:])


_product.register_fake(lambda x, w: x.new_empty(*x.shape[:-1], w.shape[0]))
_batched.register_fake(lambda x, w: x.new_empty(*x.shape[:-1], w.shape[-1]))
_norm.register_fake(lambda x, residual: torch.empty_like(x))


def sparse(layout: torch.layout = torch.sparse_coo) -> Tensor:
    return torch.eye(ROWS).to_sparse(layout=layout)


class Model(nn.Module):
    """A linear layer, then the operator called `kind`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.w = nn.Parameter(torch.randn(4, WIDTH, WIDE))
        self.register_buffer("codes", torch.randn(WIDE, WIDTH).to(torch.float8_e4m3fn))
        self.register_buffer("one", torch.ones(()))
        self.register_buffer("graph", sparse() if kind == "sparse buffer" else None)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return getattr(self, "_" + self.kind.replace(" ", "_").replace("@", "at"))(self.fc(x), *others)

    def _addbmm(self, y: Tensor) -> Tensor:
        return torch.addbmm(y.new_zeros(8, WIDE), y.view(4, 8, WIDTH), self.w)

    def _baddbmm(self, y: Tensor) -> Tensor:
        return torch.baddbmm(y.new_zeros(4, 8, WIDE), y.view(4, 8, WIDTH), self.w)

    def _scaled_mm(self, y: Tensor) -> Tensor:
        codes = y.to(torch.float8_e4m3fn)
        return torch._scaled_mm(codes, self.codes.t(), self.one, self.one, out_dtype=torch.bfloat16)

    def _sparse_mm(self, y: Tensor, graph: Tensor) -> Tensor:
        return torch.sparse.mm(graph, y)

    def _sparse_at_dense(self, y: Tensor, graph: Tensor) -> Tensor:
        return graph @ y

    def _sparse_buffer(self, y: Tensor) -> Tensor:
        return torch.sparse.mm(self.graph, y)

    def _sparse_made(self, y: Tensor) -> Tensor:
        places = torch.arange(ROWS).expand(2, -1)
        return torch.sparse.mm(torch.sparse_coo_tensor(places, y.new_ones(ROWS), (ROWS, ROWS)), y)

    def _custom(self, y: Tensor) -> Tensor:
        return torch.ops.mx_counting.product(y, self.w[0].t())

    def _custom_batched(self, y: Tensor) -> Tensor:
        return torch.ops.mx_counting.batched(y.view(4, 8, WIDTH), self.w)


BATCHED = (4, 8, WIDE, WIDTH)
FLAT = (1, ROWS, WIDE, WIDTH)
MIXED = (1, ROWS, WIDTH, ROWS)
OUTSIDE = "outside the compiled graphs"


@pytest.mark.parametrize(
    ("kind", "layouts", "sizes", "reason"),
    [
        ("addbmm", (), BATCHED, "unsupported operator aten.addbmm"),
        ("baddbmm", (), BATCHED, ""),
        ("scaled mm", (), FLAT, "quantized by the model"),
        ("sparse mm", (torch.sparse_coo,), MIXED, OUTSIDE),
        ("sparse @ dense", (torch.sparse_coo,), MIXED, OUTSIDE),
        ("sparse @ dense", (torch.sparse_csr,), MIXED, OUTSIDE),
        ("sparse buffer", (), MIXED, OUTSIDE),
        ("sparse made", (), MIXED, OUTSIDE),
        ("custom", (), FLAT, "opaque operator mx_counting.product"),
        ("custom batched", (), BATCHED, "opaque operator mx_counting.batched"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_every_product_is_counted(kind: str, layouts: Any, sizes: tuple[int, ...], reason: str) -> None:
    others = map(sparse, layouts)
    report = mxcompile.explain(
        Model(kind), torch.randn(ROWS, WIDTH), *others, policy=EVERYTHING, training=False, strict=False
    )
    (layer,) = [g for g in report.gemms if g.name == "fc"]
    (gemm,) = [g for g in report.gemms if g.name != "fc"]
    assert layer.flops == LAYER
    assert (gemm.batch, gemm.m, gemm.n, gemm.k) == sizes
    batch, m, n, k = sizes
    flops = 2 * batch * m * n * k
    assert gemm.flops == flops
    assert (gemm.precision, gemm.reason) == (("bf16", reason) if reason else ("mxfp8", gemm.reason))
    quantized = sum(g.flops for g in (layer, gemm) if g.precision == "mxfp8")
    assert report.summary.flop_share == pytest.approx(quantized / (LAYER + flops))
    assert layer.precision == ("bf16" if layer.reason == OUTSIDE else "mxfp8")


def test_opaque_operator_is_recorded_with_unknown_flops() -> None:
    """Two matrices of one shape, and a result of the same: no product has these."""

    class Fused(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.ops.mx_counting.norm(x, y)

    (gemm,) = mxcompile.explain(Fused(), torch.randn(32, 64), torch.randn(32, 64), training=False).gemms
    assert (gemm.flops, gemm.reason) == (0, "opaque operator mx_counting.norm, unknown FLOPs")


class TitanExperts(nn.Module):
    """torchtitan's experts: rows sorted by expert, each group padded to a multiple with zeros."""

    ALIGN, EXPERTS, HIDDEN = 8, 4, 40

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, self.EXPERTS, bias=False)
        self.w1 = nn.Parameter(torch.randn(self.EXPERTS, self.HIDDEN, WIDTH))
        self.w2 = nn.Parameter(torch.randn(self.EXPERTS, WIDTH, self.HIDDEN))
        self.w3 = nn.Parameter(torch.randn(self.EXPERTS, self.HIDDEN, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = torch.sigmoid(self.gate(x)).topk(2, dim=-1)
        order = chosen.view(-1).argsort(stable=True)
        counts = torch.histc(chosen.view(-1).float(), self.EXPERTS, 0, self.EXPERTS - 1).long()
        routed = x[order // 2] * scores.view(-1, 1)[order]
        padded = (counts + self.ALIGN - 1) // self.ALIGN * self.ALIGN
        ends = padded.cumsum(0)
        starts = ends - padded - (counts.cumsum(0) - counts)
        places = torch.arange(len(order)) + starts[chosen.view(-1)[order]]
        where = torch.full((self.num_rows(len(x)),), len(order)).scatter(0, places, torch.arange(len(order)))
        with_zeros = torch.vstack((routed, routed.new_zeros(WIDTH)))
        out = self.experts(with_zeros[where], ends.int())
        back = torch.empty_like(with_zeros).index_put((where,), out)[:-1]
        return x + torch.zeros_like(x).index_add(0, order // 2, back)

    def experts(self, x: Tensor, ends: Tensor) -> Tensor:
        w1, w2, w3 = (w.bfloat16().transpose(-2, -1) for w in (self.w1, self.w2, self.w3))
        rows = x.bfloat16()
        h = F.silu(torch._grouped_mm(rows, w1, offs=ends)) * torch._grouped_mm(rows, w3, offs=ends)
        return torch._grouped_mm(h, w2, offs=ends).type_as(x)

    def num_rows(self, tokens: int) -> int:
        return 2 * tokens + self.EXPERTS * self.ALIGN


@pytest.mark.parametrize("training", [False, True])
def test_padded_groups_of_experts_are_experts(training: bool) -> None:
    model, x = nn.Sequential(TitanExperts(), TitanExperts()), torch.randn(ROWS, WIDTH)
    report = mxcompile.explain(model, x, training=training)
    roles = {g.name.removeprefix("0."): g.role for g in report.gemms if g.name.startswith("0.")}
    assert roles == {"gate": "router", "w1": "expert_in", "w3": "expert_in", "w2": "expert_out"}
    experts = [g for g in report.gemms if g.role.startswith("expert")]
    assert {g.precision for g in experts} == {"mxfp8"}
    rows = TitanExperts().num_rows(ROWS)
    passes = 3 if training else 1
    assert sum(g.flops for g in experts) == 2 * 3 * passes * 2 * rows * WIDTH * TitanExperts.HIDDEN
