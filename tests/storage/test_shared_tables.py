"""An embedding that reads the rows of a stored weight: its values and graphs, and saving and tying it."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.needs import pretend_cpu
from safetensors.torch import load_file
from small_models import TOKENS, Model, assert_same_logits, dense_copy, head_rule, llama, quantized, row_of
from test_convert import written
from torch import nn

import mxcompile
from mxcompile import MXTensor
from mxcompile.checkpoint.convert import convert
from mxcompile.compiler.hooks import compilation
from mxcompile.ops.view import Decode

PRECISIONS = ["mxfp8", "mxint8", "mxfp4", "nvfp4"]
PROMPT = torch.arange(2, 10)[None]


def shared(precision: str = "mxint8") -> nn.Module:
    """A Llama whose head is tied, with its weight stored."""
    model = llama(tied=True).requires_grad_(False)
    mxcompile.quantize_weights_(model, head_rule(precision), progress=False)
    return model


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_tied_head_and_its_embedding_share_one_stored_tensor(precision: str):
    model = Model()
    _, table = quantized(model, head_rule(precision))
    assert isinstance(model.head.weight, MXTensor)
    assert model.embed.weight is model.head.weight
    row = row_of(table, "embed.weight")
    assert row.reason == "policy: rule 1; the embedding reads its rows"
    assert row.num_bytes == model.head.weight.stored_bytes < 64 * 96 * 2 * 0.54
    with torch.no_grad():
        assert torch.equal(model(TOKENS), dense_copy(model)(TOKENS))


def test_a_rule_stores_an_embedding_that_no_layer_reads(caplog):
    model = Model()
    model.head = nn.Linear(96, 64, bias=False, dtype=torch.bfloat16)
    policy = {"version": 1, "rules": [{"match": {"name": "embed"}, "use": "mxint8"}]}
    with caplog.at_level("WARNING", logger="mxcompile"):
        _, table = quantized(model, policy)
    assert not caplog.messages
    row = row_of(table, "embed.weight")
    assert (row.precision, row.role, row.reason) == ("mxint8", "embedding", "policy: rule 1")
    assert not isinstance(model.head.weight, MXTensor)
    with torch.no_grad():
        assert torch.equal(model(TOKENS), _dense(model)(TOKENS))


def _dense(model: nn.Module) -> nn.Module:
    """A copy of `model` whose weights are the values of the stored ones."""
    dense = copy.deepcopy(model)
    for module in dense.modules():
        for name, value in list(module._parameters.items()):
            if isinstance(value, MXTensor):
                module._parameters[name] = nn.Parameter(value.dequantize(), requires_grad=False)
    return dense


def test_rules_of_two_formats_store_no_shared_weight():
    model = Model()
    _, table = quantized(model, head_rule("mxint8", embedding="mxfp8"))
    row = row_of(table, "embed.weight")
    assert (row.stored, row.reason) == (False, "its GEMMs cast it in different ways")


def test_a_table_in_a_format_without_stored_weights_raises():
    model = Model()
    model.head = nn.Linear(96, 64, bias=False, dtype=torch.bfloat16)
    _, table = quantized(model, {"version": 1, "rules": [{"match": {"name": "embed"}, "use": "mxfp6_e2m3"}]})
    assert "this mxfp6_e2m3 has other scales" in row_of(table, "embed.weight").reason


@pytest.mark.parametrize("precision", ["mxint8", pytest.param("nvfp4", marks=pytest.mark.slow)])
def test_a_compiled_lookup_decodes_the_rows_alone(precision: str, monkeypatch):
    """The head is found, and reads the codes; no graph decodes the whole table."""
    decoded = []
    run = compilation.lowering.run

    def look(graph, *args, **options):
        run(graph, *args, **options)
        decoded.extend(tuple(node.meta["val"].shape) for node in graph.nodes if Decode.from_node(node))

    monkeypatch.setattr(compilation.lowering, "run", look)
    pretend_cpu(monkeypatch, many_rows="")
    model, _ = quantized(policy=head_rule(precision))
    with torch.no_grad():
        expected = model(TOKENS)
        mxcompile.clear_reports()
        output = torch.compile(model, backend="mxfp8", options={"policy": "bf16"}, fullgraph=True)(TOKENS)
    (report,) = mxcompile.reports()
    head = next(gemm for gemm in report.gemms if gemm.n == 64)
    assert (head.role, head.kernel) == ("head", "mx_weight_only_mm C++")
    assert decoded == [(2, 6, 96)]
    assert (output - expected).float().norm() < 1e-2 * expected.float().norm()


def test_a_file_has_the_shared_tensor_once(tmp_path):
    model = shared()
    mxcompile.save_quantized(model, tmp_path / "out")
    names = [name for name in load_file(tmp_path / "out/model.safetensors") if "layers" not in name]
    assert sorted(names) == [
        "model.embed_tokens.weight", "model.embed_tokens.weight_scale", "model.norm.weight"
    ]  # fmt: skip
    loaded = mxcompile.load_quantized(tmp_path / "out")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    into = mxcompile.load_quantized(tmp_path / "out", llama(tied=True))
    assert into.lm_head.weight is into.model.embed_tokens.weight
    assert_same_logits(PROMPT, model, loaded, into)


def test_a_state_dict_loads_into_models_with_and_without_stored_weights(tmp_path):
    model = shared()
    torch.save(model.state_dict(), tmp_path / "state.pt")
    codes = 64 * 64 + 64 * 2
    assert sum(part.nbytes for part in model.lm_head.weight.parts) == codes
    state = torch.load(tmp_path / "state.pt")
    plain, stored = llama(tied=True).requires_grad_(False), shared()
    plain.load_state_dict(state)
    stored.load_state_dict(state)
    assert not isinstance(plain.lm_head.weight, MXTensor)
    assert_same_logits(PROMPT, model, stored, plain)


def test_transformers_ties_and_unties_the_shared_tensor():
    model = shared()
    table = model.model.embed_tokens.weight
    with torch.no_grad():
        expected = model(input_ids=PROMPT).logits
    model.tie_weights()
    assert model.lm_head.weight is model.model.embed_tokens.weight is table
    model.lm_head.weight = nn.Parameter(table.dequantize(), requires_grad=False)
    assert model.model.embed_tokens.weight is table
    with torch.no_grad():
        assert torch.equal(model(input_ids=PROMPT).logits, expected)


@pytest.mark.parametrize("rows", [80, 40])
def test_a_resized_embedding_stays_stored_and_shared(rows: int):
    """Transformers makes values of the new size, which are stored in the format of the old tensor."""
    model = shared()
    before = model.model.embed_tokens.weight.dequantize()
    model.resize_token_embeddings(rows)
    weight = model.lm_head.weight
    assert weight is model.model.embed_tokens.weight
    assert weight.elem_dtype is torch.int8
    assert (weight.shape, weight.qdata.shape, weight.scale_bytes.shape) == ((rows, 64), (rows, 64), (rows, 2))
    kept = min(rows, 64)
    assert torch.equal(weight.dequantize()[:kept], before[:kept])
    with torch.no_grad():
        logits = model(input_ids=PROMPT).logits
    assert logits.shape == (1, 8, rows)
    assert logits.isfinite().all()


@pytest.mark.parametrize("precision", ["mxint8", "mxfp8"])
def test_a_checkpoint_that_other_tools_read_keeps_the_table(precision: str, tmp_path, caplog):
    """Transformers would take the codes of an embedding for values; mxcompile alone reads MXINT8."""
    source = written(llama(tied=True), tmp_path / "in")
    table = convert(source, tmp_path / "out", policy=head_rule(precision), progress=False)
    (row,) = (row for row in table.weights if "embed" in row.name)
    loaded = mxcompile.load_quantized(tmp_path / "out")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert isinstance(loaded.lm_head.weight, MXTensor) == row.stored == (precision == "mxint8")
    assert row.stored or row.reason == "policy: rule 1, but it is the table of an embedding"
    with caplog.at_level("WARNING", logger="mxcompile"):
        mxcompile.save_quantized(shared(precision), tmp_path / "saved")
    warned = [line for line in caplog.messages if "model.embed_tokens is an embedding" in line]
    assert len(warned) == (precision == "mxfp8")
