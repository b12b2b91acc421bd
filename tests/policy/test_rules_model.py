"""A policy against the layers of a model: what fits, the policy to start from, and what is printed."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers import policies
from helpers.policies import rule
from torch import nn

from mxcompile import explain
from mxcompile.cli import main
from mxcompile.errors import PolicyError
from mxcompile.policy import ATTENTION_PRODUCTS, Block, Gemm, Layer, Policy, Role
from mxcompile.policy.presets import PRESETS
from mxcompile.report import GemmRecord, OperandFormat
from mxcompile.rules import complaints, fits, layers_of
from mxcompile.rules.listing import decisions, matches
from mxcompile.rules.starter import starter


def layer(name: str, role: str, n: int, k: int, module: str = "Linear") -> Layer:
    number = re.match(r"model\.layers\.(\d+)", name)
    block = Block(int(number[1]), 4) if number else None
    return Layer(name=name, role=Role(role), module=module, m=128, n=n, k=k, block=block)


def decoder(blocks: int = 4) -> list[Layer]:
    """The layers of a small decoder: 5 linear ones and an attention a block, and a head."""
    layers = []
    for i in range(blocks):
        block = f"model.layers.{i}"
        layers += [
            layer(f"{block}.attn.qkv", "qkv", 192, 64),
            layer(f"{block}.attn", "attn_scores", 128, 16, "Attention"),
            layer(f"{block}.attn", "attn_values", 16, 128, "Attention"),
            layer(f"{block}.attn.out", "attn_out", 64, 64),
            layer(f"{block}.mlp.up", "ffn_in", 240, 64),
            layer(f"{block}.mlp.down", "ffn_out", 64, 240, "Conv1D"),
            layer(f"{block}.gate", "router", 8, 64),
        ]
    return [*layers, layer("head", "head", 1000, 64)]


policy = functools.partial(policies.policy, preset="nvidia")


def outcomes(decider: Policy, layers: list[Layer]) -> list[tuple[object, ...]]:
    return [
        (*((c.precision, c.formats) for c in map(decision.choice, Gemm)), decision.saved)
        for decision in map(decider.decide, layers)
    ]


def test_every_layer_is_of_one_rule_or_of_the_preset():
    layers = decoder()
    rule_fits = fits(
        policy(rule("bf16", name="model.layers.0.*"), rule(role="ffn_out"), rule(name="*.up")), layers
    )
    assert [[x.name for x in fit.decides] for fit in rule_fits] == [
        [f"model.layers.0.{x}" for x in ("attn.qkv", "attn.out", "mlp.up", "mlp.down", "gate")],
        [f"model.layers.{i}.mlp.down" for i in (1, 2, 3)],
        [f"model.layers.{i}.mlp.up" for i in (1, 2, 3)],
    ]
    assert [[x.name for x in fit.taken] for fit in rule_fits] == [
        [], ["model.layers.0.mlp.down"], ["model.layers.0.mlp.up"],
    ]  # fmt: skip


def test_attention_products_are_of_the_rules_that_name_their_role():
    by_name, by_role = fits(policy(rule("bf16", name="*.attn"), rule("bf16", role="attn_values")), decoder())
    assert by_name.unused
    assert {x.role for x in by_role.decides} == {Role.ATTN_VALUES}


@pytest.mark.parametrize(
    ("limit", "near"),
    [(241, True), (264, True), (266, True), (267, False), (240, False), (500, False)],
)
def test_just_under_is_within_ten_percent(limit: int, near: bool):
    (fit,) = fits(policy(rule(role="ffn_out", min_k=limit), preset="bf16"), decoder(1))
    assert bool(fit.near) is near


def test_just_under_one_limit_and_far_under_another_is_not_near():
    (fit,) = fits(policy(rule(role="ffn_out", min_k=241, min_n=100), preset="bf16"), decoder(1))
    assert (len(fit.missed), fit.near) == (1, ())


def test_near_miss_is_reported_only_where_it_changes_the_decision():
    def near(use: Any, preset: str) -> int:
        (fit,) = fits(policy(rule(use, role="ffn_out", min_k=250), preset=preset), decoder(1))
        return len(fit.near)

    assert near("mxfp8", "bf16") == 1
    assert near("mxfp8", "nvidia") == 0
    assert near({"rounding": "floor"}, "nvidia") == 1
    assert near({"rounding": "floor"}, "ocp") == 0


def test_each_complaint_names_its_rule_and_pattern():
    layer_rules = policy(
        rule("bf16", name=["model.layers.0.*", "model.layrs.3.*"]),
        rule("bf16", name="*.qkv"),
        rule(role="ffn_out", min_k=250),
        rule("bf16", name="lm_head"),
        rule("bf16", module="Linear", role=["attn_out", "router"]),
        rule("bf16", name=["re:.*0.mlp.up", "re:.*qkv"]),
        rule(role="embedding"),
        preset="bf16",
    )
    assert complaints(layer_rules, decoder()) == [
        "policy: rule 1: 'model.layrs.3.*' matched no layer (did you mean 'model.layers.3.*'?)",
        "policy: rule 3 matched no layer: model.layers.0-3.mlp.down below min_k 250 (k=240)",
        "policy: rule 4 matched no layer: 'lm_head' (did you mean 'head'?)",
        "policy: rule 6 decides nothing: model.layers.0-3.attn.qkv, model.layers.0.mlp.up went to rules 1, 2;"
        " move it up",
        "policy: rule 7 matched no layer",
    ]


@pytest.mark.parametrize("preset", PRESETS)
def test_starter_policy_decides_as_its_preset(preset: str, tmp_path: Path):
    layers = decoder()
    path = tmp_path / "policy.yaml"
    path.write_text(starter(preset, layers, "a model"), encoding="utf-8")
    starter_policy, plain = Policy.load(path), Policy.preset(preset)
    linear = [target for target in layers if target.role not in ATTENTION_PRODUCTS]
    assert starter_policy.base == plain.base
    assert outcomes(starter_policy, linear) == outcomes(plain, linear)
    assert complaints(starter_policy, layers) == []
    assert all(starter_policy.rule_for(target) is not None for target in linear)


def test_the_starter_names_every_layer_and_size():
    text = starter("nvidia", decoder(), "m")
    for line in (
        "  # qkv: 4 layers\n  #   model.layers.0-3.attn.qkv  m=128 n=192 k=64\n",
        "k=64\n  - match: {role: qkv}\n    use: mxfp8\n",
        "  #   model.layers.0-3.mlp.down  m=128 n=64 k=240  Conv1D\n",
        "  # head: 1 layer\n  #   head  m=128 n=1000 k=64\n  - match: {role: head}\n    use: bf16\n",
        "  # Attention products stay in BF16: model.layers.0-3.attn\n",
    ):
        assert line in text


def test_the_suggestion_of_the_starter_is_a_rule_when_its_comment_is_taken_away():
    text = (
        starter("nvidia", decoder(), "m").replace("  # - match", "  - match").replace("  #   use", "    use")
    )
    assert "\n  - match: {blocks: {first: 1, last: 1}}\n" in text
    starter_policy = Policy.from_dict(yaml.safe_load(text))
    assert complaints(starter_policy, decoder()) == []
    kept = {target.name for target in decoder() if starter_policy.rule_for(target) == 0}
    ends = "model.layers.0.", "model.layers.3."
    assert kept == {target.name for target in decoder() if target.name.startswith(ends)}


def test_a_starter_leaves_small_matrices_where_the_preset_leaves_them():
    mixed = [layer("a", "qkv", 64, 64), layer("a.lora_A", "qkv", 8, 64), layer("b.gate", "ffn_in", 4, 64)]
    starter_policy = Policy.from_dict(yaml.safe_load(starter("nvidia", mixed, "m")))
    assert outcomes(starter_policy, mixed) == outcomes(Policy.preset("nvidia"), mixed)


def test_just_over_is_within_ten_percent_too():
    assert complaints(policy(rule(role="ffn_out", max_k=220), preset="bf16"), decoder(1)) == [
        "policy: rule 1 matched no layer: model.layers.0.mlp.down above max_k 220 (k=240)"
    ]
    assert complaints(policy(rule(role=["ffn_out", "qkv"], max_k=220), preset="bf16"), decoder(1)) == [
        "policy: rule 1: model.layers.0.mlp.down above max_k 220 (k=240), just over, and no other rule"
        " decides; raise the limit or add a rule"
    ]


def test_complaint_of_unmatched_blocks_describes_the_blocks_of_the_model():
    layer_rules = policy(
        rule("bf16", blocks={"first": 2}, name="head"), rule("bf16", blocks={"last": 1}, role="qkv")
    )
    assert complaints(layer_rules, decoder()) == [
        "policy: rule 1 matched no layer: other matches are in other blocks or in none (head)"
    ]
    flat = [layer("a", "qkv", 64, 64), layer("b", "head", 64, 64)]
    assert complaints(policy(rule("bf16", blocks={"first": 2})), flat) == [
        "policy: rule 1 matched no layer: the model has no repeated blocks (members of a module list);"
        " give names"
    ]


def test_starter_escapes_names_that_are_not_plain_yaml():
    odd = [layer(f'a[*]"#: {i}\u2028.{i}.q\n', "qkv", 32, 32) for i in range(4)]
    odd += [layer(f"blocks: [.{i}.x", "qkv", 32, 32) for i in range(4)]
    data = yaml.safe_load(starter("nvidia", odd, "m\nversion: 2"))
    assert data == {"version": 1, "preset": "nvidia", "rules": [{"match": {"role": "qkv"}, "use": "mxfp8"}]}


def test_a_starter_for_a_model_without_linear_layers():
    assert Policy.from_dict(yaml.safe_load(starter("ocp", [], "m"))) == Policy.preset("ocp")


def test_matches_lists_every_layer_once():
    layer_rules = policy(rule("bf16", name="model.layers.0.*"), rule({"wgrad": "bf16"}, role="ffn_out"))
    assert matches(layer_rules, decoder()).splitlines() == [
        "rule 1: {name: model.layers.0.*} → bf16: 5 layers",
        "    model.layers.0.attn.qkv  qkv  m=128 n=192 k=64",
        "    model.layers.0.attn.out  attn_out  m=128 n=64 k=64",
        "    model.layers.0.mlp.up  ffn_in  m=128 n=240 k=64",
        "    model.layers.0.mlp.down  ffn_out  m=128 n=64 k=240",
        "    model.layers.0.gate  router  m=128 n=8 k=64",
        "rule 2: {role: ffn_out} → {wgrad: bf16}: 3 layers, 1 more went to earlier rules",
        "    model.layers.1-3.mlp.down ×3  ffn_out  m=128 n=64 k=240",
        "preset nvidia: 13 layers",
        "    model.layers.1-3.attn.qkv ×3  qkv  m=128 n=192 k=64",
        "    model.layers.1-3.attn.out ×3  attn_out  m=128 n=64 k=64",
        "    model.layers.1-3.mlp.up ×3  ffn_in  m=128 n=240 k=64",
        "    model.layers.1-3.gate ×3  router  m=128 n=8 k=64",
        "    head  head  m=128 n=1000 k=64",
    ]


FACTORY = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 250), nn.Linear(250, 64)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

def model():
    return nn.Sequential(*(Block() for _ in range(3))), (torch.zeros(8, 64),), {}
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch) -> str:
    """Three blocks of two layers, k=64 and k=250, as a factory in the working directory."""
    (tmp_path / "policy_tool_models.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return "policy_tool_models:model"


def write(rules: list[dict[str, Any]], preset: str = "nvidia") -> str:
    Path("p.yaml").write_text(json.dumps({"version": 1, "preset": preset, "rules": rules}))
    return "p.yaml"


def test_policy_from_init_passes_check_and_show(model: str, capsys):
    assert main(["policy", "init", model, "-o", "start.yaml"]) == 0
    assert capsys.readouterr().out == "written to start.yaml\n"
    assert "#   0-2.down  m=8 n=64 k=250\n" in Path("start.yaml").read_text()

    assert main(["policy", "check", "start.yaml", "--model", model]) == 0
    printed = capsys.readouterr().out
    assert "rule 2: {role: ffn_out} → mxfp8: 3 layers\n    0-2.down ×3  ffn_out  m=8 n=64 k=250\n" in printed
    assert "preset nvidia: 0 layers" in printed

    use = {"fprop": "mxfp8", "wgrad": "bf16", "weight_block": "32x32", "saved": "bf16"}
    assert main(["policy", "show", write([rule(use, name="1.up")]), "--model", model]) == 0
    printed = capsys.readouterr().out
    rows = [" ".join(line.split()) for line in printed.splitlines()]
    assert rows[2] == "0,2.up ×2 ffn_in mxfp8 mxfp8 mxfp8 e4m3 1x32 rceil preset nvidia: role ffn_in"
    assert rows[4].startswith("1.up ffn_in mxfp8 mxfp8 bf16 e4m3 1x32 rceil, w 32x32,")
    assert rows[5].startswith("saved bf16 dgrad: preset nvidia:")
    assert max(map(len, printed.splitlines())) <= 120


def test_init_overwrites_a_file_only_with_force(model: str, capsys):
    Path("start.yaml").write_text("mine")
    assert main(["policy", "init", model, "-o", "start.yaml"]) == 2
    assert Path("start.yaml").read_text() == "mine"
    assert "start.yaml exists: give --force to overwrite it" in capsys.readouterr().err
    assert main(["policy", "init", model, "-o", "start.yaml", "--force", "--preset", "bf16"]) == 0
    assert Policy.load("start.yaml").base.name == "bf16"


def test_policy_init_refuses_unknown_presets_and_missing_folders(model: str, capsys):
    assert main(["policy", "init", model, "--preset", "nvida"]) == 2
    assert "did you mean 'nvidia'?" in capsys.readouterr().err
    assert main(["policy", "init", model, "-o", "no/such/folder.yaml"]) == 2
    assert "no/such/folder.yaml cannot be written: there is no folder" in capsys.readouterr().err


def test_check_with_a_model_fails_on_unmatched_rules(model: str, capsys):
    file = write(
        [rule(name=["0.*", "1.upp"]), rule("bf16", name="9.*"), rule(role="ffn_out", min_k=256)], "bf16"
    )
    assert main(["policy", "check", file]) == 0
    capsys.readouterr()
    assert main(["policy", "check", file, "--model", model]) == 1
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "p.yaml: rule 1: '1.upp' matched no layer (did you mean '1.up'?)",
        "p.yaml: rule 2 matched no layer: '9.*'",
        "p.yaml: rule 3 matched no layer: 0-2.down below min_k 256 (k=250)",
    ]


def test_show_gives_the_reason_of_unsupported_layers():
    gemms = [
        GemmRecord(name=f"{i}.a", role="ffn_in", gemm=gemm, m=1, n=2, k=3, precision=precision, reason=reason)
        for i in range(2)
        for gemm, precision, reason in (
            ("fprop", "bf16", "unsupported dtype float64: use FP32, BF16 or FP16"),
            ("dgrad", "mxfp8", "policy: rule 1"),
        )
    ]
    operand = OperandFormat(operand="dy", elem="e5m2", block="1x32", rounding="even")
    text = decisions(policy(), [gemms[0], replace(gemms[1], formats=(operand,))])
    assert "e5m2 1x32 even" in text
    assert "fprop: unsupported dtype" in text
    assert "×2" in decisions(policy(), gemms)


def test_layers_of_a_report_are_those_of_its_forward_gemms():
    facts = {"name": "a", "role": "qkv", "m": 1, "n": 2, "k": 3, "precision": "bf16", "module": "Linear"}
    gemms = [GemmRecord(**facts, reason="", gemm=gemm) for gemm in ("fprop", "dgrad", "wgrad")]
    assert layers_of(gemms) == (Layer(name="a", role=Role.QKV, module="Linear", m=1, n=2, k=3),)


def test_a_look_at_a_model_fails_on_mistakes_and_only_warns_of_near_misses(caplog):
    block = nn.Sequential(nn.Linear(64, 250), nn.GELU(), nn.Linear(250, 64))
    near = [rule(min_k=256, role="ffn_out"), rule(name="re:[01]")]
    over = {"version": 1, "preset": "bf16", "rules": [rule(min_k=60, name=["0", "2"]), *near]}
    caplog.set_level("WARNING", logger="mxcompile.rules")
    with pytest.raises(PolicyError) as caught:
        explain(block, torch.zeros(8, 64), policy=over)
    assert str(caught.value).splitlines() == [
        "policy: rule 2 matched no layer: 2 below min_k 256 (k=250)",
        "policy: rule 3 decides nothing: 0 went to rule 1; move it up",
    ]
    caplog.clear()
    only_near = {"version": 1, "preset": "bf16", "rules": [rule(min_n=70, name="*")]}
    report = explain(block, torch.zeros(8, 64), policy=only_near)
    assert {gemm.precision for gemm in report.gemms if gemm.name == "0"} == {"mxfp8"}
    (record,) = caplog.records
    assert record.getMessage() == (
        "policy: rule 1: 2 below min_n 70 (n=64), just under, and no other rule decides;"
        " lower the limit or add a rule"
    )
