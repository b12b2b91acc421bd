"""Rules that match no layer, and strict mode: what a user asked for and did not get is said."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from helpers.eager_backend import EagerBackend
from helpers.made import Made
from helpers.models import Fused
from helpers.policies import rule
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import mxcompile
from mxcompile.errors import PolicyError, UnsupportedError
from mxcompile.report import GemmRecord

WIDTH, FFN = 64, 96
REFUSED = (
    "strict: the policy quantizes these GEMMs to MXFP8, but that is not possible;"
    " change the policy, or turn strict off:"
)
LINEARS = ("0.a", "0.b", "0.c", "0.d", "1.a", "1.b", "1.c", "1.d")


def run(*rules: dict[str, Any], dtype: torch.dtype = torch.float32, **options: Any) -> None:
    """Compile and run two blocks, the layers of `LINEARS`."""
    torch._dynamo.reset()
    backend = EagerBackend(policy={"version": 1, "preset": "bf16", "rules": list(rules)}, **options)
    blocks = nn.Sequential(Fused(WIDTH, FFN), Fused(WIDTH, FFN)).to(dtype)
    torch.compile(blocks, backend=backend, fullgraph=True)(torch.randn(2, 19, WIDTH, dtype=dtype))


def gemms() -> tuple[GemmRecord, ...]:
    (report,) = mxcompile.reports()
    return report.gemms


@pytest.fixture
def warnings(caplog):
    """What was warned about so far."""
    caplog.set_level(logging.WARNING, logger="mxcompile.rules")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "mxcompile.rules"]


UNUSED = {
    "typo in a name": (rule(name="0.aa"), ": '0.aa' (did you mean '0.a'?)"),
    "several names": (
        rule(name=["0.aa", "1.bb"]), ": '0.aa' (did you mean '0.a'?), '1.bb' (did you mean '1.b'?)"
    ),
    "a name like no other": (rule(name="model.layers.*"), ": 'model.layers.*'"),
    "a role this model has not": (rule(role="router"), ""),
    "a class this model has not": (rule(module="Conv1D"), ""),
    "a name of another role": (rule(name="0.b", role="qkv"), ": 0.b has role attn_out and class Linear"),
    "a size no layer reaches": (rule(role="qkv", min_k=256), ": 0-1.a below min_k 256 (k=64)"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNUSED)
def test_a_rule_that_matched_nothing_gives_a_warning_or_an_error_under_strict(name: str, warnings):
    unused, why = UNUSED[name]
    sentence = f"policy: rule 1 matched no layer{why}"
    run(unused, rule(name="*"))
    assert warnings() == [sentence]
    assert {gemm.precision for gemm in gemms() if gemm.name in LINEARS} == {"mxfp8"}
    with pytest.raises(BackendCompilerFailed) as caught:
        run(unused, rule(name="*"), strict=True)
    assert type(caught.value.inner_exception) is PolicyError
    assert str(caught.value.inner_exception) == sentence
    assert warnings() == [sentence], "strict mode warns of nothing"


NEAR = {
    "one name of a list": (
        [rule(name=["0.*", "1.bb", "2.*"]), rule("bf16", name="1.*")],
        "policy: rule 1: '1.bb' matched no layer (did you mean '1.b'?)",
    ),
    "a rule whose layers others took": (
        [rule("bf16", name="?.c"), rule(name="?.d"), rule(role=["ffn_in", "ffn_out"]), rule(name="*")],
        "policy: rule 3 decides nothing: 0-1.c, 0-1.d went to rules 1, 2; move it up",
    ),
    "a size a few layers do not quite reach": (
        [rule(name="*", min_k=70)],
        "policy: rule 1: 0-1.a, 0-1.b, 0-1.c below min_k 70 (k=64), just under, and no other rule decides;"
        " lower the limit or add a rule",
    ),
}


@pytest.mark.parametrize("name", NEAR)
def test_warning_names_the_near_miss_of_an_unused_rule(name: str, warnings):
    rules, sentence = NEAR[name]
    run(*rules)
    assert warnings() == [sentence]


def test_strict_raises_everything_at_once():
    rules = [rule(name="x.y"), *(near_miss for rules, _ in NEAR.values() for near_miss in rules[:1])]
    with pytest.raises(BackendCompilerFailed) as caught:
        run(*rules, strict=True)
    assert str(caught.value.inner_exception).splitlines() == [
        "policy: rule 1 matched no layer: 'x.y'",
        "policy: rule 2: '1.bb' matched no layer (did you mean '1.b'?)",
        "policy: rule 4: 1.a, 1.b below min_k 70 (k=64), just under, and no other rule decides;"
        " lower the limit or add a rule",
    ]


@pytest.mark.parametrize(
    "rules",
    [
        [rule(name="*", min_k=72)],
        [rule(name="*", min_k=70), rule("bf16", name="*")],
        [rule("bf16", name="*", min_k=70)],
        [rule(name=["0.*", "1.*", "nothing like it", "?.q"])],
    ],
    ids=["well under", "a later rule decides", "the preset decides the same", "a name like no other"],
)
def test_rules_without_near_miss_give_no_warning(rules: list[dict[str, Any]], warnings):
    run(*rules, strict=True)
    assert warnings() == []


def test_every_unused_rule_is_named(warnings):
    run(rule(name="0.e"), rule(name="0.*"), rule(role="head"))
    assert warnings() == [
        "policy: rule 1 matched no layer: '0.e' (did you mean '0.d'?)",
        "policy: rule 3 matched no layer",
    ]


@pytest.mark.parametrize(
    "rules",
    [
        [rule(name="0.*"), rule(role=["qkv", "router"], min_k=64)],
        [rule("bf16", role=["attn_scores", "attn_values"])],
        [rule("bf16", role="ffn_out", min_k=96), rule(name="*.a", min_m=38)],
    ],
    ids=["one of a list is enough", "attention products", "exactly the size"],
)
def test_rules_that_matched_are_not_mentioned(rules: list[dict[str, Any]], warnings):
    run(*rules, strict=True)
    assert warnings() == []


def test_a_rule_for_the_name_of_an_attention_product_alone_matches_nothing(warnings):
    run(rule("bf16", name="0"))
    assert "0" in {gemm.name for gemm in gemms() if gemm.role == "attn_scores"}
    (sentence,) = warnings()
    assert sentence.startswith("policy: rule 1 matched no layer: '0'")


class Broken(Made, first=(64, 64), second=(64, 64)):
    """Two layers in a graph each."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def test_a_rule_for_a_later_graph_is_not_mentioned(warnings):
    rules = [rule(name="first"), rule(name="second"), rule(name="secnod")]
    backend = EagerBackend(policy={"version": 1, "rules": rules})
    torch.compile(Broken(), backend=backend)(torch.ones(4, 64))
    assert [gemm.name for report in mxcompile.reports() for gemm in report.gemms] == [
        "first", "first", "second", "second", "second",
    ]  # fmt: skip
    assert warnings() == ["policy: rule 3 matched no layer: 'secnod' (did you mean 'second'?)"]


