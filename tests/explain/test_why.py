"""`report.why`: what the role of a layer rests on, what came nearest, and what a name that fits none gets."""

from __future__ import annotations

import pytest
import why_model

import mxcompile
from mxcompile.errors import OptionError


@pytest.fixture(scope="module")
def report():
    model, args, _ = why_model.make()
    policy = {"version": 1, "rules": [{"match": {"name": "blocks.1.attn.qkv"}, "use": "bf16"}]}
    return mxcompile.explain(model, *args, policy=policy, training=False, target="cpu")


def test_why_of_a_quantized_layer_has_role_and_evidence(report):
    (reasons,) = report.why("blocks.0.attn.qkv")
    assert (reasons.name, reasons.names) == ("blocks.0.attn.qkv", ("blocks.0.attn.qkv",))
    assert (reasons.role, reasons.precision, reasons.reason) == ("qkv", "mxfp8", "preset nvidia: role qkv")
    assert reasons.evidence == "its result is q, k or v of an attention"


def test_a_layer_that_a_rule_keeps_has_its_role_and_the_rule(report):
    (reasons,) = report.why("blocks.1.attn.qkv")
    assert (reasons.role, reasons.precision) == ("qkv", "bf16")
    assert "rule 1" in reasons.reason


def test_why_of_an_unquantized_layer_has_nearest_role_and_obstacle(report):
    (reasons,) = report.why("blocks.0.experts.router")
    assert (reasons.role, reasons.precision, reasons.reason) == ("router", "bf16", "role router")
    assert "top-k" in reasons.evidence
    (head,) = report.why("head")
    assert (head.role, head.precision) == ("head", "bf16")
    assert "it stands behind the residual stream" in head.evidence
    lone = mxcompile.explain(why_model.nn.Linear(64, 64), why_model.torch.randn(2, 64), training=False)
    (other,) = lone.why()
    assert (other.role, other.precision, other.evidence) == ("other", "bf16", "no role's conditions are true")
    assert other.nearest.startswith("head: ")
    assert "; but " in other.nearest


def test_experts_and_products_of_an_attention_have_reasons_too(report):
    layers = {(reasons.name, reasons.role): reasons for reasons in report.why("blocks.*")}
    up, down = (
        layers[f"blocks.0-1.experts.{name}", f"expert_{end}"] for name, end in (("up", "in"), ("down", "out"))
    )
    assert up.names == ("blocks.0.experts.up", "blocks.1.experts.up")
    assert (up.precision, down.precision) == ("mxfp8", "mxfp8")
    assert "blocks.0.experts.down" in up.evidence
    assert "weights from a top-k" in down.evidence or "stack of matrices" in down.evidence
    assert layers["blocks.0-1.attn", "attn_scores"].evidence == "inside an attention operator"


def test_a_pattern_fits_several_layers_and_equal_ones_are_one(report):
    assert [reasons.name for reasons in report.why("*.attn.out")] == ["blocks.0-1.attn.out"]
    assert [r.name for r in report.why(r"re:blocks\.\d\.attn\.(qkv|out)")] == [
        "blocks.0.attn.qkv", "blocks.0-1.attn.out", "blocks.1.attn.qkv",
    ]  # fmt: skip
    every = {name for reasons in report.why() for name in reasons.names}
    assert every == {gemm.name for gemm in report.gemms}


def test_the_text_has_role_precision_reason_evidence_and_the_nearest(report):
    (out,) = report.why("*.attn.out")
    first, *rest = str(out).splitlines()
    assert first == "blocks.0-1.attn.out ×2: attn_out, mxfp8 (preset nvidia: role attn_out)"
    assert rest[0] == f"  because  {out.evidence}"
    assert rest[1:] == ([f"  nearest  {out.nearest}"] if out.nearest else [])


def test_records_have_the_evidence_of_the_reasons(report):
    for gemm in report.gemms:
        (reasons,) = [r for r in report.why(gemm.name) if r.role == gemm.role]
        assert (reasons.reason, reasons.evidence, reasons.nearest) == (
            gemm.reason,
            gemm.evidence,
            gemm.nearest,
        )


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("blocks.0.attn.qvk", "nearest: 'blocks.0.attn.qkv'"),
        ("blocks.0.experts", "'blocks.0.experts.*' matches 'blocks.0.experts.router' and 2 more"),
        ("qkv", "'*.qkv' matches 'blocks.0.attn.qkv' and 1 more"),
        ("attn", "'*.attn' matches 'blocks.0.attn' and 1 more"),
        ("zzz", "its layers are: 'blocks.0.attn.qkv'"),
        ("re:qkv", "its layers are"),
        ("re:(", "is not a regular expression"),
        ("re:a{99999999999}", "is not a regular expression"),
    ],
)
def test_a_name_that_fits_no_layer_is_an_error_with_those_that_come_near(report, pattern, hint):
    with pytest.raises(OptionError) as error:
        report.why(pattern)
    assert hint in str(error.value)
    assert repr(pattern) in str(error.value)
