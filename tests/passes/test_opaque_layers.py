"""Operators that read a layer's weight and hide the product: in the records, and errors under strict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.eager_backend import EagerBackend
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.flop_counter import register_flop_formula

import mxcompile

ROWS, WIDTH, WIDE = 40, 64, 96
ALL = {"version": 1, "rules": [{"match": {"name": "*"}, "use": "mxfp8"}]}


@torch.library.custom_op("mx_opaque::linear", mutates_args=())
def opaque_linear(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.t()


@opaque_linear.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], w.shape[0])


@torch.library.custom_op("mx_opaque::linear_backward", mutates_args=())
def opaque_backward(dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return dy @ w, dy.t() @ x


@opaque_backward.register_fake
def _(dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(w)


opaque_linear.register_autograd(
    lambda ctx, dy: opaque_backward(dy.contiguous(), *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@torch.library.custom_op("mx_opaque::mlp", mutates_args=())
def opaque_mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return torch.relu(x @ up.t()) @ down.t()


@opaque_mlp.register_fake
def _(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("mx_opaque::counted_mlp", mutates_args=())
def counted_mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return torch.relu(x @ up.t()) @ down.t()


@counted_mlp.register_fake
def _(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return torch.empty_like(x)


@register_flop_formula(torch.ops.mx_opaque.counted_mlp)
def _flops(x: Any, up: Any, down: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 4 * x[0] * up[0] * up[1]


@torch.library.custom_op("mx_opaque::head_with_loss", mutates_args=())
def head_with_loss(x: Tensor, w: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    loss = nn.functional.cross_entropy(x @ w.t(), target)
    return loss, torch.zeros_like(x), torch.zeros_like(w)


@head_with_loss.register_fake
def _(x: Tensor, w: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(()), torch.empty_like(x), torch.empty_like(w)


@torch.library.custom_op("mx_opaque::into", mutates_args=("out",))
def product_into(out: Tensor, x: Tensor, w: Tensor) -> None:
    out.copy_(x @ w.t())


def closed_over(held: Any) -> Callable[[Tensor], Tensor]:
    """Returns a custom operator that multiplies its input by a weight in its closure."""

    @torch.library.custom_op("mx_opaque::closed", mutates_args=())
    def closed(x: Tensor) -> Tensor:
        return x @ (held.weight if isinstance(held, nn.Module) else held["w"]).t()

    closed.register_fake(lambda x: x.new_empty(*x.shape[:-1], WIDE))
    return closed


class Model(nn.Module):
    """A layer in sight, and one or two whose weights an operator reads."""

    def __init__(self, call: Callable[..., Tensor], *layers: str) -> None:
        super().__init__()
        self.seen = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDE, bias=False), nn.Linear(WIDE, WIDTH, bias=False)
        self.call, self.layers = call, layers

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.seen(x), *(self.get_submodule(layer).weight for layer in self.layers))


def loss_of(x: Tensor, w: Tensor) -> Tensor:
    loss: Tensor = head_with_loss(x, w, torch.zeros(ROWS, dtype=torch.long))[0]
    return loss


def written(x: Tensor, w: Tensor) -> Tensor:
    out = x.new_empty(ROWS, WIDE)
    product_into(out, x, w)
    return out


CASES: dict[str, tuple[Callable[..., Tensor], tuple[str, ...], list[tuple[Any, ...]]]] = {
    "linear": (opaque_linear, ("up",), [("up", "fprop", ROWS, WIDE, WIDTH)]),
    "mlp": (opaque_mlp, ("up", "down"), [("up", "fprop", *[None] * 3), ("down", "fprop", *[None] * 3)]),
    "counted mlp": (
        counted_mlp,
        ("up", "down"),
        [("up", "fprop", ROWS, WIDE, WIDTH), ("down", "fprop", ROWS, WIDTH, WIDE)],
    ),
    "head with loss": (
        loss_of,
        ("up",),
        [
            ("up", "fprop", ROWS, WIDE, WIDTH),
            ("up", "dgrad", ROWS, WIDTH, WIDE),
            ("up", "wgrad", WIDE, WIDTH, ROWS),
        ],
    ),
    "in place": (written, ("up",), [("up", "fprop", *[None] * 3)]),
}


@pytest.mark.parametrize("case", CASES)
def test_operator_is_recorded_for_the_layers_whose_weights_it_reads(case: str) -> None:
    call, layers, expected = CASES[case]
    with torch.no_grad():
        torch.compile(Model(call, *layers), backend=EagerBackend(policy=ALL), fullgraph=True)(
            torch.randn(ROWS, WIDTH)
        )
    (report,) = mxcompile.reports()
    hidden = [gemm for gemm in report.gemms if gemm.name != "seen"]
    assert [(gemm.name, gemm.gemm, gemm.m, gemm.n, gemm.k) for gemm in hidden] == expected
    assert {gemm.precision for gemm in hidden} == {"bf16"}
    assert all(gemm.reason.startswith("opaque operator mx_opaque.") for gemm in hidden)
    assert "100.0% of matmul FLOPs" not in str(report)


@pytest.mark.parametrize("case", CASES)
def test_operator_raises_under_strict_if_a_rule_quantizes_its_layer(case: str) -> None:
    call, layers, _ = CASES[case]
    model, x = Model(call, *layers), torch.randn(ROWS, WIDTH)
    with torch.no_grad(), pytest.raises(BackendCompilerFailed, match="up fprop: opaque operator mx_opaque"):
        torch.compile(model, backend=EagerBackend(policy=ALL, strict=True), fullgraph=True)(x)
    torch._dynamo.reset()
    kept = {"version": 1, "preset": "bf16", "rules": [{"match": {"name": "seen"}, "use": "mxfp8"}]}
    with torch.no_grad():
        torch.compile(model, backend=EagerBackend(policy=kept, strict=True), fullgraph=True)(x)


@pytest.mark.parametrize("held", [nn.Linear(WIDTH, WIDE), {"w": torch.randn(WIDE, WIDTH)}], ids=type)
def test_operator_that_closes_over_its_weight_is_recorded_and_raises_under_strict(held: Any) -> None:
    model, x = Model(closed_over(held)), torch.randn(ROWS, WIDTH)
    with torch.no_grad():
        torch.compile(model, backend=EagerBackend(policy=ALL), fullgraph=True)(x)
    (report,) = mxcompile.reports()
    (hidden,) = (gemm for gemm in report.gemms if gemm.name != "seen")
    assert (hidden.m, hidden.n, hidden.k, hidden.precision) == (ROWS, WIDE, WIDTH, "bf16")
    assert hidden.reason.startswith("opaque operator mx_opaque.closed")
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(BackendCompilerFailed, match="fprop: opaque operator mx_opaque"):
        torch.compile(model, backend=EagerBackend(policy=ALL, strict=True), fullgraph=True)(x)


def test_operator_of_the_backward_is_of_the_layer_too() -> None:
    model, x = Model(opaque_linear, "up"), torch.randn(ROWS, WIDTH)
    torch.compile(model, backend=EagerBackend(policy=ALL), fullgraph=True)(x).sum().backward()
    (report,) = mxcompile.reports()
    assert [(g.gemm, g.m, g.n, g.k) for g in report.gemms if g.name == "up"] == [
        ("fprop", ROWS, WIDE, WIDTH),
        ("dgrad", None, None, None),
    ]


@pytest.mark.skipif(
    not hasattr(nn, "LinearCrossEntropyOptions"), reason="torch has no fused head before 2.14"
)
def test_fused_head_of_torch_is_recorded_with_its_gradients() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDE, bias=False)

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            options = nn.LinearCrossEntropyOptions()  # type: ignore[attr-defined]
            loss: Tensor = nn.functional.linear_cross_entropy(  # type: ignore[attr-defined]
                self.up(x), self.head.weight, target, options=options
            )
            return loss

    model, x, target = Head(), torch.randn(ROWS, WIDTH), torch.zeros(ROWS, dtype=torch.long)
    torch.compile(model, backend=EagerBackend(policy=ALL))(x, target).backward()
    (report,) = mxcompile.reports()
    head = [gemm for gemm in report.gemms if gemm.name == "head"]
    assert [(g.gemm, g.m, g.n, g.k) for g in head] == [
        ("fprop", ROWS, WIDE, WIDTH),
        ("dgrad", ROWS, WIDTH, WIDE),
        ("wgrad", WIDE, WIDTH, ROWS),
    ]
    assert all(gemm.code == "opaque operator" for gemm in head)
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed, match="head: opaque operator"):
        torch.compile(model, backend=EagerBackend(policy=ALL, strict=True))(x, target)