def test_an_unsupported_dtype_falls_back_with_the_reason(warnings):
    run(rule(name="*"), dtype=torch.float64)
    linear = [gemm for gemm in gemms() if gemm.name in LINEARS]
    assert len(linear) == 3 * len(LINEARS)
    assert {gemm.precision for gemm in linear} == {"bf16"}
    assert {gemm.reason for gemm in linear} == {"unsupported dtype float64: use FP32, BF16 or FP16"}
    assert {gemm.formats for gemm in linear} == {()}
    assert warnings() == []


def test_in_strict_mode_every_refused_gemm_is_named_at_once():
    sent = {"fprop": "mxfp8", "dgrad": "mxfp8"}
    with pytest.raises(BackendCompilerFailed) as caught:
        run(rule(sent, name="*"), dtype=torch.float64, strict=True)
    error = caught.value.inner_exception
    assert type(error) is UnsupportedError
    first, *refused = str(error).splitlines()
    assert first == REFUSED
    assert sorted(line.strip() for line in refused) == [
        f"{name} {gemm}: unsupported dtype float64: use FP32, BF16 or FP16"
        for name in LINEARS
        for gemm in ("dgrad", "fprop")
    ]


def test_in_strict_mode_rules_and_refused_layers_are_raised_together():
    rules = [rule("bf16", name=["0.*", "1.bb"]), rule(role="router"), rule({"fprop": "mxfp8"}, name="1.c")]
    with pytest.raises(BackendCompilerFailed) as caught:
        run(*rules, dtype=torch.float64, strict=True)
    assert type(caught.value.inner_exception) is UnsupportedError
    assert str(caught.value.inner_exception).splitlines() == [
        REFUSED,
        "  1.c fprop: unsupported dtype float64: use FP32, BF16 or FP16",
        "policy: rule 1: '1.bb' matched no layer (did you mean '1.b'?)",
        "policy: rule 2 matched no layer",
    ]


def test_strict_mode_accepts_layers_that_policy_keeps_in_bf16():
    run(rule("bf16", name="*"), dtype=torch.float64, strict=True)
    assert {gemm.precision for gemm in gemms()} == {"bf16"}
