"""Weights that are not parameters: rules reach them by a name, or a record says why they stay."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.eager_backend import EagerBackend
from helpers.made import Made, calling
from helpers.policies import policy, rule
from helpers.reference import round_trip
from helpers.reports import EVERYTHING, all_gemms, precisions
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import mxcompile
from mxcompile.errors import UnsupportedError

REASON = "its weight is an argument of the call, not a parameter"
ROWS, IN, HIDDEN = 40, 64, 96


def data() -> Tensor:
    return torch.randn(ROWS, IN)


def weights() -> tuple[Tensor, Tensor]:
    return torch.randn(HIDDEN, IN), torch.randn(IN, HIDDEN)


def feed_forward(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.relu(F.linear(x, up)), down)


UP, DOWN = torch.randn(HIDDEN, IN), [torch.randn(IN, HIDDEN)]


PAIR = torch.randn(HIDDEN, IN), torch.randn(IN, HIDDEN)


class Quantized(TorchFunctionMode):
    """Runs linear layers without a bias on operands that went through MXFP8."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and (len(args) == 2 or args[2] is None):
            return F.linear(*(round_trip(operand.detach().float(), 1) for operand in args[:2]))
        return func(*args, **(kwargs or {}))


class Attributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, (_, down) = weights()[0], weights()
        self.rest = {"down": [down]}

    def forward(self, x: Tensor) -> Tensor:
        return feed_forward(x, self.up, self.rest["down"][0])


class OfAnObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        up, down = weights()
        self.layers = SimpleNamespace(weights={"up": up}, down=down)

    def forward(self, x: Tensor) -> Tensor:
        return feed_forward(x, self.layers.weights["up"], self.layers.down)


class OfItsClass(nn.Module):
    UP, DOWN = torch.randn(HIDDEN, IN), (torch.randn(IN, HIDDEN),)

    def forward(self, x: Tensor) -> Tensor:
        return feed_forward(x, self.UP, self.DOWN[0])


