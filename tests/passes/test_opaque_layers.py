"""Operators that read a layer's weight and hide the product: in the records, and errors under strict."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers import policies
from helpers.eager_backend import EagerBackend
from helpers.made import Made
from helpers.one_linear import policy
from helpers.policies import rule
from helpers.reports import EVERYTHING, report_of
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.flop_counter import register_flop_formula

import mxcompile
from mxcompile.errors import UnsupportedError

ROWS, WIDTH, WIDE = 40, 64, 96


@torch.library.custom_op("mx_opaque::linear", mutates_args=())
def opaque_linear(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.t()


@torch.library.custom_op("mx_opaque::linear_backward", mutates_args=())
def opaque_backward(dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return dy @ w, dy.t() @ x


opaque_linear.register_fake(lambda x, w: x.new_empty(*x.shape[:-1], w.shape[0]))
opaque_backward.register_fake(lambda dy, x, w: (torch.empty_like(x), torch.empty_like(w)))
opaque_linear.register_autograd(
    lambda ctx, dy: opaque_backward(dy.contiguous(), *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return torch.relu(x @ up.t()) @ down.t()


opaque_mlp, counted_mlp = (
    torch.library.custom_op(f"mx_opaque::{name}", mlp, mutates_args=()) for name in ("mlp", "counted_mlp")
)
for operator in (opaque_mlp, counted_mlp):
    operator.register_fake(lambda x, up, down: torch.empty_like(x))


@register_flop_formula(torch.ops.mx_opaque.counted_mlp)
def _flops(x: Any, up: Any, down: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 4 * x[0] * up[0] * up[1]


@torch.library.custom_op("mx_opaque::head_with_loss", mutates_args=())
def head_with_loss(x: Tensor, w: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return nn.functional.cross_entropy(x @ w.t(), target), torch.zeros_like(x), torch.zeros_like(w)


head_with_loss.register_fake(lambda x, w, _: (x.new_empty(()), torch.empty_like(x), torch.empty_like(w)))


@torch.library.custom_op("mx_opaque::into", mutates_args=("out",))
def product_into(out: Tensor, x: Tensor, w: Tensor) -> None:
    out.copy_(x @ w.t())


def closed_over(weight: Any) -> Callable[[Tensor], Tensor]:
    """Returns a custom operator that multiplies its input by a weight in its closure."""

    @torch.library.custom_op("mx_opaque::closed", mutates_args=())
    def closed(x: Tensor) -> Tensor:
        return x @ (weight.weight if isinstance(weight, nn.Module) else weight["w"]).t()

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


def inference(model: nn.Module, **options: Any) -> mxcompile.Report:
    return report_of(model, torch.randn(ROWS, WIDTH), training=False, **{"policy": EVERYTHING, **options})


def loss_of(x: Tensor, w: Tensor) -> Tensor:
    return head_with_loss(x, w, torch.zeros(ROWS, dtype=torch.long))[0]


def written(x: Tensor, w: Tensor) -> Tensor:
    out = x.new_empty(ROWS, WIDE)
    product_into(out, x, w)
    return out


GEMMS = [("fprop", ROWS, WIDE, WIDTH), ("dgrad", ROWS, WIDTH, WIDE), ("wgrad", WIDE, WIDTH, ROWS)]
CASES: dict[str, tuple[Callable[..., Tensor], tuple[str, ...], list[tuple[Any, ...]]]] = {
    "linear": (opaque_linear, ("up",), [("up", "fprop", ROWS, WIDE, WIDTH)]),
    "mlp": (opaque_mlp, ("up", "down"), [("up", "fprop", *[None] * 3), ("down", "fprop", *[None] * 3)]),
    "counted mlp": (
        counted_mlp, ("up", "down"),
        [("up", "fprop", ROWS, WIDE, WIDTH), ("down", "fprop", ROWS, WIDTH, WIDE)],
    ),
    "head with loss": (loss_of, ("up",), [("up", *gemm) for gemm in GEMMS]),
    "in place": (written, ("up",), [("up", "fprop", *[None] * 3)]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_operator_is_recorded_for_the_layers_whose_weights_it_reads(case: str) -> None:
    call, layers, expected = CASES[case]
    report = inference(Model(call, *layers))
    hidden = [gemm for gemm in report.gemms if gemm.name != "seen"]
    assert [(gemm.name, gemm.gemm, gemm.m, gemm.n, gemm.k) for gemm in hidden] == expected
    assert {gemm.precision for gemm in hidden} == {"bf16"}
    assert all(gemm.reason.startswith("opaque operator mx_opaque.") for gemm in hidden)
    assert "100.0% of matmul FLOPs" not in str(report)


@pytest.mark.parametrize("case", CASES)
def test_operator_raises_under_strict_if_a_rule_quantizes_its_layer(case: str) -> None:
    call, layers, _ = CASES[case]
    model = Model(call, *layers)
    with pytest.raises(BackendCompilerFailed, match="up fprop: opaque operator mx_opaque"):
        inference(model, strict=True)
    inference(model, policy=policies.policy(rule(name="seen")), strict=True)


@pytest.mark.parametrize("weight", [nn.Linear(WIDTH, WIDE), {"w": torch.randn(WIDE, WIDTH)}], ids=type)
def test_operator_that_closes_over_its_weight_is_recorded_and_raises_under_strict(weight: Any) -> None:
    model = Model(closed_over(weight))
    (hidden,) = (gemm for gemm in inference(model).gemms if gemm.name != "seen")
    assert (hidden.m, hidden.n, hidden.k, hidden.precision) == (ROWS, WIDE, WIDTH, "bf16")
    assert hidden.reason.startswith("opaque operator mx_opaque.closed")
    with pytest.raises(BackendCompilerFailed, match="fprop: opaque operator mx_opaque"):
        inference(model, strict=True)


LIBRARY = torch.library.Library("mx_opaque_kernels", "DEF")
"""Operators whose kernels no Python code shows, as those in C++."""
HELD: dict[str, Tensor] = {}


FAILURES: list[str] = []
"""What the operator `failing` raises in its next calls."""


def _failed_once(result: Tensor) -> Tensor:
    if FAILURES:
        raise ValueError(FAILURES.pop())
    return result


def _define(name: str, arguments: str, kernel: Callable[..., Tensor]) -> None:
    LIBRARY.define(f"{name}({arguments}) -> Tensor")
    LIBRARY.impl(name, kernel, "CPU")
    LIBRARY.impl(name, lambda x, *_: x.new_empty(x.shape[0], WIDE), "Meta")


_define("held", "Tensor x", lambda x: nn.functional.linear(x, HELD["w"]))
_define("flat", "Tensor x, Tensor w", lambda x, w: x @ w.view(WIDE, -1).t())
_define("codes", "Tensor x, Tensor w", lambda x, w: x @ (w.float() / 8).t())
_define("failing", "Tensor x", lambda x: _failed_once(nn.functional.linear(x, HELD["w"])))
_define("padded", "Tensor x", lambda x: nn.functional.pad(x, (0, WIDE - WIDTH)))
_define("gram", "Tensor x", lambda x: nn.functional.pad(x @ x.t() @ x, (0, WIDE - WIDTH)))


class Calling(nn.Module):
    """Calls an operator with its input, and with a parameter that is no matrix, or codes."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.seen, self.name = nn.Linear(WIDTH, WIDTH), name
        self.up = nn.Linear(WIDTH, WIDE, bias=False)
        if name == "flat":
            self.up.weight = nn.Parameter(torch.randn(WIDE * WIDTH))
        elif name == "codes":
            del self.up.weight
            self.up.register_buffer("weight", torch.randint(-8, 8, (WIDE, WIDTH), dtype=torch.int8))
        HELD["w"] = self.up.weight.detach() if name in ("held", "failing") else torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        more = (self.up.weight,) if self.name in ("flat", "codes") else ()
        return getattr(torch.ops.mx_opaque_kernels, self.name)(self.seen(x), *more)


