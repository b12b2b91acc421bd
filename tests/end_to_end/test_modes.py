"""The ways a model is run: dtypes, autocast, inference, checkpointing, accumulation, modes, attentions."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers.blocks import WIDTH, block, features
from helpers.eager import reference_linears
from helpers.eager_backend import EagerBackend
from helpers.made import Made
from helpers.needs import VIEWS_OF_ONE_BUFFER
from helpers.reference import sqnr_db
from helpers.reports import EVERYTHING as ALL
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor import config, list_mode_options
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import mxcompile
from mxcompile import Backend
from mxcompile.compiler.hooks import inductor
from mxcompile.errors import OptionError

LINEARS = 7  # of a block
Grads = dict[str, Tensor]


def train(run: Any, model: nn.Module, x: Tensor) -> tuple[Tensor, Grads]:
    """Output and gradients of one step."""
    model.zero_grad()
    y = run(x)
    y.float().square().mean().backward()
    return y.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def linears(report: mxcompile.Report) -> list[mxcompile.GemmRecord]:
    return [gemm for gemm in report.gemms if gemm.role not in ("attn_scores", "attn_values")]


def worst(expected: Grads, computed: Grads) -> tuple[float, str]:
    assert computed.keys() == expected.keys()
    return min((sqnr_db(expected[name], computed[name]), name) for name in expected)


DTYPES = {
    "fp32": (torch.float32, None, 100, 100),
    "bf16": (torch.bfloat16, None, 30, 25),
    "fp16": (torch.float16, None, 30, 25),
    "autocast_bf16": (torch.float32, torch.bfloat16, 30, 25),
    "autocast_fp16": (torch.float32, torch.float16, 30, 25),
}


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch, of a norm in autocast
@pytest.mark.parametrize("name", DTYPES)
def test_training_in_each_dtype_quantizes_all_linear_layers(name: str):
    stored, cast, output_db, gradient_db = DTYPES[name]
    model = block().to(stored)
    x, eager = features(3, 11, WIDTH).to(stored), copy.deepcopy(model)
    context = torch.autocast("cpu", cast) if cast else nullcontext()
    compiled = torch.compile(model, backend=EagerBackend(), fullgraph=True)
    with context:
        y, gradients = train(compiled, model, x)
    (report,) = mxcompile.reports()
    assert [gemm.precision for gemm in linears(report)] == ["mxfp8"] * (3 * LINEARS)
    with reference_linears(eager, report), context:
        expected, reference = train(eager, eager, x)
    assert y.dtype is expected.dtype
    assert {g.dtype for g in gradients.values()} == {stored}
    assert sqnr_db(expected, y) > output_db
    assert worst(reference, gradients)[0] > gradient_db


def test_fp64_is_a_recorded_fallback():
    model, x = block().double(), features(2, 9, WIDTH).double()
    eager = copy.deepcopy(model)
    y, gradients = train(torch.compile(model, backend=EagerBackend()), model, x)
    expected, reference = train(eager, eager, x)
    (report,) = mxcompile.reports()
    assert {(g.precision, g.reason) for g in linears(report)} == {
        ("bf16", "unsupported dtype float64: use FP32, BF16 or FP16")
    }
    assert len(linears(report)) == 3 * LINEARS
    assert sqnr_db(expected, y) > 250
    assert worst(reference, gradients)[0] > 250


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_quantizes_forward_and_saves_nothing(mode: Any):
    model, x = block().eval(), features(2, 9, WIDTH)
    with mode():
        y = torch.compile(model, backend=EagerBackend(), fullgraph=True)(x)
        (report,) = mxcompile.reports()
        with reference_linears(model, report) as replaced:
            expected = model(x)
    assert [(g.gemm, g.precision) for g in linears(report)] == [("fprop", "mxfp8")] * LINEARS
    assert len(replaced.used) == LINEARS
    assert report.summary.saved_bytes is None
    assert sqnr_db(expected, y) > 100


class Checkpointed(Made, first=block, second=block):
    def forward(self, x: Tensor) -> Tensor:
        for inner in (self.first, self.second):
            x = checkpoint(inner, x, use_reentrant=False)
        return x


def test_activation_checkpointing_saves_less_with_equal_numbers():
    model, x = Checkpointed(), features(2, 9, WIDTH)
    plain = nn.Sequential(copy.deepcopy(model.first), copy.deepcopy(model.second))
    y, gradients = train(torch.compile(model, backend=EagerBackend(), fullgraph=True), model, x)
    (report,) = mxcompile.reports()
    mxcompile.clear_reports()
    expected, reference = train(torch.compile(plain, backend=EagerBackend()), plain, x)
    (without,) = mxcompile.reports()
    assert torch.equal(y, expected)
    assert worst(dict(zip(gradients, reference.values(), strict=True)), gradients)[0] > 100
    assert report.summary.num_gemms == without.summary.num_gemms
    assert {g.precision for g in linears(report)} == {"mxfp8"}
    assert {g.name for g in linears(report)} == {
        f"{part}.{rest}" for part in ("first", "second") for rest in _names(block())
    }
    assert report.summary.saved_bytes < without.summary.saved_bytes


def _names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def test_gradient_accumulation_adds_microbatches_after_one_compile():
    model, backend = block(), EagerBackend()
    compiled = torch.compile(model, backend=backend)
    batches = [features(2, 9, WIDTH), features(2, 9, WIDTH).flip(0)]
    separate = [train(compiled, model, x)[1] for x in batches]
    model.zero_grad()
    for x in batches:
        compiled(x).float().square().mean().backward()
    accumulated = {name: p.grad for name, p in model.named_parameters()}
    summed = {name: separate[0][name] + separate[1][name] for name in accumulated}
    assert all(torch.equal(accumulated[name], summed[name]) for name in summed)
    assert len(mxcompile.reports()) == 1
    assert len(backend.graphs) == 2


PRECISIONS = ["mxfp8", "mxint8", "mxfp4", "nvfp4", {"precision": "fp8", "scaling": "tensor"}]


@pytest.mark.parametrize("use", PRECISIONS, ids=str)
def test_backward_that_plain_inductor_compiles_has_the_same_gradients(use: Any):
    """Compiled autograd may have another backend than forward: no pass of mxcompile runs in that compile."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    policy = {"version": 1, "rules": [{"match": {"name": "*"}, "use": use}]}
    compiled, x = torch.compile(model, backend="mxfp8", options={"policy": policy}), torch.randn(40, 64)
    _, expected = train(compiled, model, x)
    model.zero_grad()
    loss = compiled(x).square().mean()
    with compiled_autograd._enable(torch.compile(backend="inductor")):
        loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6)


