"""`quantize_weights_`: which weights it stores, what the model then computes, and what it refuses."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from helpers.policies import every
from helpers.written import Written, random_parameter
from small_models import TOKENS, Block, Model, dense_copy, quantized, row_of, same_bytes, stored_names
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import mxcompile
from mxcompile import MXTensor
from mxcompile.errors import ModelError, PolicyError
from mxcompile.graph import dead
from mxcompile.graph.tags import tags_of
from mxcompile.lowering.graph.weight_only import WeightOnly
from mxcompile.lowering.targets import TARGETS
from mxcompile.storage import tensor

BF16, FP4 = torch.bfloat16, torch.float4_e2m1fn_x2
ALL = every("mxfp8", preset="inference")


def test_blocks_are_stored_and_the_rest_is_not():
    model = Model()
    expected = {name: value.detach().clone() for name, value in model.named_parameters()}
    _, table = quantized(model)
    wanted = {f"blocks.{i}.{name}.weight" for i in range(2) for name in ("gate", "up", "down")}
    assert stored_names(model) == wanted
    for name, value in model.named_parameters():
        if name in wanted:
            assert torch.equal(value.dequantize(), mxcompile.quantize(expected[name]).dequantize())
        else:
            assert torch.equal(value, expected[name])
    assert table.num_bytes <= 0.52 * table.bytes_bf16
    by_name = {weight.name: weight for weight in table.weights}
    assert by_name["embed.weight"].reason == "role head"
    assert model.head.weight is model.embed.weight
    assert "6 of 7 weights in MXFP8" in str(table)
    long = tuple(dataclasses.replace(weight, name=f"decoder.{weight.name}." * 9) for weight in table.weights)
    lines = str(mxcompile.StoredWeights(weights=long)).splitlines()
    assert max(map(len, lines)) <= 120


def test_weights_inside_wrappers_of_blocks_are_stored_under_the_users_names():
    model, plain = Model(), quantized(Model())[1]
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    _, table = quantized(model)
    assert table == plain
    assert len(stored_names(model)) == 6


def test_a_rule_of_blocks_counts_those_that_are_not_traced_too():
    rule = {"match": {"blocks": {"first": 4}}, "use": "bf16"}
    model, table = quantized(Model(blocks=8), {"version": 1, "preset": "inference", "rules": [rule]})
    assert stored_names(model) == {
        f"blocks.{index}.{name}.weight" for index in range(4, 8) for name in ("gate", "up", "down")
    }
    kept = [w.reason for w in table.weights if w.name.startswith("blocks.") and not w.stored]
    assert kept == ["policy: rule 1"] * 12


def test_model_with_stored_weights_computes_with_their_values():
    model, _ = quantized()
    dense = dense_copy(model)
    with torch.no_grad():
        assert torch.equal(model(TOKENS), dense(TOKENS))
        compiled = torch.compile(model, backend="inductor", fullgraph=True)(TOKENS)
        torch.testing.assert_close(compiled, torch.compile(dense, backend="inductor")(TOKENS))


def test_compiled_with_mxfp8_it_is_the_model_of_dense_weights_bit_for_bit():
    model, _ = quantized()
    dense = dense_copy(model)
    results, bytes_ = [], []
    options = {"policy": "inference", "target": "cpu_bf16"}  # sums of BF16 values in one order
    with torch.no_grad():
        for variant in (model, dense):
            torch._dynamo.reset()
            mxcompile.clear_reports()
            compiled = torch.compile(variant, backend="mxfp8", options=options, fullgraph=True)
            results.append(compiled(TOKENS))
            bytes_.append(mxcompile.reports()[-1].summary.weight_bytes)
    assert torch.equal(*results)
    blocks = sum(value.numel() for name, value in dense.named_parameters() if name.startswith("blocks"))
    assert bytes_[0] < bytes_[1] - 0.9 * blocks


def test_gemm_records_have_the_stored_format_of_weights():
    model, _ = quantized()
    for policy, precision in (("inference", "mxfp8"), ("bf16", "bf16")):
        report = mxcompile.explain(model, TOKENS, policy=policy, training=False)
        record = next(gemm for gemm in report.gemms if gemm.name == "blocks.1.down")
        assert record.precision == precision
        (weight,) = (form for form in record.formats if form.operand == "w")
        assert str(weight) == "w:e4m3 1x32 stored"
        head = next(gemm for gemm in report.gemms if gemm.name == "head")
        assert head.formats == ()


@pytest.mark.usefixtures("in_this_process")
def test_stored_weights_are_not_cast_again(monkeypatch):
    """Neither for the chip's own MX GEMM nor for an emulated one, and a few rows read the codes."""
    from mxcompile.compiler.hooks import compilation

    casts_of_target: dict[str, list[str]] = {}

    def look(graph, target, device, **_) -> None:
        if target.name == "sm_90":
            WeightOnly(target=TARGETS["sm_90"], device="cpu").apply(graph)
            dead.eliminate(graph)
        calls = [str(node.target) for node in graph.nodes if node.op == "call_function"]
        casts_of_target[target.name] = calls
        kernels = [tag.kernel for node in graph.nodes for tag in tags_of(node)]
        casts_of_target[f"{target.name} kernels"] = kernels

    monkeypatch.setattr(compilation.lowering, "run", look)
    model, _ = quantized()
    for target in ("sm_90", "sm_100"):
        mxcompile.explain(model, TOKENS[:1], policy="inference", training=False, target=target)
        casts = [name for name in casts_of_target[target] if "mx.cast" in name]
        assert len(casts) == 4, "two activations of each block"
        assert "mx.decode.default" not in casts_of_target[target]
    mxcompile.explain(model, TOKENS[:1], policy="bf16", training=False, target="sm_90")
    assert casts_of_target["sm_90"].count("mx.weight_only_mm.default") == 6
    assert "mx.decode.default" not in casts_of_target["sm_90"]
    assert all(kernel.startswith("mx_weight_only_mm") for kernel in casts_of_target["sm_90 kernels"][:6])