@pytest.mark.parametrize("name", ["held", "flat", "codes"])
@torch.no_grad()
def test_kernel_that_multiplies_by_a_weight_is_recorded_and_raises_under_strict(name: str) -> None:
    model, x = Calling(name), torch.randn(ROWS, WIDTH)
    call = torch.compile(model, backend=EagerBackend(policy=EVERYTHING), fullgraph=True)
    assert torch.equal(call(x), call(x))
    (report,) = mxcompile.reports()
    hidden = [gemm for gemm in report.gemms if gemm.name != "seen"]
    assert [(g.name, g.m, g.n, g.k, g.precision) for g in hidden] == [("up", ROWS, WIDE, WIDTH, "bf16")]
    assert hidden[0].reason == f"opaque operator mx_opaque_kernels.{name}.default"
    torch._dynamo.reset()
    strict = torch.compile(model, backend=EagerBackend(policy=EVERYTHING, strict=True), fullgraph=True)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=f"up fprop: opaque operator mx_opaque_kernels.{name}"):
            strict(x)


@torch.no_grad()
def test_products_of_a_call_that_failed_are_not_recorded_twice() -> None:
    call = torch.compile(Calling("failing"), backend=EagerBackend(policy=EVERYTHING), fullgraph=True)
    FAILURES.append("the first call fails after its product")
    with pytest.raises(ValueError, match="the first call fails"):
        call(torch.randn(ROWS, WIDTH))
    call(torch.randn(ROWS, WIDTH))
    (report,) = mxcompile.reports()
    assert [gemm.name for gemm in report.gemms] == ["seen", "up"]


