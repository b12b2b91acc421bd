"""The demonstration trains in FP32 where the CPU multiplies BF16 slowly, and says so."""

from __future__ import annotations

from dataclasses import replace

import demo
import pytest
import torch
from demo import compare

from mxcompile.lowering.targets import TARGETS


@pytest.mark.parametrize(
    ("target", "dtype", "baseline"),
    [("cpu_fp32", torch.float32, "fp32"), ("cpu_bf16", torch.bfloat16, "bf16")],
)
def test_demo_settings_use_the_fast_dtype_of_the_cpu(
    target: str, dtype: torch.dtype, baseline: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(compare, "of_device", lambda device: TARGETS[target])
    settings = demo.quick_settings()
    assert (settings.dtype, settings.baseline) == (dtype, baseline)
    assert bool(demo.why_fp32(settings)) == (dtype is torch.float32)
    assert demo.ways(settings.dtype)[0].label == baseline
    assert compare.variants([], settings.baseline)[0].label == baseline


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_demo_products_run_in_the_chosen_dtype(dtype: torch.dtype):
    settings = demo.Settings(layers=1, width=32, feed_forward=64, heads=2, length=16, batch=2, steps=1)
    text = demo.Text(train=torch.arange(600) % 251, validation=torch.arange(700) * 7 % 253)
    dtypes = []

    def watched(model: torch.nn.Module) -> torch.nn.Module:
        layer = model.model.layers[0].mlp.up_proj
        layer.register_forward_hook(lambda module, args, result: dtypes.append(result.dtype))
        return model

    demo.Trainee("", replace(settings, dtype=dtype), text, watched).run(0, lambda run, step: None)
    assert set(dtypes) == {dtype}
