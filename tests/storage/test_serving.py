"""Served models: `generate` on stored weights, artefacts of AOTInductor."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections import Counter
from typing import Any

import pytest
import torch
from helpers.policies import every
from helpers.written import Written
from small_models import llama, store_blocks
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config
from transformers import StaticCache

import mxcompile

PROMPT = torch.arange(2, 10)[None]
GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def pair():
    """A model with stored weights, and the dense model of their values."""
    stored, dense = store_blocks(llama()), llama()
    dense.load_state_dict(stored.state_dict())
    return stored, dense


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_stored_model_generates_the_tokens_of_its_dense_values(cache):
    stored, dense = pair()
    options = {**GREEDY, "cache_implementation": cache}
    assert torch.equal(stored.generate(PROMPT, **options), dense.generate(PROMPT, **options))


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_with_stored_weights_equals_dense_compiled(cache):
    """Prefill and decode are graphs of their own; every record says that the weights are stored."""
    stored, dense = pair()
    options = {**GREEDY, "cache_implementation": cache, "disable_compile": True}
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


def start(checkpoint) -> tuple[torch.Tensor, mxcompile.Report, Counter[str]]:
    """Tokens and report of a served checkpoint, and what AOTAutograd's cache answered."""
    torch._dynamo.reset()
    counters.clear()
    mxcompile.clear_reports()
    model = mxcompile.load_quantized(checkpoint).eval()
    config, cache = model.config, StaticCache(model.config, 32)
    heads = config.num_key_value_heads
    cache.early_initialization(1, heads, config.head_dim, model.dtype, model.device)
    model.forward = torch.compile(model.forward, backend="mxfp8", options={"policy": "bf16"})
    tokens = model.generate(PROMPT, cache=cache, disable_compile=True, **GREEDY)
    (report,) = mxcompile.reports()
    return tokens, report, Counter(counters["aot_autograd"])


@pytest.mark.slow
def test_second_start_of_a_checkpoint_compiles_nothing(tmp_path):
    """Caches answer for prefill and decode, and the report is that of the first start."""
    mxcompile.save_quantized(store_blocks(llama()), tmp_path / "checkpoint")
    tokens, report, cold = start(tmp_path / "checkpoint")
    second_tokens, stored, warm = start(tmp_path / "checkpoint")
    assert (cold["autograd_cache_miss"], cold["autograd_cache_hit"]) == (2, 0)
    assert (warm["autograd_cache_miss"], warm["autograd_cache_hit"]) == (0, 2)
    assert torch.equal(tokens, second_tokens)
    assert stored.gemms == report.gemms
    assert (report.summary.cache, stored.summary.cache) == ("miss", "hit")


def logits_of(model: nn.Module) -> nn.Module:
    """A causal language model without a cache, as a function of tokens alone."""
    return Written(lambda self, tokens: self.model(input_ids=tokens, use_cache=False).logits, model=model)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch.export copies its own
