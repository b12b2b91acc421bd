"""Everything that multiplies is counted, and what is a linear layer by structure is quantized as one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.eager_backend import EagerBackend
from helpers.fresh import forget
from helpers.made import Made
from helpers.needs import skip_without_backward_of_fp32_experts
from helpers.reports import EVERYTHING
from torch import Tensor, nn
from torch.nn import functional as F

import mxcompile


def run(model: nn.Module, x: Tensor, policy: Any = EVERYTHING) -> tuple[list[Tensor], mxcompile.Report]:
    """Result and all gradients of a step of `model` under `policy`, and the report."""
    forget()
    model = copy.deepcopy(model)
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = torch.compile(model, backend=EagerBackend(policy=policy))(x)
    torch.manual_seed(1)
    y.backward(torch.randn(y.shape))
    (report,) = mxcompile.reports()
    return [y, x.grad, *(p.grad for p in model.parameters())], report


def by_gemm(report: mxcompile.Report, name: str) -> dict[str, tuple[int, ...]]:
    return {g.gemm: (g.batch, g.m, g.n, g.k) for g in report.gemms if g.name == name}


class Pointwise(Made, mix=lambda: nn.Conv2d(64, 96, 1)):
    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)


class AsLinear(nn.Module):
    """The same as a linear layer over channels that come last."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        assert conv.bias is not None
        self.weight = nn.Parameter(conv.weight.detach()[:, :, 0, 0].clone())
        self.bias = nn.Parameter(conv.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.permute(0, 2, 3, 1), self.weight, self.bias).permute(0, 3, 1, 2)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_pointwise_convolution_is_the_linear_layer_it_is(layout: torch.memory_format) -> None:
    model = Pointwise()
    same = AsLinear(model.mix)
    x = torch.randn(2, 64, 5, 7).contiguous(memory_format=layout)
    results, report = run(model, x)
    expected, _ = run(same, x)
    eager = model(x)
    assert results[0].stride() == eager.stride()
    assert not torch.equal(results[0], eager)
    for computed, right in zip(results, expected, strict=True):
        torch.testing.assert_close(computed.reshape(right.shape), right, rtol=1e-5, atol=1e-5)
    assert {g.precision for g in report.gemms} == {"mxfp8"}
    assert by_gemm(report, "mix") == {
        "fprop": (1, 70, 96, 64), "dgrad": (1, 70, 64, 96), "wgrad": (1, 96, 64, 70)
    }  # fmt: skip


def test_parts_of_a_convolutions_gradients_can_stay() -> None:
    use = {"fprop": "mxfp8", "dgrad": "bf16", "wgrad": "mxfp8"}
    policy = {**EVERYTHING, "rules": [{"match": {"name": "*"}, "use": use}]}
    model, x = Pointwise(), torch.randn(2, 64, 5, 7)
    (_, dx, dw, db), report = run(model, x, policy)
    (_, dx_q, dw_q, _), _ = run(model, x)
    reference = copy.deepcopy(model).double()
    torch.manual_seed(1)
    reference_x = x.double().requires_grad_()
    y = reference(reference_x)
    y.backward(torch.randn(y.shape).double())
    assert {g.gemm: g.precision for g in report.gemms} == use
    torch.testing.assert_close(db.double(), reference.mix.bias.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dx.double(), reference_x.grad, rtol=1e-4, atol=1e-4)
    assert not torch.equal(dx, dx_q)
    assert torch.equal(dw, dw_q)


class Spatial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 64, 4, stride=4)
        self.depthwise = nn.Conv2d(64, 64, 3, padding=1, groups=64)
        self.up = nn.ConvTranspose2d(64, 32, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.depthwise(self.patch(x)))


def test_other_convolutions_have_records_with_flops_and_a_reason_and_do_not_change() -> None:
    model, x = Spatial(), torch.randn(2, 3, 16, 16)
    (y, dx, *_), report = run(model, x)
    torch.testing.assert_close(y, model(x))
    reasons = {g.name: g.reason for g in report.gemms}
    assert reasons == {
        "patch": "convolution 4×4, stride 4",
        "depthwise": "convolution 3×3, 64 groups",
        "up": "transposed convolution 2×2, stride 2",
    }
    flops = {name: sum(g.flops for g in report.gemms if g.name == name) for name in reasons}
    pixels = 2 * 4 * 4
    assert (flops["patch"], flops["depthwise"]) == (3 * 2 * pixels * 64 * 3 * 16, 3 * 2 * pixels * 64 * 9)
    assert flops["up"] == 3 * 2 * pixels * 64 * 32 * 4
    assert dx is not None


class Distances(Made, codes=lambda: nn.Parameter(torch.randn(30, 64))):
    def forward(self, x: Tensor) -> Tensor:
        if not self.spelled:
            return torch.cdist(x, self.codes)
        return x.pow(2).sum(1, keepdim=True) + self.codes.pow(2).sum(1) - 2 * x @ self.codes.t()