TYPO = "policy: rule 1 matched no layer: 'blocks.*.dwon' (did you mean 'blocks.*.down'?)"
RULES = {
    "head": ({"name": "head"}, "policy: rule 1; the embedding reads its rows", []),
    "both": ({"role": ["head", "embedding"]}, "policy: rule 1; the embedding reads its rows", []),
    "all": ({"name": "*"}, "policy: rule 1; the embedding reads its rows", []),
    "table": ({"name": "embed"}, "policy: rule 1, but head keeps it", []),
    "typo": ({"name": "blocks.*.dwon"}, "role head", [TYPO]),
}


@pytest.mark.parametrize("case", RULES)
def test_rule_for_tied_weights_gives_reason_and_warnings(case, caplog):
    match, reason, warnings = RULES[case]
    policy = {"version": 1, "preset": "inference", "rules": [{"match": match, "use": "mxfp8"}]}
    with caplog.at_level("WARNING", logger="mxcompile"):
        _, table = quantized(policy=policy)
    assert next(w.reason for w in table.weights if w.name == "embed.weight") == reason
    assert len(caplog.messages) == len(warnings)
    assert all(map(str.startswith, caplog.messages, warnings))


@pytest.mark.parametrize("policy", ["fp8_rowwise", "fp8_tensor", "fp8_block", "fp8_delayed"])
def test_policy_without_mxfp8_stores_no_weights(policy):
    model = Model()
    message = f"preset {policy} stores no weight: stored weights have a scale for 32 elements"
    with pytest.raises(PolicyError, match=message):
        quantized(model, policy)
    assert not stored_names(model)
    _, table = quantized(policy="bf16")  # which asks for none
    assert "0 of 7 weights in MXFP8" in str(table)


