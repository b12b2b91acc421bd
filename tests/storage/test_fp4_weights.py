"""`quantize_weights_` in MXFP4 and NVFP4: bytes and values; products and records, of MXINT8 too."""

from __future__ import annotations

import copy
from importlib import import_module

import pytest
import torch
from helpers.needs import pretend_cpu
from helpers.paces import mostly_slow
from helpers.policies import every
from helpers.written import Written
from small_models import TOKENS, Model, dense_copy, quantized, same_bytes, stored_names
from torch import Tensor, nn
from torch.nn import functional as F

import mxcompile
from mxcompile import MXTensor
from mxcompile.errors import PolicyError

BF16, FP4 = torch.bfloat16, torch.float4_e2m1fn_x2


STORED = {
    "up": ("mxfp4", {"precision": "mxfp4", "rounding": "even"}, {"rounding": "even"}, 1 / 2 + 1 / 32),
    "down": ("mxfp4", "mxfp4", {}, 1 / 2 + 1 / 32),
    "gate": ("nvfp4", "nvfp4", {"rounding": "two-level"}, 1 / 2 + 1 / 16),
}
"""By layer of the second block: its precision, its rule, what `quantize` is told, bytes of an element."""


def test_weights_in_four_bits_take_a_quarter_and_are_those_of_the_precision():
    """Beside others in MXFP8; rounding as the rule says."""
    rules = [{"match": {"name": f"blocks.1.{name}"}, "use": use} for name, (_, use, *_) in STORED.items()]
    policy = {"version": 1, "preset": "inference", "rules": rules}
    model = Model()
    dense = {name: value.detach().clone() for name, value in model.named_parameters()}
    _, table = quantized(model, policy)
    for name, (_, _, how, num_bytes) in STORED.items():
        weight = getattr(model.blocks[1], name).weight
        expected = mxcompile.quantize(dense[f"blocks.1.{name}.weight"], elem_dtype=FP4, **how)
        assert weight.form == expected.form
        for part, other in zip(weight.parts, expected.parts, strict=True):
            assert same_bytes(part, other)
        assert weight.stored_bytes == weight.numel() * num_bytes + 4 * (name == "gate")
    assert str(table).startswith("6 of 7 weights in MXFP8, MXFP4 and NVFP4: ")
    precisions = {f"blocks.1.{name}.weight": precision for name, (precision, *_) in STORED.items()}
    precisions |= {f"blocks.0.{name}.weight": "mxfp8" for name in STORED}
    assert {w.name: w.precision for w in table.weights if w.stored} == precisions
    assert table.num_bytes == sum(w.stored_bytes for w in model.parameters() if isinstance(w, MXTensor))
    _, second_table = quantized(model, policy)
    assert {w.name: w.reason for w in second_table.weights if w.stored} == {
        name: f"stored in {precision} already" for name, precision in precisions.items()
    }


def test_weight_of_odd_length_is_not_stored_with_reason():
    policy = every("mxfp4", preset="inference")
    model = nn.Sequential(nn.Linear(97, 64, dtype=BF16), nn.ReLU(), nn.Linear(64, 64, dtype=BF16))
    table = mxcompile.quantize_weights_(model, policy, args=(torch.randn(2, 97, dtype=BF16),), progress=False)
    assert stored_names(model) == {"2.weight"}
    assert table.weights[0].reason == "2 e2m1 elements share a byte, and k=97 is odd"


def compiled_results(models: list[nn.Module], options: dict, *inputs: Tensor) -> list[Tensor]:
    results = []
    for model in models:
        torch._dynamo.reset()
        with torch.no_grad():
            results.append(torch.compile(model, backend="mxfp8", options=options, fullgraph=True)(*inputs))
    return results


FORMS = {
    "mxfp4": ("e2m1 1x32", 1 / 2 + 1 / 32),
    "nvfp4": ("e2m1 1x16", 1 / 2 + 1 / 16),
    "mxint8": ("int8 1x32", 33 / 32),
}
"""Of stored weights: the words, and the bytes of an element."""
RUNS = [(word, policy, rows) for word in FORMS for policy in ("bf16", word) for rows in (1, 40)]


