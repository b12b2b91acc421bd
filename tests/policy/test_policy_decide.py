"""What a policy decides for a layer, and why."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.policies import policy, rule

from mxcompile.formats import E4M3, E5M2, Format, Rounding, Tile
from mxcompile.policy import (
    ATTENTION_PRODUCTS,
    Block,
    Decision,
    Gemm,
    Layer,
    Policy,
    Role,
    Saved,
)
from mxcompile.policy.presets import PRESETS

QUANTIZED_ROLES = {"qkv", "attn_out", "ffn_in", "ffn_out", "expert_in", "expert_out", "mixer_in", "mixer_out"}
KEPT_ROLES = {"router", "conditioning", "embedding", "head", "other"}


def layer(
    name: str = "model.layers.0.mlp.up_proj",
    role: str = "ffn_in",
    module: str = "Linear",
    m: int = 128,
    n: int = 96,
    k: int = 64,
    block: Block | None = None,
) -> Layer:
    return Layer(name=name, role=Role(role), module=module, m=m, n=n, k=k, block=block)


def precisions(decision: Decision) -> list[str]:
    return [str(decision.choice(gemm).precision) for gemm in Gemm]


def reasons(decision: Decision) -> list[str]:
    return [decision.choice(gemm).reason for gemm in Gemm]


def matches(match: dict[str, Any], **facts: Any) -> bool:
    return policy(rule(**match)).rule_for(layer(**facts)) == 0


def test_first_matching_rule_decides_the_layer():
    rules = policy(rule("bf16", name="*.0.*"), rule("mxfp8", role="ffn_in"))
    first = rules.decide(layer("model.layers.0.mlp.up_proj"))
    second = rules.decide(layer("model.layers.1.mlp.up_proj"))
    assert (precisions(first), reasons(first)) == (["bf16"] * 3, ["policy: rule 1"] * 3)
    assert (precisions(second), reasons(second)) == (["mxfp8"] * 3, ["policy: rule 2"] * 3)


def test_layer_without_matching_rule_follows_the_preset():
    decision = policy(rule("bf16", role="head"), preset="nvidia").decide(layer(role="qkv"))
    assert precisions(decision) == ["mxfp8"] * 3
    assert reasons(decision) == ["preset nvidia: role qkv"] * 3


def test_a_gemm_the_rule_does_not_name_follows_the_preset():
    decision = policy(rule({"wgrad": "bf16"}, role="ffn_in"), preset="nvidia").decide(layer())
    assert precisions(decision) == ["mxfp8", "mxfp8", "bf16"]
    assert reasons(decision) == ["preset nvidia: role ffn_in"] * 2 + ["policy: rule 1"]


def test_a_rule_that_decided_hides_later_ones_for_every_gemm():
    rules = policy(rule({"wgrad": "bf16"}, role="ffn_in"), rule("mxfp8", name="*"))
    assert precisions(rules.decide(layer())) == ["bf16"] * 3


@pytest.mark.parametrize(
    ("preset", "mxfp8", "reason"),
    [
        ("nvidia", ["mxfp8"] * 3, ["preset nvidia: role {role}"] * 3),
        ("ocp", ["mxfp8"] * 3, ["preset ocp: role {role}"] * 3),
        ("hybrid", ["mxfp8"] * 3, ["preset hybrid: role {role}"] * 3),
        (
            "inference",
            ["mxfp8", "bf16", "bf16"],
            [
                "preset inference: role {role}",
                "preset inference: no dgrad",
                "preset inference: no wgrad",
            ],
        ),
        ("bf16", ["bf16"] * 3, ["preset bf16"] * 3),
    ],
)
def test_presets_decide_by_role(preset: str, mxfp8: list[str], reason: list[str]):
    for role in QUANTIZED_ROLES:
        decision = Policy.preset(preset).decide(layer(role=role))
        assert precisions(decision) == mxfp8
        assert reasons(decision) == [text.format(role=role) for text in reason]
    for role in KEPT_ROLES:
        decision = Policy.preset(preset).decide(layer(role=role))
        assert precisions(decision) == ["bf16"] * 3
        assert reasons(decision) == ["preset bf16" if preset == "bf16" else f"role {role}"] * 3


def test_every_role_of_a_linear_layer_is_decided_above():
    assert set(Role) - ATTENTION_PRODUCTS == QUANTIZED_ROLES | KEPT_ROLES


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_set_no_limit_on_tokens_and_none_above_a_block(preset: str):
    small, large = (
        Policy.preset(preset).decide(layer(m=m, n=s, k=s)) for m, s in ((1, 32), (1 << 20, 1 << 20))
    )
    assert small == large


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"n": 8}, "preset nvidia: a side under 32 (n=8)"),
        ({"k": 31}, "preset nvidia: a side under 32 (k=31)"),
        ({"n": 1, "k": 1}, "preset nvidia: a side under 32 (n=1)"),
    ],
)
def test_presets_leave_a_matrix_with_a_small_side_alone(sizes: dict[str, int], reason: str):
    decision = Policy.preset("nvidia").decide(layer(**sizes))
    assert (precisions(decision), reasons(decision)) == (["bf16"] * 3, [reason] * 3)
    assert reasons(Policy.preset("bf16").decide(layer(**sizes))) == ["preset bf16"] * 3
    head = layer(**sizes, role="head")
    assert reasons(Policy.preset("nvidia").decide(head)) == ["role head"] * 3


def test_a_rule_sends_a_matrix_with_a_small_side():
    sent = policy(rule("mxfp8", name="*")).decide(layer(n=8))
    assert (precisions(sent), reasons(sent)) == (["mxfp8"] * 3, ["policy: rule 1"] * 3)
    changed = policy(rule({"rounding": "floor"}, name="*"), preset="nvidia").decide(layer(n=8))
    assert reasons(changed) == ["preset nvidia: a side under 32 (n=8)"] * 3


@pytest.mark.parametrize(
    ("ends", "total", "numbers"),
    [
        ({"first": 2}, 6, {0, 1}),
        ({"last": 2}, 6, {4, 5}),
        ({"first": 1, "last": 2}, 6, {0, 4, 5}),
        ({"first": 2, "last": 2}, 3, {0, 1, 2}),
        ({"first": 9}, 3, {0, 1, 2}),
        ({"last": 1}, 1, {0}),
    ],
)
def test_blocks_are_counted_from_the_ends(ends: dict[str, int], total: int, numbers: set[int]):
    assert {i for i in range(total) if matches({"blocks": ends}, block=Block(i, total))} == numbers
    assert not matches({"blocks": ends}, block=None)


@pytest.mark.parametrize(
    ("steps", "numbers"),
    [
        ({"first": 2}, {0, 1}),
        ({"first": "25 %", "of": 10}, {0, 1}),
        ({"last": 2, "of": 10}, {8, 9}),
        ({"last": "20%", "of": 10}, {8, 9}),
        ({"from": 3, "until": 5}, {3, 4}),
        ({"from": 7}, {7, 8, 9}),
    ],
)
def test_a_rule_with_steps_decides_only_in_these_steps(steps: dict[str, Any], numbers: set[int]):
    data = {"version": 1, "rules": [{"match": {"steps": steps}, "use": "bf16"}]}
    policy, subject = Policy.from_dict(data), layer()
    assert {step for step in range(10) if policy.at(step).rule_for(subject) == 0} == numbers
    assert policy.rule_for(subject) is None  # without a step
    assert Policy.from_dict(policy.at(5).to_dict()) == policy


def test_the_phase_of_a_policy_names_all_steps_with_the_same_rules():
    ends = [{"first": 2}, {"from": 4, "until": 6}]
    data = {"version": 1, "rules": [{"match": {"steps": steps}, "use": "bf16"} for steps in ends]}
    policy = Policy.from_dict(data, label="ends.yaml")
    assert [policy.at(step).phase for step in (0, 2, 4, 1000)] == [
        "steps 0 to 1",
        "steps 2 to 3, from step 6",
        "steps 4 to 5",
        "steps 2 to 3, from step 6",
    ]
    assert policy.at(2).title == "ends.yaml, steps 2 to 3, from step 6"
    assert len({policy.at(step).fingerprint() for step in range(10)}) == 3
    assert Policy.preset("nvidia").at(7) == Policy.preset("nvidia")


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj", True),
        ("model.layers.0.*", "model.layers.0.mlp.up_proj", True),
        ("model.*.up_proj", "model.layers.0.mlp.up_proj", True),
        ("*.mlp.*", "model.layers.0.mlp.up_proj", True),
        ("*", "", True),
        ("layers.0.*", "model.layers.0.mlp.up_proj", False),
        ("model.layers.0", "model.layers.0.mlp.up_proj", False),
        ("model.layers.1.*", "model.layers.10.mlp.up_proj", False),
        ("model.layers.?.*", "model.layers.10.mlp.up_proj", False),
        ("model.layers.[0-3].*", "model.layers.2.mlp.up_proj", True),
        ("model.layers.[!0-3].*", "model.layers.2.mlp.up_proj", False),
        ("model.layers.0.MLP.*", "model.layers.0.mlp.up_proj", False),
        ("model.layersX0.*", "model.layers.0.mlp.up_proj", False),
        (r"re:.*\.(up|gate)_proj", "model.layers.0.mlp.up_proj", True),
        (r"re:.*\.(up|gate)", "model.layers.0.mlp.up_proj", False),
        (r"re:layers.*", "model.layers.0.mlp.up_proj", False),
        (r"re:model\.layers\.\d+\.mlp\..*", "model.layers.10.mlp.up_proj", True),
        ("re:a|b", "ab", False),
        (["a", "re:b|c", "d.*"], "c", True),
        (["a", "re:b|c", "d.*"], "d", False),
    ],
)
def test_name_patterns_are_anchored_and_cross_dots(pattern: Any, name: str, fits: bool):
    assert matches({"name": pattern}, name=name) is fits


@pytest.mark.parametrize(
    ("match", "facts", "fits"),
    [
        ({"role": "qkv"}, {"role": "qkv"}, True),
        ({"role": "qkv"}, {"role": "attn_out"}, False),
        ({"role": ["qkv", "attn_out"]}, {"role": "attn_out"}, True),
        ({"module": "Linear"}, {"module": "Linear"}, True),
        ({"module": "Linear"}, {"module": "LoraLinear"}, False),
        ({"module": ["Conv1D", "Linear"]}, {"module": "Conv1D"}, True),
        ({"min_m": 8}, {"m": 8}, True),
        ({"min_m": 8}, {"m": 7}, False),
        ({"min_n": 8}, {"n": 7, "m": 9, "k": 9}, False),
        ({"min_k": 8}, {"k": 7, "m": 9, "n": 9}, False),
        ({"max_m": 8}, {"m": 8}, True),
        ({"max_m": 8}, {"m": 9}, False),
        ({"max_n": 8}, {"n": 9, "m": 7, "k": 7}, False),
        ({"max_k": 8}, {"k": 9, "m": 7, "n": 7}, False),
        ({"min_k": 8, "max_k": 8}, {"k": 8}, True),
        ({"blocks": {"first": 1}, "role": "qkv"}, {"block": Block(0, 2), "role": "head"}, False),
        ({"name": "a.*", "role": "qkv", "min_k": 8}, {"name": "a.b", "role": "qkv", "k": 8}, True),
        ({"name": "a.*", "role": "qkv"}, {"name": "a.b", "role": "head"}, False),
        ({"name": "a.*", "role": "qkv"}, {"name": "b.a", "role": "qkv"}, False),
        ({"name": "*", "module": "Linear"}, {"module": "Conv1D"}, False),
    ],
)
def test_every_key_of_a_match_must_hold(match: dict[str, Any], facts: dict[str, Any], fits: bool):
    assert matches(match, **facts) is fits


@pytest.mark.parametrize(
    ("limit", "sizes", "reason"),
    [
        ({"min_k": 256}, {"k": 48}, "policy: min_k 256 (k=48)"),
        ({"min_m": 64}, {"m": 1}, "policy: min_m 64 (m=1)"),
        ({"min_n": 512}, {"n": 511}, "policy: min_n 512 (n=511)"),
        ({"max_n": 512}, {"n": 513}, "policy: max_n 512 (n=513)"),
        ({"min_k": 16, "max_k": 64}, {"k": 65}, "policy: max_k 64 (k=65)"),
        ({"min_m": 64, "min_k": 256}, {"m": 64, "k": 48}, "policy: min_k 256 (k=48)"),
    ],
)
def test_a_rule_missed_by_size_is_the_reason_for_bf16(limit, sizes, reason: str):
    decision = policy(rule(role="ffn_in", **limit)).decide(layer(**sizes))
    assert (precisions(decision), reasons(decision)) == (["bf16"] * 3, [reason] * 3)


def test_first_near_miss_is_reported_despite_a_later_bf16_rule():
    decision = policy(
        rule(role="ffn_in", min_k=256), rule(role="ffn_in", min_k=128), rule("bf16", name="*")
    ).decide(layer(k=48))
    assert reasons(decision) == ["policy: min_k 256 (k=48)"] * 3


def test_near_miss_is_reported_only_for_gemms_that_rule_would_send():
    rules = policy(rule({"fprop": "mxfp8", "wgrad": "bf16"}, role="other", min_k=256), preset="nvidia")
    assert reasons(rules.decide(layer(role="other", k=48))) == [
        "policy: min_k 256 (k=48)", "role other", "role other",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "rules",
    [
        [rule(role="qkv", min_k=256)],
        [rule("bf16", role="ffn_in", min_k=256)],
        [rule("bf16", role="ffn_in"), rule(name="model.*", min_k=256)],
    ],
    ids=["another role", "a rule for BF16", "after the deciding rule"],
)
def test_rules_without_near_miss_give_no_min_k_reason(rules: list[dict[str, Any]]):
    assert all("min_k" not in reason for reason in reasons(policy(*rules).decide(layer(k=48))))


def test_near_miss_is_not_a_reason_if_the_preset_quantizes():
    decision = policy(rule(role="ffn_in", min_k=256), preset="nvidia").decide(layer(k=48))
    assert reasons(decision) == ["preset nvidia: role ffn_in"] * 3


def formats(use: Any, preset: str = "nvidia") -> tuple[Format, Format, Format]:
    formats_ = policy(rule(use, role="ffn_in"), preset=preset).decide(layer()).fprop.formats
    assert formats_ is not None
    return formats_.x, formats_.w, formats_.dy


@pytest.mark.parametrize(
    ("preset", "gradient", "rounding"),
    [
        ("nvidia", E4M3, Rounding.RCEIL),
        ("ocp", E4M3, Rounding.FLOOR),
        ("hybrid", E5M2, Rounding.RCEIL),
        ("inference", E4M3, Rounding.RCEIL),
    ],
)
def test_presets_set_elements_and_rounding(preset: str, gradient, rounding: Rounding):
    both = Format(elem=E4M3, rounding=rounding)
    expected = (both, both, Format(elem=gradient, rounding=rounding))
    assert formats("mxfp8", preset) == expected


@pytest.mark.parametrize(
    ("preset", "use", "elems"),
    [
        ("nvidia", {"elem_dtype": "e5m2"}, [E5M2, E5M2, E4M3]),
        ("nvidia", {"grad_dtype": "e5m2"}, [E4M3, E4M3, E5M2]),
        ("hybrid", {"grad_dtype": "e4m3"}, [E4M3, E4M3, E4M3]),
    ],
)
def test_rule_sets_elements_of_inputs_and_weights_or_of_gradients(preset: str, use: Any, elems: list[Any]):
    assert [form.elem for form in formats(use, preset)] == elems


@pytest.mark.parametrize("rounding", Rounding)
def test_rounding_is_of_all_operands(rounding: Rounding):
    assert {form.rounding for form in formats({"rounding": str(rounding)})} == {rounding}


def test_weight_block_is_of_the_weight():
    x, w, dy = formats({"weight_block": "32x32"})
    assert (x.tile, w.tile, dy.tile) == (Tile.ROW, Tile.SQUARE, Tile.ROW)


@pytest.mark.parametrize("saved", Saved)
def test_rule_sets_the_form_of_saved_activations(saved: Saved):
    assert policy(rule({"saved": str(saved)}, role="ffn_in")).decide(layer()).saved is saved


def test_inputs_are_saved_columnwise_by_default():
    assert Policy.preset("nvidia").decide(layer()).saved is Saved.COLUMNWISE