def test_of_several_formats_those_of_32_elements_are_stored():
    rules = [
        {"match": {"name": "*.up"}, "use": {"precision": "mxfp8", "block": 64}},
        {"match": {"name": "*.gate"}, "use": "mxfp6_e2m3"},
        {"match": {"name": "*.down"}, "use": {"precision": "mxfp8", "weight_block": "32x32"}},
    ]
    message = r"this mxfp6_e2m3 has other scales; .* this mxfp8 has other scales$"
    with pytest.raises(PolicyError, match=message):
        quantized(policy={"version": 1, "preset": "inference", "rules": rules})
    model, table = quantized(policy={"version": 1, "preset": "inference", "rules": rules[:2]})
    assert stored_names(model) == {"blocks.0.down.weight", "blocks.1.down.weight"}
    reasons = {w.name.split(".")[2]: w.reason for w in table.weights if w.name.startswith("blocks.0")}
    assert "this mxfp8 has other scales" in reasons["up"]
    assert "this mxfp6_e2m3 has other scales" in reasons["gate"]


def test_headline_of_the_table_counts_weights_left_unquantized():
    model, table = quantized()
    every = sum(getattr(p, "stored_bytes", p.nbytes) for p in model.parameters() if p.ndim > 1)
    bf16 = 2 * sum(p.numel() for p in model.parameters() if p.ndim > 1)
    first, second = str(table).splitlines()[:2]
    assert first == "6 of 7 weights in MXFP8: 74.2 KiB, 51.6% of their bytes in BF16"
    assert second == f"all 7 weights: {every / 1024:.1f} KiB, {every / bf16:.1%} of BF16"


def test_blocks_run_along_the_contracted_dimension():
    """Weights stored [K, N], as wide as they are long; one shared by two layers; one used both ways."""

    def forward(model: Written, x: Tensor) -> Tensor:
        x = torch.relu(x @ model.first) @ model.second.t()
        return x @ model.both @ model.both.t()

    names = "first", "second", "both"
    model = Written(forward, **{name: random_parameter(64, 64, dtype=BF16) for name in names})
    dense = [value.detach().clone() for value in model.parameters()]
    table = mxcompile.quantize_weights_(model, ALL, args=(torch.randn(3, 64, dtype=BF16),), progress=False)
    assert stored_names(model) == {"first", "second"}
    assert torch.equal(model.first.dequantize(), mxcompile.quantize(dense[0], block_dim=0).dequantize())
    assert torch.equal(model.second.dequantize(), mxcompile.quantize(dense[1], block_dim=1).dequantize())
    assert "in different ways" in next(w.reason for w in table.weights if w.name == "both")


def test_stacked_experts_are_stored_along_their_contraction():
    """Every token goes through all experts of a stack."""

    def forward(model: Written, x: Tensor) -> Tensor:
        hidden = torch.relu(torch.bmm(x.expand(4, *x.shape), model.up.transpose(1, 2)))
        return torch.bmm(hidden, model.down).sum(0)

    model = Written(forward, **{name: random_parameter(4, 96, 64, dtype=BF16) for name in ("up", "down")})
    x = torch.randn(3, 64, dtype=BF16)
    mxcompile.quantize_weights_(model, ALL, args=(x,), progress=False)
    assert [value.block_dim for value in model.parameters()] == [-1, -2]
    report = mxcompile.explain(model, x, policy=ALL, training=False)
    assert [gemm.name for gemm in report.gemms] == ["up", "down"]
    with torch.no_grad():
        dense = [value.dequantize() for value in model.parameters()]
        expected = torch.bmm(torch.relu(torch.bmm(x.expand(4, 3, 64), dense[0].mT)), dense[1]).sum(0)
        assert torch.equal(model(x), expected)


def test_shared_modules_and_parameters_stay_shared():
    model = nn.Sequential(Block(), Block())
    model[1].up = model[0].up
    model[1].down.weight = model[0].down.weight
    mxcompile.quantize_weights_(model, ALL, args=(torch.randn(2, 96, dtype=BF16),), progress=False)
    assert isinstance(model[1].up.weight, MXTensor)
    assert isinstance(model[1].down.weight, MXTensor)
    assert model[1].down.weight is model[0].down.weight


def test_quantizing_twice_keeps_the_stored_weights():
    model, _ = quantized()
    before = {name: id(value) for name, value in model.named_parameters()}
    _, table = quantized(model)
    assert {name: id(value) for name, value in model.named_parameters()} == before
    assert {w.reason for w in table.weights if w.stored} == {"stored in mxfp8 already"}


