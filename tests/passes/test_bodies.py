"""Products in graphs that operators of higher order call have records, and are errors under strict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.made import Made
from helpers.reports import EVERYTHING, report_of
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops.map import map as map_over

import mxcompile

ROWS, WIDTH, WIDE = 40, 64, 96


class Branches(Made, up=(WIDTH, WIDE), down=(WIDE, WIDTH), last=(WIDTH, 32)):
    """A feed-forward network where a condition holds."""

    def forward(self, x: Tensor) -> Tensor:
        def network(y: Tensor) -> Tensor:
            return self.down(nn.functional.gelu(self.up(y)))

        return self.last(x + torch.cond(x.sum() > 0, network, lambda y: y * 2, (x,)))


class Nested(Made, a=(WIDTH, WIDTH), b=(WIDTH, WIDTH), c=(WIDTH, WIDTH)):
    """A condition inside a condition."""

    def forward(self, x: Tensor) -> Tensor:
        def inner(y: Tensor) -> Tensor:
            return torch.cond(y.max() > 1, lambda z: self.a(z), lambda z: self.b(z), (y,))

        return torch.cond(x.sum() > 0, inner, lambda y: self.c(y), (x,))


class Loop(Made, step=(WIDTH, WIDTH)):
    """A loop whose length is decided by its state."""

    def forward(self, x: Tensor) -> Tensor:
        start = torch.zeros((), dtype=torch.int64), x
        _, y = while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, self.step(y).tanh()), start)
        return y


class Layers(Made, stack=lambda: nn.Parameter(torch.randn(6, WIDTH, WIDTH) / 8)):
    """One weight that is a stack of the weights of six layers, as `scan` reads it."""

    def forward(self, x: Tensor) -> Tensor:
        y, _ = scan(lambda y, w: (torch.tanh(y @ w.t()), y.sum()), x, self.stack)
        return y


class Recurrent(Made, step=(WIDTH, WIDTH, False), turn=(WIDTH, WIDTH, False)):
    """Recurrent layers whose states begin as constants: a scan and a loop."""

    def forward(self, x: Tensor) -> Tensor:
        def step(h: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(self.step(h) + row)
            return h, h.clone()

        h, rows = scan(step, torch.zeros(ROWS // 5, WIDTH), x.view(5, ROWS // 5, WIDTH))
        start = torch.zeros((), dtype=torch.int64), torch.ones(ROWS // 5, WIDTH)
        _, turned = while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, self.turn(y).tanh()), start)
        return rows + h * turned


class Mapped(Made, layer=(WIDTH, WIDTH)):
    """One layer over five slices."""

    def forward(self, x: Tensor) -> Tensor:
        return map_over(lambda slice_: self.layer(slice_).tanh(), x.view(5, ROWS // 5, WIDTH))


class Summed(Made, last=(WIDTH, WIDTH)):
    """A scan without products."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(associative_scan(lambda a, b: a + b, x, 0, combine_mode="generic"))


def compiled(model: nn.Module, *, training: bool, **options: Any) -> mxcompile.Report:
    """The report of `model`, compiled for one step or one call."""
    x = torch.randn(ROWS, WIDTH, requires_grad=training)
    return report_of(model, x, training=training, **{"policy": EVERYTHING, **options})