@pytest.mark.parametrize("spelled", [False, True])
def test_distances_to_a_parameter_are_not_a_layer(spelled: bool) -> None:
    """Of x equal to a code, the distance is a small difference of large terms."""
    model = Distances(spelled=spelled)
    x = model.codes.detach().repeat(2, 1) + 1e-2
    (y, *_), report = run(model, x)
    torch.testing.assert_close(y, model(x))
    assert report.gemms
    assert {g.precision for g in report.gemms} == {"bf16"}


class Regularized(Made, layer=(64, 64, False)):
    """A layer whose weight's squares are in the loss, not in the result."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu() * 2 + 1e-3 * self.layer.weight.pow(2).sum()


def test_a_layer_with_weight_decay_in_the_graph_is_a_layer() -> None:
    _, report = run(Regularized(), torch.randn(32, 64))
    assert {g.precision for g in report.gemms} == {"mxfp8"}


class Picked(nn.Module):
    """Experts by a gather of their weights, or by a loop over expert numbers that are data."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(4, 96, 64))
        self.register_buffer("numbers", torch.arange(num_rows) % 4, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(self.experts[self.chosen], x.unsqueeze(-1)).squeeze(-1)

    @property
    def chosen(self) -> Tensor:
        return self.numbers


class Stacked(nn.Module):
    """The same rows through a product batched over experts."""

    def __init__(self, picked: Picked) -> None:
        super().__init__()
        self.experts = nn.Parameter(picked.experts.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        groups = x.view(-1, 4, 64).transpose(0, 1)
        return torch.bmm(groups, self.experts.transpose(1, 2)).transpose(0, 1).reshape(-1, 96)


@pytest.mark.parametrize("num_rows", [4, 40], ids=["weights_picked_first", "codes_picked"])
def test_experts_picked_from_a_stack_are_layers_with_that_stack_as_weight(num_rows: int) -> None:
    model, x = Picked(num_rows), torch.randn(num_rows, 64)
    results, report = run(model, x)
    expected, _ = run(Stacked(model), x)
    for computed, right in zip(results[:2], expected[:2], strict=True):  # dW of one row has blocks of its own
        torch.testing.assert_close(computed, right, rtol=1e-5, atol=1e-5)
    assert {(g.name, g.precision) for g in report.gemms} == {("experts", "mxfp8")}
    assert by_gemm(report, "experts")["fprop"] == (num_rows, 1, 96, 64)
    assert report.summary.weight_bytes == model.experts.numel() * 4


def grouped_fallback() -> Any:
    """The product of Hugging Face's experts with FP32 weights, which importing it registers."""
    skip_without_backward_of_fp32_experts()
    from transformers.integrations import moe

    return moe._grouped_linear


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(4, 96, 64))
        self.register_buffer("offsets", torch.tensor([10, 10, 30, 46], dtype=torch.int32))
        self.product = grouped_fallback()

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.experts, self.offsets)


class Looped(nn.Module):
    """The same, group after group."""

    def __init__(self, grouped: Grouped) -> None:
        super().__init__()
        self.experts = nn.Parameter(grouped.experts.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        groups = [
            x[:10] @ self.experts[0].t(),
            x[10:30] @ self.experts[2].t(),
            x[30:46] @ self.experts[3].t(),
        ]
        return torch.cat([*groups, x.new_zeros(4, 96)])


def test_grouped_products_with_fp32_weights_are_quantized_forward_and_backward() -> None:
    model = Grouped()
    x = torch.randn(50, 64)
    results, report = run(model, x)
    expected, _ = run(Looped(model), x)
    for computed, right in zip(results[:2], expected[:2], strict=True):
        torch.testing.assert_close(computed, right, rtol=1e-5, atol=1e-5)
    reference = copy.deepcopy(model)
    torch.manual_seed(1)
    y = reference(x)
    y.backward(torch.randn(y.shape))
    dw = reference.experts.grad
    assert 0 < (results[2] - dw).double().pow(2).sum() / dw.double().pow(2).sum() < 10**-2.75
    assert by_gemm(report, "experts") == {
        "fprop": (1, 50, 96, 64), "dgrad": (1, 50, 64, 96), "wgrad": (1, 64, 96, 50)
    }  # fmt: skip


def test_unquantized_grouped_mm_keeps_its_backward_operator() -> None:
    model, x = Grouped(), torch.randn(50, 64)
    backend = EagerBackend(policy="bf16")
    torch.compile(model, backend=backend)(x.requires_grad_()).sum().backward()
    backward = [str(n.target) for n in backend.graphs[-1].graph.nodes if n.op == "call_function"]
    assert backward.count("transformers.grouped_mm_fallback_backward.default") == 1


class Bilinear(Made, form=lambda: nn.Bilinear(5, 6, 7)):
    def forward(self, x: Tensor) -> Tensor:
        return self.form(x[:, :5], x[:, 5:])


def test_opaque_operators_count_by_their_inputs() -> None:
    _, report = run(Bilinear(), torch.randn(32, 11))
    (forward,) = [g for g in report.gemms if g.gemm == "fprop"]
    assert (forward.flops, forward.reason) == (2 * 32 * 7 * 5 * 6, "opaque operator aten._trilinear")
    assert all(g.flops == forward.flops for g in report.gemms)