def test_quantize_weights_works_on_the_meta_device():
    with torch.device("meta"):
        model = Model()
    quantized(model)
    assert len(stored_names(model)) == 6
    assert all(value.is_meta for value in model.parameters())
    source, _ = quantized()
    model.load_state_dict(source.state_dict(), assign=True)
    with torch.no_grad():
        assert torch.equal(model(TOKENS), source(TOKENS))


@pytest.mark.parametrize("how", [{}, {"elem_dtype": FP4, "rounding": "two-level"}], ids=["mxfp8", "nvfp4"])
def test_a_large_weight_is_cast_inpieces(how):
    from mxcompile.storage import cast

    x = torch.randn(5, 300, 70) * torch.exp2(torch.randint(-9, 9, (5, 300, 70)).float())
    for dim in range(3):
        expected = mxcompile.quantize(x[:4], block_dim=dim, **how)
        pieces = len(list(cast.pieces(x, dim)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cast, "_CHUNK", 1000)
            assert len(list(cast.pieces(x, dim))) > pieces
            part = cast.cast(x[:4], dim, expected.form)
        assert same_bytes(part.qdata, expected.qdata)
        assert torch.equal(part.scale_bytes, expected.scale_bytes)
        assert torch.equal(part.dequantize(), expected.dequantize())


def test_a_weight_that_is_not_seen_is_named():
    model = Model()
    model.unused = nn.Linear(32, 32, dtype=BF16)
    _, table = quantized(model)
    unused = row_of(table, "unused.weight")
    assert not unused.stored
    assert "no compiled product of the traced call" in unused.reason


def test_a_model_that_nothing_is_known_of_is_refused():
    with pytest.raises(ModelError, match="pass args="):
        mxcompile.quantize_weights_(Model())
    with pytest.raises(ModelError, match=r"quantize_weights_ takes a torch\.nn\.Module, found str"):
        mxcompile.quantize_weights_("meta-llama/Llama-3.1-8B")


def test_sharded_parameters_are_refused():
    store = FakeStore()
    torch.distributed.init_process_group("fake", store=store, rank=0, world_size=2)
    try:
        model = Model()
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        message = r"embed.weight is sharded \(a DTensor\): store the weights before"
        with pytest.raises(ModelError, match=message):
            quantized(model)
        assert not stored_names(model)
    finally:
        torch.distributed.destroy_process_group()


def test_report_counts_stored_weights_read_as_codes_or_dequantized():
    model, _ = quantized()
    report = mxcompile.explain(model, TOKENS, policy="bf16", training=False)
    text = " ".join(str(report).split())
    codes = sum("weight_only" in gemm.kernel for gemm in report.gemms)
    stored = [gemm for gemm in report.gemms if gemm.formats]
    share = sum(gemm.n * gemm.k for gemm in stored) / sum(gemm.n * gemm.k for gemm in report.gemms)
    assert f"weights stored in MXFP8: 6 of 7 layers, {share:.1%} of their elements;" in text
    assert f"products read the codes of {codes} and dequantized values of {6 - codes}" in text
    assert "bf16; w stored" in text
    rows = [line for line in str(report).splitlines() if line.startswith("bf16") and "w: e4m3" in line]
    counted = [int(re.search(r"(\d+) +\S+%$", row)[1]) for row in rows]
    assert sum(counted) == 6  # the head, whose weight is not stored, is not among them
    assert "stored" not in str(mxcompile.explain(Model(), TOKENS, policy="bf16", training=False))


def test_running_uncompiled_is_warned_about_once(caplog):
    tensor._warn_of_eager.cache_clear()
    model, _ = quantized()
    with torch.no_grad(), caplog.at_level("WARNING", logger="mxcompile.storage"):
        torch.compile(model, backend="eager")  # tracing says nothing
        mxcompile.explain(model, TOKENS, policy="bf16", training=False)
        assert not any(record.name == tensor.log.name for record in caplog.records)
        model(TOKENS)
        model(TOKENS)
    (warning,) = (record.getMessage() for record in caplog.records if record.name == tensor.log.name)
    assert warning.startswith("a product with a stored weight runs uncompiled")