@pytest.mark.parametrize(
    ("model", "name", "role", "sizes"),
    [
        (Branches, "up", "ffn_in", (1, ROWS, WIDE, WIDTH)),
        (Branches, "down", "ffn_out", (1, ROWS, WIDTH, WIDE)),
        (Nested, "b", "other", (1, ROWS, WIDTH, WIDTH)),
        (Loop, "step", "other", (1, ROWS, WIDTH, WIDTH)),
        (Layers, "stack", "other", (6, ROWS, WIDTH, WIDTH)),
        (Mapped, "layer", "other", (5, ROWS // 5, WIDTH, WIDTH)),
    ],
)
def test_product_in_a_body_has_name_role_and_size(
    model: Callable[[], nn.Module], name: str, role: str, sizes: tuple[int, ...]
) -> None:
    (gemm,) = [gemm for gemm in compiled(model(), training=False).gemms if gemm.name == name]
    assert (gemm.role, (gemm.batch, gemm.m, gemm.n, gemm.k)) == (role, sizes)
    assert (gemm.precision, gemm.code) == ("bf16", "inside operator")
    assert gemm.reason.startswith(f"inside {gemm.kernel or gemm.facts[0]}")


def test_bodies_count_as_not_quantized() -> None:
    report = compiled(Branches(), training=False)
    flops = {gemm.name: gemm.flops for gemm in report.gemms}
    assert report.summary.flop_share == pytest.approx(flops["last"] / sum(flops.values()))
    assert "100.0%" not in str(report).splitlines()[0]


@pytest.mark.parametrize("model", [Branches, Nested, Loop, Mapped])
def test_backward_of_a_body_has_gradients_of_its_layers(model: Callable[[], nn.Module]) -> None:
    module = model()
    report = compiled(module, training=True)
    hidden = {name for name, child in module.named_modules() if isinstance(child, nn.Linear)} - {"last"}
    inside = [gemm for gemm in report.gemms if gemm.code == "inside operator"]
    roles = {gemm.name: gemm.role for gemm in reversed(inside)}
    for name in hidden:
        kinds = [gemm.gemm for gemm in inside if gemm.name == name]
        assert kinds.count("dgrad") == kinds.count("wgrad") == 1, name
        assert {gemm.role for gemm in inside if gemm.name == name} == {roles[name]}
    assert {gemm.name for gemm in inside} == hidden


@pytest.mark.parametrize("model", [Branches, Nested, Loop, Layers, Mapped])
def test_layer_in_a_body_raises_under_strict(model: Callable[[], nn.Module]) -> None:
    with pytest.raises(
        BackendCompilerFailed, match=r"fprop: inside (cond|while_loop|scan|map_impl)"
    ) as caught:
        compiled(model(), training=False, strict=True)
    assert "last" not in str(caught.value)


def test_layer_that_begins_with_a_constant_raises_under_strict() -> None:
    with pytest.raises(BackendCompilerFailed, match="strict") as caught:
        compiled(Recurrent(), training=False, strict=True)
    assert "step fprop: inside scan" in str(caught.value)
    assert "turn fprop: inside while_loop" in str(caught.value)


def test_layer_in_a_body_that_no_rule_quantizes_passes_strict() -> None:
    policy = {"version": 1, "preset": "bf16", "rules": [{"match": {"name": "last"}, "use": "mxfp8"}]}
    report = compiled(Branches(), training=False, policy=policy, strict=True)
    assert [gemm.name for gemm in report.gemms if gemm.precision == "mxfp8"] == ["last"]


def test_body_without_products_changes_nothing() -> None:
    report = compiled(Summed(), training=False, strict=True)
    assert [(gemm.name, gemm.precision) for gemm in report.gemms] == [("last", "mxfp8")]


@pytest.mark.parametrize("model", [Branches, Nested, Mapped])
def test_explain_and_compile_agree_on_gemm_records(model: Callable[[], nn.Module]) -> None:
    module = model()
    explained = mxcompile.explain(module, torch.randn(ROWS, WIDTH), policy=EVERYTHING, training=False)
    records, expected = (
        [(g.name, g.role, g.m, g.n, g.k, g.precision, g.reason) for g in report.gemms]
        for report in (explained, compiled(module, training=False))
    )
    assert records == expected


def test_results_are_those_of_eager_code() -> None:
    model, x = Branches(), torch.randn(ROWS, WIDTH)
    policy = {"version": 1, "preset": "bf16", "rules": [{"match": {"name": "up"}, "use": "mxfp8"}]}
    with torch.no_grad():
        y = torch.compile(model, backend="mxfp8", options={"policy": policy})(x)
        torch.testing.assert_close(y, model(x))
    (report,) = mxcompile.reports()
    assert {(gemm.name, gemm.precision) for gemm in report.gemms} == {
        (n, "bf16") for n in ("up", "down", "last")
    }
