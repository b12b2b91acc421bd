"""Expert parallelism on two and four Gloo ranks: casts in front of the exchange against casts after it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expert_parallel import MixtureOfExperts
from gather_ranks import sends, with_and_without
from helpers.eager_backend import EagerBackend
from helpers.fresh import forget
from helpers.policies import policy, rule
from helpers.ranks import on_ranks
from torch import nn

import mxcompile

pytestmark = pytest.mark.slow

WIDTH, TOKENS = 64, (24, 40)


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to run the example's model, and what becomes of the exchanges of its last batch.

    use: what the policy says beside the precision. lopsided: all tokens go to the experts of one rank.
    quantized, others: exchanges of MX bytes, and of the model's dtype.
    """

    use: dict[str, Any]
    train: bool = True
    frozen: bool = False
    lopsided: bool = False
    compiled: bool = False
    quantized: int
    others: int


SENT = {"sent": "mxfp8"}
WAYS = {
    "inference": Way(use={}, train=False, quantized=1, others=1),
    "as usual": Way(use={}, quantized=0, others=4),
    "transcode": Way(use={"saved": "transcode"}, quantized=1, others=3),
    "frozen": Way(use={}, frozen=True, quantized=2, others=2),
    "sent": Way(use=SENT, quantized=2, others=2),
    "sent, no tokens": Way(use=SENT, lopsided=True, quantized=2, others=2),
    "sent, other formats": Way(use=SENT | {"grad_rounding": "stochastic"}, quantized=1, others=3),
    "sent, compiled": Way(use=SENT, compiled=True, quantized=2, others=2),
}
ON_FOUR = {"sent", "sent, no tokens", "transcode"}


def step(way: Way) -> dict[str, Any]:
    """Results, gradients, what the last batch exchanges, and the report."""
    forget()
    torch.manual_seed(0)
    model: nn.Module = MixtureOfExperts(dist.group.WORLD).bfloat16()
    if way.lopsided:
        with torch.no_grad():
            model.router.weight.zero_()  # the first experts win every tie
    model.experts.requires_grad_(not way.frozen)
    rules = policy(rule("bf16", role="router"), rule({"precision": "mxfp8", **way.use}, name="*"))
    how: dict[str, Any] = {"backend": EagerBackend(policy=rules)}
    if way.compiled:
        how = {"backend": "mxfp8", "options": {"policy": rules}}
    compiled = torch.compile(model, fullgraph=True, dynamic=True, **how)
    generator = torch.Generator().manual_seed(dist.get_rank())
    results: dict[str, Any] = {}
    sent: list[tuple[str, int]] = []
    for number, tokens in enumerate(TOKENS):
        x = torch.randn(tokens, WIDTH, generator=generator).bfloat16().requires_grad_(way.train)
        torch.manual_seed(number)  # stochastic rounding draws from it
        last = number == len(TOKENS) - 1
        with sends("all_to_all", sent) if last else nullcontext(), torch.set_grad_enabled(way.train):
            y = compiled(x)
            if way.train:
                y.float().square().sum().backward()
        results |= {f"y{number}": y.detach(), f"x{number}": x.grad}
    results |= {name: p.grad for name, p in model.named_parameters()}
    (report,) = mxcompile.reports()
    return {"numbers": results, "sent": sent, "report": report}


def steps() -> dict[str, Any]:
    torch._dynamo.config.capture_scalar_outputs = True
    return {name: step(way) for name, way in WAYS.items() if dist.get_world_size() == 2 or name in ON_FOUR}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[Any]]:
    @functools.cache
    def results(ranks: int) -> list[Any]:
        return on_ranks(ranks, tmp_path_factory.mktemp("ranks"), with_and_without, steps)

    return results


@pytest.mark.parametrize(
    ("name", "ranks"), [*((name, 2) for name in WAYS), *((name, 4) for name in sorted(ON_FOUR))]
)
def test_mx_bytes_travel_and_nothing_else_changes(name: str, ranks: int, run: Callable[[int], list[Any]]):
    way = WAYS[name]
    for rank in run(ranks):
        before, after = (steps[name] for steps in rank)
        for key, value in before["numbers"].items():
            assert (value is None) == (after["numbers"][key] is None), key
            assert value is None or torch.equal(value, after["numbers"][key]), key
        check_bytes(way, before["sent"], after["sent"])


def check_bytes(way: Way, before: list[tuple[str, int]], after: list[tuple[str, int]]) -> None:
    """What is sent with casts in front of exchanges, and behind them: dtypes and numbers of elements."""

    def of(kind: str, sent: list[tuple[str, int]]) -> list[int]:
        return sorted(count for dtype, count in sent if dtype == kind)

    mx, source = of("unsigned char", before), of("c10::BFloat16", before)
    assert (len(mx), len(source)) == (way.quantized, way.others)
    rows = [count // (WIDTH + WIDTH // 32) for count in mx] + [count // WIDTH for count in source]
    assert sorted(count // WIDTH for count in of("c10::BFloat16", after)) == sorted(rows)
    assert not of("unsigned char", after)


def test_reason_notes_a_gradient_that_ranks_send_unquantized(run: Callable[[int], list[Any]]):
    reasons = {
        (gemm.gemm, gemm.name): gemm.reason
        for gemm in run(2)[0][0]["sent, other formats"]["report"].gemms
        if "ranks send its" in gemm.reason
    }
    assert {gemm for gemm, _ in reasons} == {"dgrad", "wgrad"}
    assert set(reasons.values()) == {"policy: rule 2; ranks send its dy unquantized: it is not cast to MXFP8"}


def test_sizes_expect_that_experts_are_equally_busy(run: Callable[[int], list[Any]]):
    """As many rows arrive as a rank sends: two for each of its tokens, by the first batch's number."""
    for ranks in (2, 4):
        report = run(ranks)[0][0]["sent"]["report"]
        sizes = {gemm.m for gemm in report.gemms if gemm.name.startswith("experts.") and gemm.gemm == "fprop"}
        assert sizes == {2 * TOKENS[0]}
        assert {gemm.role for gemm in report.gemms if gemm.name == "experts.down"} == {"expert_out"}
