"""Registers that kernels spill to memory, at the widths that real models have."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from generating import generate
from helpers.paces import mostly_slow
from helpers.written import Written
from torch import nn
from torch.nn import functional as F

from mxcompile.offline import CodegenResult, codegen
from mxcompile.offline.binary import Binary
from mxcompile.offline.launch import Kernel

TOKENS = 512


def generated(model: nn.Module, target: str, use: str = "mxfp8") -> CodegenResult:
    x = torch.empty(1, TOKENS, 640, dtype=torch.bfloat16, device="meta", requires_grad=True)
    return generate(model, x, target=target, use=use, training=True)


CASTS_TO_FP4 = [("sm_100", "mxfp4"), ("sm_120", "nvfp4"), ("gfx950", "mxfp4")]


@pytest.mark.parametrize(("target", "word"), mostly_slow(CASTS_TO_FP4, CASTS_TO_FP4[0], rows=True))
def test_casts_to_fp4_beside_their_producer(target: str, word: str):
    """A copy has half as many bytes as its source has elements; other kernels read that source too."""
    parts = {"gate": (640, 14336), "up": (640, 14336), "down": (14336, 640)}
    with torch.device("meta"):
        layers = {name: nn.Linear(*sizes, bias=False) for name, sizes in parts.items()}
    swiglu = Written(lambda model, x: model.down(F.silu(model.gate(x)) * model.up(x)), **layers)
    result = generated(swiglu, target, word)
    assert [kernel.spill for kernel in result.spilling if kernel.is_template] == []
    assert {gemm.precision for gemm in result.report.gemms} == {word}
    assert sum("mx.matmul.default" in launch.operators for launch in result.launches) == 9


def test_kernels_that_spill_are_named():
    tiles = "from mxcompile.lowering.kernels import tiles"
    kernels = tuple(
        Kernel(phase="backward", name=name, source=source, binary=Binary(spill_bytes=bytes_))
        for name, source, bytes_ in (("cast", tiles, 12), ("loss", "", 8), ("norm", "", 0))
    )
    result = generated(nn.Linear(640, 64), "sm_90")
    spilling = dataclasses.replace(result, launches=(), kernels=kernels, wrappers={})
    assert str(spilling).splitlines()[-3:] == [
        "generated kernels: 3, of them 2 spill registers",
        "  backward cast (mxcompile's) spills 12 bytes a thread",
        "  backward loss (Inductor's own) spills 8 bytes a thread",
    ]


def _real(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """One block of a model that people run, with its embedding and head."""
    import transformers as hf

    decoder = {"num_hidden_layers": 1, "use_cache": False}
    models: dict[str, tuple[Any, Any]] = {
        "Gemma 3 270M": (
            hf.Gemma3ForCausalLM,
            hf.Gemma3TextConfig(
                vocab_size=262144, hidden_size=640, intermediate_size=2048, num_attention_heads=4,
                num_key_value_heads=1, head_dim=256, layer_types=["full_attention"], **decoder,
            ),
        ),
        "Qwen3 0.6B": (
            hf.Qwen3ForCausalLM,
            hf.Qwen3Config(
                vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_attention_heads=16,
                num_key_value_heads=8, head_dim=128, **decoder,
            ),
        ),
        "Llama 3.2 1B": (
            hf.LlamaForCausalLM,
            hf.LlamaConfig(
                vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_attention_heads=32,
                num_key_value_heads=8, **decoder,
            ),
        ),
        "Mistral 7B": (
            hf.MistralForCausalLM,
            hf.MistralConfig(
                vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
                num_key_value_heads=8, **decoder,
            ),
        ),
        "GPT-2": (hf.GPT2LMHeadModel, hf.GPT2Config(n_layer=1, use_cache=False)),
        "ViT-B": (hf.ViTForImageClassification, hf.ViTConfig(num_hidden_layers=1, num_labels=1000)),
    }  # fmt: skip
    build, config = models[name]
    with torch.device("meta"):
        model = build(config).to(torch.bfloat16)
        if name == "ViT-B":
            images = torch.empty(8, 3, 224, 224, dtype=torch.bfloat16)
            return model, {"pixel_values": images, "labels": torch.empty(8, dtype=torch.long)}
        ids = torch.empty(1, TOKENS, dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids}


REAL = ["Gemma 3 270M", "Qwen3 0.6B", "Llama 3.2 1B", "Mistral 7B", "GPT-2", "ViT-B"]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("name", REAL)
def test_no_kernel_of_ours_spills_in_a_real_model(name: str, target: str):
    model, inputs = _real(name)
    result = codegen(model, target=target, kwargs=inputs)
    assert result.problems == ()
    assert any(kernel.is_template for kernel in result.kernels)
    assert [kernel.spill for kernel in result.spilling if kernel.is_template] == []
    named = [line.strip() for line in str(result).splitlines() if " spills " in line]
    assert named == [kernel.spill for kernel in result.spilling]