def test_an_artefact_of_aotinductor_runs_without_mxcompile(tmp_path):
    """It holds codes and scales, not values, and gives what that of the dense model gives."""
    stored, dense = pair()
    mxcompile.save_quantized(stored, tmp_path / "checkpoint")
    loaded = logits_of(mxcompile.load_quantized(tmp_path / "checkpoint"))
    package = packaged(loaded, tmp_path / "stored.pt2")
    decoding = packaged(loaded, tmp_path / "decoding.pt2", mxcompile.aoti_configs())
    expected = torch._inductor.aoti_load_package(packaged(logits_of(dense), tmp_path / "dense.pt2"))(PROMPT)
    torch.save({"tokens": PROMPT, "logits": expected}, tmp_path / "values.pt")
    script = (
        "import sys, torch\n"
        f"values = torch.load({str(tmp_path / 'values.pt')!r})\n"
        f"model = torch._inductor.aoti_load_package({package!r})\n"
        "assert torch.equal(model(values['tokens']), values['logits'])\n"
        f"model = torch._inductor.aoti_load_package({decoding!r})\n"
        "torch.testing.assert_close(model(values['tokens']), values['logits'], rtol=0.02, atol=0.02)\n"
        "assert not any(name.startswith('mxcompile') for name in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    calls = {name: products(tmp_path / f"{name}.pt2") for name in ("stored", "decoding")}
    assert calls == {"stored": 0, "decoding": 14}
    sizes = {name: constants(tmp_path / f"{name}.pt2") for name in ("stored", "dense")}
    values = sum(p.numel() for p in stored.parameters() if isinstance(p, mxcompile.MXTensor))
    assert sizes["dense"] - sizes["stored"] == values * 2 - values * 33 // 32


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch.export copies its own
def test_artefact_keeps_all_elements_of_two_transposed_tensors(tmp_path):
    """A kernel with two transposes of 16 bits, most of which GCC 12 for AVX-512 drops without a flag."""
    model = Written(lambda _, x: (x.t().contiguous(), (-x.t()).contiguous()))
    x = torch.randn(64, 96, dtype=torch.bfloat16)
    with config.patch("cpp.enable_floating_point_contract_flag", "off"):
        package = packaged(model, tmp_path / "transposed.pt2", mxcompile.aoti_configs(), x)
    results = torch._inductor.aoti_load_package(package)(x)
    assert all(map(torch.equal, results, model(x)))


def packaged(model: nn.Module, path, configs: dict[str, Any] | None = None, x: torch.Tensor = PROMPT) -> str:
    program = torch.export.export(model, (x,))
    return torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=configs)


def code(package, end: str) -> str:
    """The C++ code in a package: of its kernels, or of the wrapper that calls them."""
    with zipfile.ZipFile(package) as archive:
        return next(archive.read(name).decode() for name in archive.namelist() if name.endswith(end))


def constants(package) -> int:
    """The bytes of all constants."""
    sizes = re.findall(r"constants_info_\[\d+\]\.data_size = (\d+);", code(package, "wrapper.cpp"))
    return sum(map(int, sizes))


def products(package) -> int:
    """How often a kernel is called that multiplies codes."""
    kernels = re.findall(
        r"void (\w+)\([^\n]*\)\n\{\s*mxcompile::(?:weight_only|tile_weight)_mm\(", code(package, "kernel.cpp")
    )
    calls = re.findall(r"^ *(\w+)\(", code(package, "wrapper.cpp"), re.MULTILINE)
    return sum(call in kernels for call in calls)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch.export copies its own
@pytest.mark.parametrize("precision", ["mxfp4", "nvfp4"])
def test_package_casts_activations_to_four_bits_as_the_compiled_model_does(precision: str, tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(96, 64, bias=False), nn.ReLU(), nn.Linear(64, 96)), torch.randn(40, 96)
    policy = every(precision, preset="bf16")
    mxcompile.quantize_weights_(model, policy, args=(x,), progress=False)
    configs = mxcompile.aoti_configs(quantize_activations=True)
    with torch.no_grad():
        outputs = torch._inductor.aoti_load_package(packaged(model, tmp_path / "m.pt2", configs, x))(x)
        expected = torch.compile(model, backend="mxfp8", options={"policy": policy})(x)
        error = (expected - model(x)).abs().max().item()
    torch.testing.assert_close(outputs, expected, rtol=0, atol=0.05 * error)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch.export copies its own
def test_activations_without_a_stored_weight_stay_with_a_warning(tmp_path, caplog):
    model, x = nn.Linear(96, 64), torch.randn(40, 96)
    with torch.no_grad():
        configs = mxcompile.aoti_configs(quantize_activations=True)
        outputs = torch._inductor.aoti_load_package(packaged(model, tmp_path / "m.pt2", configs, x))(x)
    assert "quantize_activations changes nothing" in caplog.text
    torch.testing.assert_close(outputs, model(x))