@pytest.mark.parametrize(("name", "products"), [("padded", 0), ("gram", 2)])
def test_kernel_without_a_weight_passes_strict(name: str, products: int) -> None:
    report = inference(Calling(name), strict=True)
    assert [gemm.precision for gemm in report.gemms] == ["mxfp8"] + ["bf16"] * products


def test_operator_of_the_backward_is_of_the_layer_too() -> None:
    report = report_of(Model(opaque_linear, "up"), torch.randn(ROWS, WIDTH), policy=EVERYTHING)
    assert [(g.gemm, g.m, g.n, g.k) for g in report.gemms if g.name == "up"] == [
        ("fprop", ROWS, WIDE, WIDTH),
        ("dgrad", None, None, None),
    ]


@torch.library.custom_op("mx_opaque::linear_with_plain_backward", mutates_args=())
def linear_with_plain_backward(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.t()


linear_with_plain_backward.register_fake(lambda x, w: x.new_empty(*x.shape[:-1], w.shape[0]))
E5M2_GRADIENTS = policy({"precision": "mxfp8", "grad_dtype": "e5m2"})
PLAIN_BACKWARDS = {
    "as torch writes them": lambda dy, x, w: (dy @ w, dy.t() @ x),
    "transposed": lambda dy, x, w: ((w.t() @ dy.t()).t(), (x.t() @ dy).t()),
}


@pytest.mark.parametrize("wide", [WIDE, WIDTH], ids=["n != k", "n == k"])
@pytest.mark.parametrize("way", PLAIN_BACKWARDS)
def test_plain_products_of_the_backward_of_an_operator_are_gradients_of_its_layer(
    way: str, wide: int
) -> None:
    linear_with_plain_backward.register_autograd(
        lambda ctx, dy: PLAIN_BACKWARDS[way](dy, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    torch.manual_seed(0)
    plain, hiding = nn.Linear(WIDTH, wide, bias=False), nn.Linear(WIDTH, wide, bias=False)
    hiding.load_state_dict(plain.state_dict())
    hiding.forward = lambda x: linear_with_plain_backward(x, hiding.weight)  # type: ignore[method-assign]
    gradients = []
    for layer in (plain, hiding):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
        model = nn.Sequential(OrderedDict(up=layer))
        y = torch.compile(model, backend=EagerBackend(policy=E5M2_GRADIENTS))(x)
        (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
        gradients.append((x.grad, layer.weight.grad))
        gemms = [(g.name, g.gemm, g.precision) for g in mxcompile.reports()[-1].gemms]
        assert sorted(gemms[1:]) == [("up", "dgrad", "mxfp8"), ("up", "wgrad", "mxfp8")]
    assert gemms[0] == ("up", "fprop", "bf16")
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)


@torch.library.custom_op("mx_opaque::gated_with_plain_backward", mutates_args=())
def gated_with_plain_backward(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return ((x @ gate.t()) * (x @ up.t())) @ down.t()


gated_with_plain_backward.register_fake(lambda x, gate, up, down: torch.empty_like(x))


def _gated_backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
    x, gate, up, down = ctx.saved_tensors
    left, right = x @ gate.t(), x @ up.t()
    inner = dy @ down
    by_gate, by_up = inner * right, inner * left
    return by_gate @ gate + by_up @ up, by_gate.t() @ x, by_up.t() @ x, dy.t() @ (left * right)


gated_with_plain_backward.register_autograd(
    _gated_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


def test_layers_that_one_operator_hides_have_their_own_gradients() -> None:
    class Gated(Made, gate=(WIDTH, WIDE, False), up=(WIDTH, WIDE, False), down=(WIDE, WIDTH, False)):
        def forward(self, x: Tensor) -> Tensor:
            return gated_with_plain_backward(x, self.gate.weight, self.up.weight, self.down.weight)

    report = report_of(Gated(), torch.randn(ROWS, WIDTH, requires_grad=True), policy=EVERYTHING)
    sizes = {"gate": (WIDE, WIDTH), "up": (WIDE, WIDTH), "down": (WIDTH, WIDE)}
    assert {(g.name, (g.m, g.n)) for g in report.gemms if g.gemm == "wgrad"} == set(sizes.items())
    assert sorted(g.name for g in report.gemms if g.gemm == "dgrad") == sorted(sizes)
    assert all(g.precision == "mxfp8" for g in report.gemms if g.gemm != "fprop")


LIBRARY.define("back(Tensor dy) -> Tensor")
LIBRARY.impl("back", lambda dy: _failed_once(dy @ HELD["w"]), "CPU")
LIBRARY.impl("back", lambda dy: dy.new_empty(dy.shape[0], WIDTH), "Meta")


def _pull(ctx: Any, dy: Tensor) -> Tensor:
    return torch.ops.mx_opaque_kernels.back(dy.contiguous())


torch.library.register_autograd("mx_opaque_kernels::held", _pull, lib=LIBRARY)
torch.library.register_autograd("mx_opaque_kernels::padded", _pull, lib=LIBRARY)


@pytest.mark.parametrize(("name", "kinds"), [("held", ["fprop", "dgrad"]), ("padded", ["dgrad"])])
def test_kernel_of_the_backward_that_multiplies_by_a_weight_is_recorded(name: str, kinds: list[str]) -> None:
    model, x = Calling(name), torch.randn(ROWS, WIDTH)
    HELD["w"] = model.up.weight.detach()
    call = torch.compile(model, backend=EagerBackend(policy=EVERYTHING), fullgraph=True)
    FAILURES[:] = ["the first backward fails after its product"] * (name == "padded")
    for _ in FAILURES[:]:
        with pytest.raises(ValueError, match="the first backward fails"):
            call(x).sum().backward()
    for _ in range(2):
        call(x).sum().backward()
    (report,) = mxcompile.reports()
    hidden = [(g.gemm, g.precision) for g in report.gemms if g.name == "up"]
    assert hidden == [(kind, "bf16") for kind in kinds]
    assert report.gemms[-1].reason == "opaque operator mx_opaque_kernels.back.default"
    torch._dynamo.reset()
    strict = EagerBackend(policy=EVERYTHING, strict=True)
    loss = torch.compile(Calling("padded"), backend=strict, fullgraph=True)(x)
    HELD["w"] = model.up.weight.detach()
    with pytest.raises(UnsupportedError, match="dgrad: opaque operator mx_opaque_kernels"):
        loss.sum().backward()


@pytest.mark.parametrize("strict", [False, True])
def test_kernel_of_a_backward_under_compiled_autograd_is_recorded_or_raises(strict: bool) -> None:
    model, backend = Calling("padded"), EagerBackend(policy=EVERYTHING, strict=strict)
    HELD["w"] = model.up.weight.detach()
    loss = torch.compile(model, backend=backend, fullgraph=True)(torch.randn(ROWS, WIDTH)).sum()
    raising = pytest.raises(UnsupportedError, match="up dgrad: opaque operator mx_opaque_kernels")
    with (
        torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)),
        raising if strict else nullcontext(),
    ):
        loss.backward()
    (report,) = mxcompile.reports()
    assert [(g.gemm, g.precision) for g in report.gemms if g.name == "up"] == [("dgrad", "bf16")]


@pytest.mark.skipif(
    not hasattr(nn, "LinearCrossEntropyOptions"), reason="torch has no fused head before 2.14"
)
def test_fused_head_of_torch_is_recorded_with_its_gradients() -> None:
    class Head(Made, up=(WIDTH, WIDTH), head=(WIDTH, WIDE, False)):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            options = nn.LinearCrossEntropyOptions()  # type: ignore[attr-defined]
            loss: Tensor = nn.functional.linear_cross_entropy(  # type: ignore[attr-defined]
                self.up(x), self.head.weight, target, options=options
            )
            return loss

    model, x, target = Head(), torch.randn(ROWS, WIDTH), torch.zeros(ROWS, dtype=torch.long)
    report = report_of(model, x, target, fullgraph=False, policy=EVERYTHING)
    head = [gemm for gemm in report.gemms if gemm.name == "head"]
    assert [(g.gemm, g.m, g.n, g.k) for g in head] == GEMMS
    assert all(gemm.code == "opaque operator" for gemm in head)
    with pytest.raises(BackendCompilerFailed, match="head: opaque operator"):
        report_of(model, x, target, fullgraph=False, policy=EVERYTHING, strict=True)