def test_max_autotune_works_as_mode_and_in_backend():
    """As a mode of ``torch.compile``, which takes no options beside it, and of a Backend."""
    mode = "max-autotune-no-cudagraphs"
    model, x = nn.Sequential(nn.Linear(WIDTH, 40), nn.GELU(), nn.Linear(40, WIDTH)), features(5, WIDTH)
    with torch.no_grad():
        y = torch.compile(model, backend="mxfp8", mode=mode, fullgraph=True)(x)
        with reference_linears(model, mxcompile.reports()[0]):
            expected = model(x)
        torch._dynamo.reset()
        valued = torch.compile(model, backend=Backend(policy="nvidia", mode=mode), fullgraph=True)(x)
    (report,) = mxcompile.reports()  # compiled twice, alike: one model, one report
    assert [g.precision for g in report.gemms] == ["mxfp8"] * 2
    assert sqnr_db(expected, y) > 60
    assert torch.equal(y, valued)


@pytest.mark.parametrize(
    "mode",
    ["lite", *(pytest.param(mode, marks=pytest.mark.slow) for mode in list_mode_options() if mode != "lite")],
)
def test_every_mode_of_inductor_quantizes_the_model(mode: str):
    """Also the one that turns Inductor's passes off, of which the report then says that they ran."""
    model, x = nn.Sequential(nn.Linear(WIDTH, 40), nn.GELU(), nn.Linear(40, WIDTH)), features(5, WIDTH)
    eager = copy.deepcopy(model)
    y, gradients = train(torch.compile(model, backend="mxfp8", mode=mode), model, x)
    (report,) = mxcompile.reports()
    with reference_linears(eager, report):
        expected, reference = train(eager, eager, x)
    assert [gemm.precision for gemm in report.gemms] == ["mxfp8"] * 5
    assert all(gemm.kernel for gemm in report.gemms)
    assert sqnr_db(expected, y) > 60
    assert worst(reference, gradients)[0] > 60
    assert [warning for warning in report.summary.warnings if "use_joint_graph_passes=True" in warning] == (
        [*report.summary.warnings] if mode == "lite" else []
    )
    assert bool(report.summary.warnings) == (mode == "lite")


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["use_joint_graph_passes", "use_post_grad_passes"])
def test_a_setting_that_turns_the_passes_off_does_not(setting: str):
    model, x = nn.Linear(WIDTH, WIDTH), features(5, WIDTH)
    with config.patch({setting: False}):
        torch.compile(model, backend="mxfp8", options={"policy": ALL, "strict": True})(x)
    (report,) = mxcompile.reports()
    assert {gemm.precision for gemm in report.gemms} == {"mxfp8"}
    assert f"{setting}=True" in str(report)
    with pytest.raises(OptionError, match=f"mxcompile needs Inductor's {setting}=True"):
        Backend(inductor={setting: False})


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting", ["freezing", "cpp_wrapper", "fallback_random", "force_disable_caches", "graph_partition"]
)
def test_a_setting_that_takes_other_ways_through_inductor_quantizes(setting: str):
    model, x = nn.Linear(WIDTH, WIDTH), features(5, WIDTH)
    options = {"policy": ALL, "strict": True, "inductor": {setting: True}}
    with torch.no_grad():
        y = torch.compile(model, backend="mxfp8", options=options)(x)
        (report,) = mxcompile.reports()
        with reference_linears(model, report):
            expected = model(x)
    assert {gemm.precision for gemm in report.gemms} == {"mxfp8"}
    assert sqnr_db(expected, y) > 60