class Masked(nn.Module):
    """A parameter times a mask in an attribute, and FP8 codes in a buffer times scales in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        up, down = weights()
        self.up, self.mask = nn.Parameter(up), (torch.rand_like(up) > 0.5).float()
        self.register_buffer("down", down.to(torch.float8_e4m3fn))
        self.scale = torch.rand(IN, 1)

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.down, Tensor)
        return feed_forward(x, self.up * self.mask, self.down.to(x.dtype) * self.scale)


class Codes(nn.Module):
    """Integers in an attribute times scales; indices of a table in a buffer that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.up = {
            "codes": torch.randint(-9, 9, (HIDDEN, IN), dtype=torch.int8),
            "scale": torch.rand(HIDDEN, 1),
        }
        self.register_buffer("down", torch.randint(0, 256, (IN, HIDDEN // 2)), persistent=False)
        self.register_buffer("table", torch.randn(16), persistent=False)
        self.register_buffer("scale", torch.rand(IN, 3, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.down, Tensor)
        assert isinstance(self.table, Tensor)
        halves = self.table[torch.stack([self.down & 15, self.down >> 4], -1)]
        down = halves.view(IN, 3, HIDDEN // 3) * self.scale
        return feed_forward(x, self.up["scale"] * self.up["codes"].float(), down.view(IN, HIDDEN))


class MaskedFirst(nn.Module):
    """The mask is as large as its weight and comes first, once a buffer and once a condition."""

    def __init__(self) -> None:
        super().__init__()
        up, down = weights()
        self.up, self.down, self.kept = nn.Parameter(up), nn.Parameter(down), torch.rand_like(down) > 0.5
        self.register_buffer("mask", (torch.rand_like(up) > 0.5).float())

    def forward(self, x: Tensor) -> Tensor:
        return feed_forward(x, self.mask * self.up, torch.where(self.kept, self.down, 0.0))


def partial() -> Callable[[Tensor], Tensor]:
    up, down = weights()
    return functools.partial(lambda layer, x, *, last: feed_forward(x, layer, last), up, last=down)


def closure() -> Callable[[Tensor], Tensor]:
    up, down = weights()
    return lambda x: feed_forward(x, up, down)


def linear(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: F.linear(x, weight)


def two_closures() -> Callable[[Tensor], Tensor]:
    first, rest = linear(weights()[0]), [linear(weights()[1])]
    return lambda x: rest[0](F.gelu(first(x)))


class InADefault(nn.Module):
    def forward(self, x: Tensor, up: Tensor = UP, *, down: Tensor = DOWN[0]) -> Tensor:
        return feed_forward(x, up, down)


def defaults() -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor, up: Tensor = UP, *, down: Tensor = DOWN[0]) -> Tensor:
        return feed_forward(x, up, down)

    return forward


HOLDERS: list[tuple[Callable[[], Any], set[str]]] = [
    (Attributes, {"up", "rest.down.0"}),
    (OfAnObject, {"layers.weights.up", "layers.down"}),
    (lambda: calling(lambda self, x: feed_forward(x, UP, DOWN[0])), {"UP", "DOWN.0"}),
    (Masked, {"up", "down"}),
    (MaskedFirst, {"up", "down"}),
    (Codes, {"up.codes", "down"}),
    (OfItsClass, {"UP", "DOWN.0"}),
    (closure, {"up", "down"}),
    (two_closures, {"first", "rest.0"}),
    (lambda: lambda x: feed_forward(x, *PAIR), {"PAIR.0", "PAIR.1"}),
    (InADefault, {"up", "down"}),
    (defaults, {"up", "down"}),
    (partial, {"fn.args.0", "fn.keywords.last"}),
]


def layers(
    call: Callable[..., Any], *args: Any, policy: Any = EVERYTHING, strict: bool = True
) -> dict[str, set[str]]:
    """Precisions of the GEMMs of every layer of `call`, compiled and run."""
    result = torch.compile(call, backend=EagerBackend(policy=policy, strict=strict))(*args)
    if result.requires_grad:
        result.sum().backward()
    return precisions()


def assert_quantized(result: Tensor, expected: Tensor) -> None:
    """Asserts equality to FP32's rounding, but for casts that another order of sums moves to a neighbour.

    Such a cast changes a result by about 2e-4; unquantized results are 5 apart.
    """
    error = (result - expected).abs()
    assert (error <= 1e-4 + 1e-5 * expected.abs()).double().mean() >= 0.99
    assert error.max() < 1e-3


@pytest.mark.parametrize(("holder", "names"), HOLDERS)
def test_weight_that_the_program_holds_is_quantized_under_its_name(holder: Any, names: set[str]) -> None:
    call, x = holder(), data()
    if isinstance(call, nn.Module):
        assert {gemm.name for gemm in mxcompile.explain(call, x, policy=EVERYTHING).gemms} == names
    with torch.no_grad():
        result = torch.compile(call, backend=EagerBackend(policy=EVERYTHING, strict=True))(x)
    with Quantized():
        assert_quantized(result, call(x))
    assert precisions() == {name: {"mxfp8"} for name in names}


@pytest.mark.parametrize("kind", [Attributes, OfAnObject, OfItsClass, MaskedFirst, Codes])
def test_held_weights_keep_names_and_decisions_behind_a_graph_break(kind: type[nn.Module]) -> None:
    class Broken(Made, inner=kind, tail=(IN, IN)):
        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(x)
            torch._dynamo.graph_break()
            return self.tail(x)

    model = Broken()
    expected = {gemm.name: {"mxfp8"} for gemm in mxcompile.explain(model, data(), policy=EVERYTHING).gemms}
    assert len(expected) == 3
    assert layers(model, data()) == expected


class Parts(nn.Module):
    """Three weights that are parts of one parameter. take: how."""

    def __init__(self, shape: tuple[int, ...], take: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.qkv, self.take, self.out = nn.Parameter(torch.randn(shape)), take, nn.Linear(IN, IN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.take(self.qkv)
        return self.out(F.linear(x, q).relu() + F.linear(x, k).sigmoid() + F.linear(x, v))


def squares(flat: Tensor) -> list[Tensor]:
    return [part.view(IN, IN) for part in flat.split(IN * IN)]


WAYS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Any]]] = {
    "chunk": ((3 * IN, IN), lambda w: w.chunk(3)),
    "split": ((3 * IN, IN), lambda w: w.split(IN)),
    "narrow": ((3 * IN, IN), lambda w: [w.narrow(0, index * IN, IN) for index in range(3)]),
    "unbind": ((3, IN, IN), lambda w: w.unbind()),
    "select": ((3, IN, IN), lambda w: [w[0], w[1], w.select(0, 2)]),
    "view and unbind": ((3 * IN, IN), lambda w: w.view(3, IN, IN).unbind()),
    "cast and split": ((3 * IN, IN), lambda w: w.bfloat16().float().split(IN)),
    "heads": ((3 * IN, IN), lambda w: [w.view(4, 3, -1, IN)[:, i].reshape(IN, IN) for i in range(3)]),
    "chunk of columns": ((IN, 3 * IN), lambda w: w.chunk(3, 1)),
    "unbind of columns": ((IN, 3, IN), lambda w: w.movedim(1, 0)),
    "unequal split": ((4 * IN, IN), lambda w: [part[:IN] for part in w.split([IN, IN, 2 * IN])]),
    "rows by number": ((3 * IN, IN), lambda w: [w[list(range(i, 3 * IN, 3))] for i in range(3)]),
    "index_select": ((3 * IN, IN), lambda w: [w.index_select(0, torch.arange(i, i + IN)) for i in range(3)]),
    "scaled and split": ((3 * IN, IN), lambda w: (w / 8).split(IN)),
    "flat, reshaped": ((3 * IN * IN,), lambda w: w.reshape(3, IN, IN)),
    "flat": ((3 * IN * IN,), squares),
    "flat slices": (
        (3 * IN * IN,),
        lambda w: [w[i * IN * IN : (i + 1) * IN * IN].view(IN, IN) for i in range(3)],
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_parts_of_a_parameter_have_its_name(way: str) -> None:
    model, x = Parts(*WAYS[way]), data()
    with torch.no_grad(), Quantized():
        expected = model(x)
    result = torch.compile(model, backend=EagerBackend(policy=policy(rule(name="qkv")), strict=True))(x)
    torch.testing.assert_close(result.detach(), expected, rtol=1e-4, atol=1e-3)
    result.sum().backward()
    assert precisions() == {"qkv": {"mxfp8"}, "out": {"bf16"}}
    assert [gemm.name for gemm in all_gemms() if gemm.gemm == "fprop"].count("qkv") == 3


class LatentAttention(Made, kv_b=lambda: nn.Parameter(torch.randn(4, 96, 64) / 8), o=(128, 64)):
    """The absorbed products of multi-head latent attention: one parameter, split along its rows."""

    def forward(self, q: Tensor) -> Tensor:
        keys, values = self.kv_b.split([64, 32], 1)
        c = torch.einsum("thn,hnr->thr", q.view(-1, 4, 64), keys)
        return self.o(torch.einsum("thr,hvr->thv", c, values).flatten(1))


def test_rule_reaches_both_products_of_a_split_projection() -> None:
    rules = policy(rule(name="*kv_b*"))
    with torch.no_grad():
        assert layers(LatentAttention(), torch.randn(40, 256), policy=rules)["kv_b"] == {"mxfp8"}
    (report,) = mxcompile.reports()
    assert [gemm.name for gemm in report.gemms] == ["kv_b", "kv_b", "o"]


def test_weights_of_einsum_compute_with_their_mxfp8_values() -> None:
    x, whole = data(), nn.Parameter(torch.randn(IN, 3, IN) / 8)

    def forward(x: Tensor) -> Tensor:
        q, k, v = whole.unbind(1)
        return sum(torch.einsum("td,dn->tn", x, part) for part in (q, k, v))  # type: ignore[return-value]

    with torch.no_grad():
        result = torch.compile(forward, backend=EagerBackend(policy=EVERYTHING, strict=True))(x)
    expected = sum(round_trip(x, 1) @ round_trip(whole.detach()[:, part], 0) for part in range(3))
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-4)
    assert precisions() == {"whole": {"mxfp8"}}


def needing_gradients() -> tuple[Tensor, Tensor]:
    up, down = weights()
    return up.requires_grad_(), down.requires_grad_()


@pytest.mark.parametrize("gradient_of_x", [False, True])
def test_arguments_that_need_gradients_are_weights(gradient_of_x: bool) -> None:
    x, (up, down) = data().requires_grad_(gradient_of_x), needing_gradients()
    assert layers(feed_forward, x, up, down) == {"up": {"mxfp8"}, "down": {"mxfp8"}}
    assert {gemm.gemm for gemm in all_gemms()} == {"fprop", "dgrad", "wgrad"}
    assert up.grad is not None
    assert down.grad is not None


def test_arguments_in_containers_are_named_by_the_way_to_them() -> None:
    def forward(x: Tensor, arguments: dict[str, list[Tensor]]) -> Tensor:
        return feed_forward(x, *arguments["layers"])

    names = {"arguments.layers.0": {"mxfp8"}, "arguments.layers.1": {"mxfp8"}}
    assert layers(forward, data(), {"layers": [*needing_gradients()]}) == names


def multiplied(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.relu(x @ up.T) @ down.T


@pytest.mark.parametrize(("call", "names"), [(feed_forward, {"up", "down"}), (multiplied, {"down"})])
def test_plain_argument_is_an_error_under_strict_and_a_reason_otherwise(call: Any, names: set[str]) -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        layers(call, data(), *weights())
    error = caught.value.inner_exception
    assert isinstance(error, UnsupportedError)
    assert all(f"{name} fprop: {REASON}" in str(error) for name in names)
    torch._dynamo.reset()
    layers(call, data(), *weights(), strict=False)
    records = {(gemm.name, gemm.reason, gemm.precision) for gemm in all_gemms() if gemm.name}
    assert records == {(name, REASON, "bf16") for name in names}


ARGUMENTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor]] = {
    "slice": (lambda x, w: F.linear(x, w[:IN]), torch.randn(2 * IN, IN)),
    "split": (lambda x, w: F.linear(x, w.split(IN)[1]), torch.randn(2 * IN, IN)),
    "member of a stack": (lambda x, w: F.linear(x, w[1]), torch.randn(2, IN, IN)),
    "flat": (lambda x, w: F.linear(x, w[: IN * IN].view(IN, IN), w[-IN:]), torch.randn(IN * IN + IN)),
    "codes": (lambda x, w: F.linear(x, w.to(x.dtype) * 0.5), torch.randn(IN, IN).to(torch.float8_e4m3fn)),
    "convolution": (lambda x, w: F.conv1d(x.T[None], w), torch.randn(HIDDEN, IN, 1)),
    "computed left operand": (lambda x, w: F.relu(x) @ w, torch.randn(IN, HIDDEN)),
}


@pytest.mark.parametrize("way", ARGUMENTS)
def test_parts_of_a_plain_argument_are_an_error_under_strict(way: str) -> None:
    call, weight = ARGUMENTS[way]
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        layers(call, data(), weight)
    assert f"w fprop: {REASON}" in str(caught.value.inner_exception)


def test_plain_argument_left_in_bf16_passes_strict_mode() -> None:
    assert layers(feed_forward, data(), *weights(), policy="bf16") == {"up": {"bf16"}, "down": {"bf16"}}


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) / 8, dim=-1) @ v


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q @ (k.transpose(-1, -2) @ v)


def aggregated(x: Tensor, adjacency: Tensor, _: Tensor) -> Tensor:
    return adjacency @ F.relu(x)


@pytest.mark.parametrize("call", [attention, linear_attention, aggregated])
@pytest.mark.parametrize("shape", [(ROWS, ROWS), (2, 4, ROWS, ROWS)])
@pytest.mark.parametrize("gradients", [False, True])
def test_products_of_activations_are_not_layers(call: Any, shape: tuple[int, ...], gradients: bool) -> None:
    arguments = [torch.randn(shape, requires_grad=gradients and call is attention) for _ in range(3)]
    assert set().union(*layers(call, *arguments, policy="nvidia").values()) == {"bf16"}
    assert {gemm.reason for gemm in all_gemms()} <= {"role attn_scores", "role attn_values", "role other"}


class Beside(Made, layer=(IN, IN)):
    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return self.product(self.layer(x), x, *others)


PRODUCTS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "own input": (lambda h, x: h @ x.T, [(ROWS, IN)]),
    "matrix of items": (lambda h, x, y: h @ y.T, [(ROWS, IN), (30, IN)]),
    "batched matrix of items": (
        lambda h, x, y: torch.einsum("btd,bsd->bts", h, y),
        [(2, ROWS, IN), (2, 30, IN)],
    ),
    "graph": (lambda h, x, y: y @ h, [(ROWS, IN), (ROWS, ROWS)]),
    "graph of a batch": (lambda h, x, y: y @ h, [(2, ROWS, IN), (2, ROWS, ROWS)]),
    "memory": (lambda h, x, y: torch.softmax(h @ y.T, -1) @ y, [(ROWS, IN), (30, IN)]),
    "mask": (lambda h, x, y: (h * y[..., None]) @ x.transpose(-1, -2), [(2, ROWS, IN), (2, ROWS)]),
}


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("gradients", [False, True])
def test_arguments_of_a_model_are_activations(product: str, gradients: bool) -> None:
    call, shapes = PRODUCTS[product]
    leaves = [torch.randn(shape, requires_grad=gradients) for shape in shapes]
    assert layers(Beside(product=call), *leaves) == {"layer": {"mxfp8"}, "": {"bf16"}}


class Recurrent(Made, inner=(IN, IN, False), outer=(IN, IN), state=lambda: torch.randn(ROWS, IN)):
    """The state of the last call, a plain attribute, is data where it meets a parameter."""

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(x) + self.inner(self.state)


def test_held_tensor_that_a_parameter_multiplies_stays_data() -> None:
    assert layers(Recurrent(), data()) == {"inner": {"mxfp8"}, "outer": {"mxfp8"}}
