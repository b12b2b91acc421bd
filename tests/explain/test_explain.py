"""`explain`: what a compile would report, without running, changing or remembering anything."""

from __future__ import annotations

import dataclasses
import functools
from types import MethodType

import pytest
import torch
from torch import nn

import mxcompile
from mxcompile.compiler import rehearsal
from mxcompile.errors import PolicyError
from mxcompile.plan import plan, repeats

POLICY = {"version": 1, "rules": [{"match": {"name": "layers.4.*"}, "use": "bf16"}]}


class Block(nn.Module):
    def __init__(self, index, width=64):
        super().__init__()
        self.layer_idx = index
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Blocks in a list, walked through or indexed."""

    def __init__(self, blocks=8, by_index=False):
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        self.layers = nn.ModuleList(Block(i) for i in range(blocks))
        self.head = nn.Linear(64, 100)
        self.by_index = by_index

    def forward(self, tokens):
        x = self.embed(tokens)
        if self.by_index:
            for index in range(8):
                x = self.layers[index](x)
        else:
            for block in self.layers:
                x = block(x)
        return self.head(x)


TOKENS = torch.zeros(2, 16, dtype=torch.int64)


def by_name(report):
    return {(gemm.name, gemm.gemm, gemm.role): dataclasses.replace(gemm, source="") for gemm in report.gemms}


def unfolded(monkeypatch, *args, **kwargs):
    """`explain` with every layer traced; if one is folded all the same, this fails."""
    ways = tuple(way for way in plan._WAYS if way.leave_out is repeats.keep_all)
    with monkeypatch.context() as patch:
        patch.setattr(plan, "_WAYS", ways)
        patch.setattr(rehearsal, "fold", repeats.keep_all)
        patch.setattr(repeats, "_fold_container", None)
        return mxcompile.explain(*args, **kwargs)


@pytest.mark.parametrize("training", [True, False])
def test_equal_layers_are_traced_once_and_reported_all(monkeypatch, training):
    folded = mxcompile.explain(Model(), TOKENS, policy=POLICY, training=training)
    whole = unfolded(monkeypatch, Model(), TOKENS, policy=POLICY, training=training)
    assert by_name(folded) == by_name(whole)
    assert len(folded.gemms) == len(whole.gemms)
    for key in ("flop_share", "weight_bytes", "weight_bytes_bf16", "saved_bytes", "saved_bytes_bf16"):
        assert getattr(folded.summary, key) == getattr(whole.summary, key), key
    kept = {gemm.name: gemm.precision for gemm in folded.gemms if gemm.name.startswith("layers.4.")}
    assert kept["layers.4.up"] == "bf16"


def test_only_some_of_equal_layers_are_traced():
    model = Model(blocks=8)
    folded = repeats.fold(model, mxcompile.Policy())
    assert folded.standing_for == {"layers.1": tuple(f"layers.{i}" for i in range(2, 7))}
    assert list(model.layers._modules) == ["0", "1", "7"]


def test_layers_with_a_partial_each_are_equal():
    model = Model(blocks=8)
    for index, layer in enumerate(model.layers):
        layer.act = functools.partial(nn.functional.gelu, approximate="none" if index == 3 else "tanh")
    repeats.fold(model, mxcompile.Policy())
    assert list(model.layers._modules) == ["0", "1", "3", "7"]


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.layers[3], "up", nn.Linear(64, 128, bias=False)),
        lambda model: setattr(model.layers[3].norm, "eps", 1e-3),
        lambda model: model.layers[3].up.weight.requires_grad_(False),
        lambda model: setattr(model.layers[3].up, "weight", model.layers[5].up.weight),
        lambda model: model.layers[3].double(),
        lambda model: model.layers[3].up.register_forward_hook(lambda *_: None),
    ],
)
def test_a_layer_that_differs_is_kept(change):
    model = Model(blocks=8)
    change(model)
    repeats.fold(model, mxcompile.Policy())
    assert "3" in model.layers._modules


def test_layers_reached_by_index_are_all_traced():
    report = mxcompile.explain(Model(by_index=True), TOKENS)
    assert {gemm.name for gemm in report.gemms} >= {f"layers.{i}.up" for i in range(8)}


def test_the_report_is_the_compiled_models():
    model = Model(blocks=3)
    expected = mxcompile.explain(model, TOKENS)
    mxcompile.clear_reports()
    torch.compile(model, backend="mxfp8")(TOKENS).sum().backward()
    (compiled_report,) = mxcompile.reports()
    assert by_name(compiled_report) == by_name(expected)
    assert compiled_report.summary.saved_bytes == expected.summary.saved_bytes


@pytest.mark.parametrize("training", [False, True])
def test_within_inference_mode_the_report_is_that_without_gradients(training: bool):
    model = Model()
    with torch.no_grad():
        expected = mxcompile.explain(model, TOKENS, training=training)
    with torch.inference_mode():
        result = mxcompile.explain(Model(), TOKENS + 0, training=training)
    assert by_name(result) == by_name(expected)
    assert {gemm.gemm for gemm in result.gemms} == {"fprop"}


def test_nothing_is_run_changed_or_remembered():
    model = Model()
    model.register_buffer("calls", torch.zeros(()))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    state = torch.get_rng_state()
    mxcompile.clear_reports()
    mxcompile.explain(model, TOKENS, training=False)
    assert mxcompile.reports() == []
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == attributes
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_compiled_function_stays_compiled():
    model, graphs = Model(), []
    compiled = torch.compile(model, backend=lambda gm, _: graphs.append(gm) or gm.forward)
    compiled(TOKENS)
    mxcompile.explain(model, TOKENS)
    compiled(TOKENS)
    assert len(graphs) == 1


def test_a_compiled_forward_is_seen_through():
    """It runs the model itself, whichever copy it is called on: compiled by Inductor it crashed on fakes."""
    model = Model()
    model.forward = torch.compile(model.forward, backend="eager")
    model(TOKENS)
    assert by_name(mxcompile.explain(model, TOKENS)) == by_name(mxcompile.explain(Model(), TOKENS))


def test_models_on_the_meta_device_report_the_same():
    here = mxcompile.explain(Model(), TOKENS)
    with torch.device("meta"):
        there = mxcompile.explain(Model(), TOKENS)
    assert by_name(there) == by_name(here)


def test_targets_differ_in_estimates_only_where_known():
    cpu = mxcompile.explain(Model(), TOKENS, target="cpu")
    chip = mxcompile.explain(Model(), TOKENS, target="sm_100")
    assert cpu.summary.estimate_us is None
    assert chip.summary.estimate_us > 0
    assert all(gemm.estimate_bf16_us > 0 for gemm in chip.gemms)
    kept = [gemm for gemm in chip.gemms if gemm.precision == "bf16"]
    assert all(gemm.estimate_us == gemm.estimate_bf16_us for gemm in kept)


def test_attention_is_one_operator_on_every_target():
    report = mxcompile.explain(Model(), TOKENS, target="sm_90")
    kernels = {gemm.kernel for gemm in report.gemms if gemm.role == "attn_scores"}
    assert all("flash_attention" in kernel and "for_cpu" not in kernel for kernel in kernels)


@pytest.mark.parametrize(
    ("target", "instruction"),
    [("sm_100", "tcgen05.mma"), ("sm_120", "mma.sync"), ("gfx950", "v_mfma_scale"), ("sm_90", "dequantized")],
)
def test_kernels_are_those_of_the_target(target, instruction):
    report = mxcompile.explain(Model(), TOKENS, target=target)
    kernels = {gemm.kernel for gemm in report.gemms if gemm.precision == "mxfp8"}
    assert kernels
    assert all(instruction in kernel for kernel in kernels), kernels


def test_a_rule_that_matches_nothing_is_an_error():
    policy = {"version": 1, "rules": [{"match": {"name": "layer.4.*"}, "use": "bf16"}]}
    with pytest.raises(PolicyError, match=r"layer\.4"):
        mxcompile.explain(Model(), TOKENS, policy=policy)


def test_a_model_that_recasts_a_module_of_its_own_in_forward():
    class Recasting(Model):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            self.layers[0].up = self.layers[0].up.to(torch.float32)
            return super().forward(tokens)

    model = Recasting()
    model.layers[0].up.to(torch.bfloat16)
    before = {name: value.dtype for name, value in model.state_dict().items()}
    assert {gemm.name for gemm in mxcompile.explain(model, TOKENS).gemms} >= {"layers.0.up", "layers.1.up"}
    assert {name: value.dtype for name, value in model.state_dict().items()} == before


def test_layers_with_a_method_of_a_partial_function_are_folded():
    """Libraries print a layer by such a method, set on the instance."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64)) for _ in range(6)))
    expected = mxcompile.explain(model, torch.zeros(8, 64)).gemms
    for layer in model:
        layer[0].extra_repr = MethodType(functools.partial(lambda text, _: text, "int8"), layer[0])
    assert mxcompile.explain(model, torch.zeros(8, 64)).gemms == expected
