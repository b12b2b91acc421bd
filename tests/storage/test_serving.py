"""Served models: `generate` on stored weights, artefacts of AOTInductor, and the memory that takes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from test_checkpoints import BF16, llama, spread, store_blocks
from torch import nn

import mxcompile

PROMPT = torch.arange(2, 10)[None]
GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def pair():
    """A model with stored weights, and the dense model of their values."""
    stored, dense = store_blocks(llama()), llama()
    dense.load_state_dict(stored.state_dict())
    return stored, dense


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generates_what_the_dense_model_of_its_values_generates(cache):
    stored, dense = pair()
    options = {**GREEDY, "cache_implementation": cache}
    assert torch.equal(stored.generate(PROMPT, **options), dense.generate(PROMPT, **options))


@pytest.mark.slow
def test_generates_compiled_with_a_static_cache():
    """Prefill and decode are a graph each; every record says that the weights are stored."""
    stored, dense = pair()
    options = {**GREEDY, "cache_implementation": "static", "disable_compile": True}
    expected = dense.generate(PROMPT, **options)
    stored.forward = torch.compile(stored.forward, backend="mxfp8", options={"policy": "bf16"})
    assert torch.equal(stored.generate(PROMPT, **options), expected)
    reports = mxcompile.reports()
    rows = {gemm.m for report in reports for gemm in report.gemms if gemm.role == "ffn_in"}
    assert rows >= {1, 8}
    for report in reports:
        weights = [form for gemm in report.gemms for form in gemm.formats]
        assert len(weights) == 14 * report.summary.graphs
        assert {str(form) for form in weights} == {"w:e4m3 1x32 stored"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch.export copies its own
def test_an_artefact_of_aotinductor_runs_without_mxcompile(tmp_path):
    model = nn.Sequential(nn.Linear(64, 96, dtype=BF16))
    model[0].weight = nn.Parameter(mxcompile.quantize(spread(96, 64)), requires_grad=False)
    mxcompile.save_quantized(model, tmp_path / "checkpoint")
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(64, 96, dtype=BF16))
    loaded = mxcompile.load_quantized(tmp_path / "checkpoint", empty)
    x = torch.randn(2, 64, dtype=BF16)
    program = torch.export.export(loaded, (x,))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    torch.save({"x": x, "y": model(x)}, tmp_path / "values.pt")
    code = (
        "import sys, torch\n"
        f"values = torch.load({str(tmp_path / 'values.pt')!r})\n"
        f"model = torch._inductor.aoti_load_package({package!r})\n"
        "assert torch.equal(model(values['x']), values['y'])\n"
        "assert not any(name.startswith('mxcompile') for name in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


_PEAK = """
import resource, sys, torch
from torch import nn
import mxcompile
from mxcompile.serving.weights import cast
from mxcompile.checkpoint.files import Checkpoint
torch.set_num_threads(1)
width, layers = 2048, 12

def make(device):
    with torch.device(device):
        made = [nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(layers)]
        return nn.Sequential(*made)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
"""


def measured(*lines: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", _PEAK + "\n".join(lines)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


LAYER = 2 * 2048 * 2048
QUANTIZED = 12 * 2048 * 2048 * 33 // 32


@pytest.mark.slow
def test_loading_takes_the_quantized_model_and_one_layer(tmp_path):
    """No BF16 weights in between: they would be another 100 MB."""
    path = str(tmp_path / "out")
    measured(
        "model = make('cpu')",
        "for layer in model:",
        "    made = cast(layer.weight.detach(), -1, torch.float8_e4m3fn, 'rceil')",
        "    layer.weight = nn.Parameter(made, requires_grad=False)",
        f"mxcompile.save_quantized(model, {path!r}, max_shard_bytes=20_000_000)",
        "print(0)",
    )
    grown = measured(
        "import safetensors, mxcompile.checkpoint.load",
        "model = make('meta')",
        "before = peak()",
        f"mxcompile.load_quantized({path!r}, model)",
        "print(peak() - before)",
    )
    assert grown <= 1.1 * QUANTIZED + LAYER


@pytest.mark.slow
def test_storing_weights_takes_no_second_copy():
    """What it adds to the model, at its highest: the cast of a layer, and temporaries of a few rows."""
    grown = measured(
        "model = make('cpu')",
        "x = cast(torch.randn(64, 64), -1, torch.float8_e4m3fn, 'rceil')",
        "before = peak()",
        "for layer in model:",
        "    made = cast(layer.weight.detach(), -1, torch.float8_e4m3fn, 'rceil')",
        "    layer.weight = nn.Parameter(made, requires_grad=False)",
        "print(peak() - before)",
    )
    assert grown <= 0.1 * QUANTIZED + LAYER + 6 * 4 * (1 << 22)