@pytest.mark.parametrize(
    ("word", "policy", "rows"),
    mostly_slow(
        RUNS,
        ("mxfp4", "mxfp4", 1), ("mxfp4", "mxfp4", 40), ("nvfp4", "bf16", 1), ("mxint8", "bf16", 1),
        rows=True,
    ),
)  # fmt: skip
def test_compiled_with_stored_weights_it_is_the_model_of_dense_weights(
    word: str, policy: str, rows: int, monkeypatch: pytest.MonkeyPatch
):
    """Few rows read the codes; under the policy that stored them, activations are of that precision too.

    The lowering of GPUs takes the place of the CPU's where both are used in a process.
    """
    import_module("mxcompile.lowering.templates.weight_only")
    pretend_cpu(monkeypatch, many_rows="")
    wanted = {"version": 1, "preset": "inference", "rules": [{"match": {"name": "blocks.*"}, "use": word}]}
    model, _ = quantized(policy=wanted)
    dense, tokens = dense_copy(model), TOKENS.repeat(1, rows)
    options = {"policy": "bf16" if policy == "bf16" else wanted}
    output, expected = compiled_results([model, dense], options, tokens)
    report, _ = mxcompile.reports()
    form, bytes_of_element = FORMS[word]
    record = next(gemm for gemm in report.gemms if gemm.name == "blocks.1.down")
    assert [str(form) for form in record.formats if form.operand == "w"] == [f"w:{form} stored"]
    assert record.precision == policy
    assert (record.kernel == "mx_weight_only_mm C++") == (rows == 1)
    global_scales = 6 * 4 if word == "nvfp4" else 0
    assert report.summary.weight_bytes == 6 * 96 * 128 * bytes_of_element + global_scales + 64 * 96 * 2
    assert f"weights stored in {word.upper()}: 6 of 7 layers" in " ".join(str(report).split())
    error = (output - expected).float().norm() / expected.float().norm()
    assert error < (5e-2 if policy == "nvfp4" else 1e-2)


def test_square_tiles_of_nvfp4_are_not_stored():
    squares = every({"precision": "nvfp4", "weight_block": "16x16"}, preset="nvfp4")
    with pytest.raises(PolicyError, match=r"or for 16 \(NVFP4\): this nvfp4 has other scales"):
        quantized(policy=squares)


def test_a_product_takes_the_codes_of_nvfp4_weights_as_they_are():
    """They are no cast of their own values: codes that another tool chose, small ones under large scales."""
    layer = nn.Linear(80, 48)
    x = torch.randn(5, 80)
    options = {"policy": every("nvfp4")}
    codes = torch.randint(4, (48, 40), dtype=torch.uint8) * 0x11 | 0x80
    scale = torch.logspace(-2, 2, 48 * 5).view(48, 5).to(torch.float8_e4m3fn)
    weight = MXTensor(codes.view(FP4), scale, -1, torch.float32, torch.tensor(3.7))
    layer.weight = nn.Parameter(weight, requires_grad=False)
    with torch.no_grad():
        output = torch.compile(layer, backend="mxfp8", options=options, fullgraph=True)(x)
    values = mxcompile.quantize(x, elem_dtype=FP4, rounding="two-level").dequantize(torch.float64)
    exact = values @ weight.dequantize(torch.float64).t() + layer.bias
    recast_weight = mxcompile.quantize(weight.dequantize(torch.float32), elem_dtype=FP4, rounding="two-level")
    recast = values @ recast_weight.dequantize(torch.float64).t() + layer.bias
    assert (output - exact).abs().max() < 1e-5 * exact.abs().max()
    assert (recast - exact).abs().max() > 1e-3 * exact.abs().max()


@pytest.mark.parametrize("policy", ["bf16", "nvfp4"])
def test_nvfp4_experts_are_decoded_or_recast_as_recorded(policy):
    """A stack whose experts have a global scale each, as checkpoints do."""
    weights = [torch.randn(48, 64, dtype=BF16) * 4**i for i in range(3)]
    stored = [mxcompile.quantize(w, elem_dtype=FP4, rounding="two-level") for w in weights]
    model = Written(
        lambda model, x, offsets: F.grouped_mm(x, model.weight.transpose(-2, -1), offs=offsets),
        weight=nn.Parameter(torch.stack(stored), requires_grad=False),
    )
    assert isinstance(model.weight, MXTensor)
    inputs = torch.randn(48, 64, dtype=BF16), torch.tensor([16, 32, 48], dtype=torch.int32)
    report = mxcompile.explain(model, *inputs, policy=every(policy), training=False)
    (record,) = report.gemms
    (weight,) = (form for form in record.formats if form.operand == "w")
    assert str(weight) == f"w:e2m1 1x16 {'stored' if policy == 'bf16' else 'two-level'}"
    dense = copy.deepcopy(model)
    dense.weight = nn.Parameter(model.weight.dequantize(), requires_grad=False)
    options = {"policy": every(policy)}
    output, expected = compiled_results([model, dense], options, *inputs)
    assert (output - expected).float().norm() < 1e-2 * expected.float().norm()