@pytest.mark.parametrize("strict", [False, True])
def test_graph_without_passes_warns_or_raises_under_strict(strict: bool, monkeypatch: pytest.MonkeyPatch):
    """As it would be under a setting of a later release that turns them off."""
    monkeypatch.setattr(inductor, "NEEDED", {})
    compiled = torch.compile(nn.Linear(8, 8), backend=Backend(mode="lite", policy=ALL, strict=strict))
    if strict:
        with pytest.raises(BackendCompilerFailed, match="Inductor ran no pass of mxcompile"):
            compiled(torch.ones(3, 8))
        return
    compiled(torch.ones(3, 8))
    (report,) = mxcompile.reports()
    (warning,) = report.summary.warnings
    assert "ran no pass of mxcompile over a graph of the model" in warning


class Counting(CustomGraphPass):
    """A pass of a user's, which counts its graphs."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.graphs += 1

    def uuid(self) -> str:
        return "counting"


def test_passes_of_the_user_run_wherever_they_are_set():
    model, x = nn.Linear(WIDTH, WIDTH), features(5, WIDTH)
    keys = ("joint_custom_pre_pass", "post_grad_custom_pre_pass")
    for among_options in (False, True):
        passes = {key: Counting() for key in keys}
        torch._dynamo.reset()
        with torch.no_grad(), config.patch({} if among_options else passes):
            options = passes if among_options else {}
            torch.compile(model, backend="mxfp8", options={"policy": ALL, "inductor": options})(x)
        assert [user_pass.graphs for user_pass in passes.values()] == [1, 1]


class Flex(Made, qkv=(WIDTH, 3 * WIDTH), out=(WIDTH, WIDTH)):
    """Causal attention by flex_attention."""

    def forward(self, x: Tensor) -> Tensor:
        def causal(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return torch.where(q >= k, score, -float("inf"))

        q, k, v = self.qkv(x).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        return x + self.out(flex_attention(q, k, v, score_mod=causal).transpose(1, 2).flatten(2))


@VIEWS_OF_ONE_BUFFER
def test_layers_around_flex_attention_are_quantized_in_inference():
    """In inference: on a CPU it has no backward."""
    model, x = Flex(), features(2, 37, WIDTH)
    with torch.no_grad():
        y = torch.compile(model, backend="mxfp8", fullgraph=True)(x)
        (report,) = mxcompile.reports()
        with reference_linears(model, report):
            q, k, v = torch.nn.functional.linear(x, model.qkv.weight, model.qkv.bias).unflatten(
                -1, (3, 4, WIDTH // 4)
            ).permute(2, 0, 3, 1, 4)  # fmt: skip
            attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            expected = x + model.out(attended.transpose(1, 2).flatten(2))
    assert [(g.name, g.role, g.precision) for g in linears(report)] == [
        ("qkv", "qkv", "mxfp8"),
        ("out", "attn_out", "mxfp8"),
    ]
    assert {(g.role, g.precision) for g in report.gemms if g not in linears(report)} == {
        ("attn_scores", "bf16"),
        ("attn_values", "bf16"),
    }
    assert sqnr_db(expected, y) > 60


ENCODER = {
    "self_attn.in_proj": "qkv",
    "self_attn.out_proj": "attn_out",
    "linear1": "ffn_in",
    "linear2": "ffn_out",
}


MASKS = {
    "whole": {},
    "padded": {"src_key_padding_mask": torch.arange(9) >= torch.tensor([[9], [6], [8]])},
    "causal": {"mask": torch.ones(9, 9, dtype=torch.bool).triu(1)},
    "added": {"mask": torch.full((9, 9), -torch.inf).triu(1)},
}


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("norm_first", [False, True])
def test_fused_encoder_layer_is_decomposed_and_quantized_in_inference(norm_first: bool, masks: str):
    """nn.TransformerEncoder then runs one fused operator a layer, which is taken apart."""
    layer = nn.TransformerEncoderLayer(
        WIDTH, 4, 96, dropout=0.0, batch_first=True, norm_first=norm_first, activation="gelu"
    )
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), features(3, 9, WIDTH)
    with torch.no_grad():
        y = torch.compile(model, backend=EagerBackend(), fullgraph=True)(x, **MASKS[masks])
        (report,) = mxcompile.reports()
        with reference_linears(model, report) as replaced:
            expected = model(x, **MASKS[masks])
    assert {g.precision for g in linears(report)} == {"mxfp8"}
    roles = {f"layers.{i}.{name}": role for i in range(2) for name, role in ENCODER.items()}
    assert {g.name: g.role for g in linears(report)} == roles
    assert replaced.used == set(roles)
    assert sqnr_db(expected, y) > 100


def test_multihead_attention_in_inference_is_quantized():
    model, x = nn.MultiheadAttention(WIDTH, 4, batch_first=True).eval(), features(3, 9, WIDTH)
    with torch.no_grad():
        y, weights = torch.compile(model, backend=EagerBackend(), fullgraph=True)(x, x, x)
        (report,) = mxcompile.reports()
        with reference_linears(model, report):
            expected, expected_weights = model(x, x, x)
    assert {(g.name, g.precision) for g in linears(report)} == {("in_proj", "mxfp8"), ("out_proj", "mxfp8")}
    assert sqnr_db(expected, y) > 100
    assert sqnr_db(expected_weights, weights) > 100
