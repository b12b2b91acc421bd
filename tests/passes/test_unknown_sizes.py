"""Sizes that depend on data are unknown in records, in rules and in shares of FLOPs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.blocks import FeedForward
from helpers.eager import reference_linears
from helpers.eager_backend import EagerBackend
from helpers.made import Made
from helpers.policies import rule
from helpers.reports import EVERYTHING, report_of
from torch import Tensor

import mxcompile
from mxcompile.policy import Layer, Match, Role

WIDTH, WIDE = 64, 128


class Mix(Made, dense=FeedForward, expert=FeedForward):
    """All rows go through one network; those that the data picks, through another."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(x)
        chosen = (x[:, 0] > 0).nonzero().squeeze(-1)
        return x.index_add(0, chosen, self.expert(x[chosen]))


def mixed(*rules: dict[str, Any], training: bool = False) -> mxcompile.Report:
    """The report of `Mix` under `rules`, with sizes that are captured."""
    policy = {"version": 1, "preset": "bf16", "rules": list(rules)}
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        return report_of(Mix(), torch.randn(500, WIDTH), training=training, policy=policy)


def test_rows_that_depend_on_data_are_unknown() -> None:
    report = mixed(rule(name="*"), training=True)
    sizes = {(g.name, g.gemm): (g.m, g.n, g.k) for g in report.gemms}
    assert sizes["dense.up", "fprop"] == (500, WIDE, WIDTH)
    assert sizes["expert.up", "fprop"] == (None, WIDE, WIDTH)
    assert sizes["expert.up", "dgrad"] == (None, WIDTH, WIDE)
    assert sizes["expert.up", "wgrad"] == (WIDE, WIDTH, None)
    assert sum(g.gemm == "wgrad" for g in report.gemms) == 4


def test_rule_with_max_m_refuses_an_unknown_size() -> None:
    by_name = {g.name: g for g in mixed(rule(name="*", max_m=1000)).gemms}
    assert by_name["dense.up"].precision == "mxfp8"
    assert (by_name["expert.up"].precision, by_name["expert.up"].reason) == (
        "bf16",
        "policy: max_m 1000 (m=?)",
    )


def test_share_is_of_the_flops_that_are_known() -> None:
    text = " ".join(str(mixed(rule(name="dense.*"))).split())
    assert "100.0% of known matmul FLOPs in MXFP8, 2 products of unknown FLOPs not in it" in text
    assert "not in the share, since their FLOPs are unknown: expert.up, expert.down" in text
    assert f"?×{WIDE}×{WIDTH}" in text


def test_unknown_sizes_are_null_in_json_and_read_back() -> None:
    report = mixed(rule(name="*"))
    assert [gemm["m"] for gemm in json.loads(report.to_json())["gemms"]] == [500, 500, None, None]
    assert mxcompile.Report.from_json(report.to_json()).gemms == report.gemms


@pytest.mark.parametrize("form", [".txt", ".md", ".json", ".html"])
def test_every_form_has_unknown_sizes(form: str, tmp_path: Any) -> None:
    path = tmp_path / f"report{form}"
    mixed(rule(name="*")).save(path)
    text = path.read_text(encoding="utf-8")
    assert "None×" not in text
    assert (f"?×{WIDE}×{WIDTH}" in text) == (form != ".json")


@pytest.mark.parametrize(
    ("limit", "kept"), [("min_m", True), ("max_m", False), ("min_k", True), ("max_k", True)]
)
def test_limit_of_an_unknown_size(limit: str, kept: bool) -> None:
    layer = Layer(name="a", role=Role.FFN_IN, module="Linear", m=None, n=64, k=64)
    assert (Match(name=("*",), **{limit: 64}).missed(layer) is None) == kept


def counted(mask: Tensor, rows: int) -> int:
    """The number of true values, of which Dynamo knows no more than that it is a number of rows."""
    count = int(mask.sum().item())
    torch._check(count >= 0)
    torch._check(count <= rows)
    return count


PICKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mask": lambda h, mask: h[mask],
    "slice": lambda h, mask: h[: counted(mask, len(h))],
    "split": lambda h, mask: h.split([(n := counted(mask, len(h))), len(h) - n])[0],
    "repeats": lambda h, mask: torch.repeat_interleave(h, mask.long(), dim=0),
    "unique": lambda h, mask: h[torch.unique(mask.long())],
    "stack": lambda h, mask: h[mask][None],
}
"""By name, how rows are picked by the values of a mask."""


class Picked(Made, every=(WIDTH, WIDTH), up=(WIDTH, WIDE), down=(WIDE, 32)):
    """Two layers for the rows that `pick` takes of the result of a layer for all."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.down(self.up(self.pick(self.every(x), mask)).relu())


@pytest.mark.parametrize("way", PICKS)
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True)
def test_rows_picked_in_any_way_are_unknown_and_quantized(way: str) -> None:
    policy = {"version": 1, "rules": [{"match": {"name": "*", "min_m": 64}, "use": "mxfp8"}]}
    model, x, mask = Picked(pick=PICKS[way]), torch.randn(100, WIDTH), torch.rand(100) > 0.5
    results = torch.compile(model, backend=EagerBackend(policy=policy, strict=True), fullgraph=True)(x, mask)
    results.square().sum().backward()
    gradients = [p.grad for p in model.parameters()]
    (report,) = mxcompile.reports()
    assert {(g.name, g.precision) for g in report.gemms} == {
        (name, "mxfp8") for name in ("every", "up", "down")
    }
    rows = {g.name: g.m for g in report.gemms if g.gemm == "fprop"}
    assert rows == {"every": 100, "up": None, "down": None}
    model.zero_grad()
    with reference_linears(model, report):
        expected = model(x, mask)
        expected.square().sum().backward()
    torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-4)
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-3, atol=1e-3)


SCALED: dict[str, Callable[..., Tensor]] = {
    "all values": lambda y, gate, mask: y.flatten()[mask.repeat(WIDTH)] * 2.0,
    "features": lambda y, gate, mask: y[:, mask[:WIDTH]] * 2.0,
    "a square": lambda y, gate, mask: y[:, mask[:WIDTH]].square(),
    "a gate": lambda y, gate, mask: y[:, mask[:WIDTH]] * gate[:, mask[:WIDTH]],
    "zeros": lambda y, gate, mask: torch.where(
        (kept := y[:, mask[:WIDTH]]) > 0, kept, torch.zeros_like(kept)
    ),
}
"""By name, how features that a mask picks are used, elementwise."""


@pytest.mark.parametrize("way", SCALED)
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_features_picked_by_a_mask_need_no_guard(way: str) -> None:
    class Masked(Made, up=(WIDTH, WIDTH), gate=(WIDTH, WIDTH)):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return SCALED[way](self.up(x), self.gate(x), mask)

    report = report_of(Masked(), torch.randn(100, WIDTH), torch.rand(100) > 0.5)
    assert {gemm.name for gemm in report.gemms} >= {"up"}


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_a_convolution_over_picked_tokens_needs_no_guard() -> None:
    class Convolved(Made, up=(WIDTH, WIDTH), mix=lambda: torch.nn.Conv1d(WIDTH, WIDTH, 1)):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.mix(self.up(x)[mask].T[None])

    model, x, mask = Convolved(), torch.randn(100, WIDTH), torch.rand(100) > 0.5
    report = report_of(model, x, mask, policy=EVERYTHING)
    assert {(gemm.name, gemm.precision) for gemm in report.gemms} == {("up", "mxfp8"), ("mix", "mxfp8")}
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with reference_linears(model, report):
        model(x, mask).sum().backward()
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=0.1, atol=1.0)
