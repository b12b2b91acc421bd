"""After autotuning the record names the kernel that is launched, and its tile."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from fake_timing import fastest
from generating import generate
from helpers.policies import every
from helpers.written import Written
from torch import nn
from torch._inductor import config

import mxcompile
from mxcompile.compiler import backend
from mxcompile.compiler.hooks.compilation import Compilation
from mxcompile.lowering.inductor import winners

MMA = "(tcgen05.mma block_scale)"
Choice = Callable[[str, dict[str, str]], bool]


def _generate(
    rows: int, choice: Choice, target: str = "sm_100", behind: Choice | None = None
) -> mxcompile.offline.CodegenResult:
    """A product with something behind it to be fused, and one without; their casts are shared with none."""
    layers = {"up": nn.Linear(128, 2048), "down": nn.Linear(2048, 2048, bias=False)}
    wide = Written(lambda model, x, y: y * model.down(nn.functional.gelu(model.up(x))), **layers)
    before = config.get_config_copy()
    with fastest(choice, behind):
        result = generate(wide, (rows, 128), (rows, 2048), target=target)
    assert config.get_config_copy() == before
    return result


def _launched(result: mxcompile.offline.CodegenResult) -> dict[str, str]:
    """What the generated code launches for each product, by the constants in its kernels."""
    kernels = {}
    for launch in result.launches:
        for gemm in launch.gemms:
            source = result.kernel(launch).source if launch.generated else ""
            constants = dict(re.findall(r"(\w+) : tl\.constexpr = (\w+)", source))
            name = "mx_scaled_mm_tiled" if "WARP_SPECIALIZE" in constants else "mx_scaled_mm"
            name = "mx_quantize_mm" if "quantize_rowwise" in source else name
            name = name if "dot_scaled" in source or "tile_product" in source else "triton_mm"
            m, n, k = (constants.get(f"BLOCK_{side}") for side in "MNK")
            tile = f"{n}x{m}x{k} swapped" if constants.get("SWAP") == "True" else f"{m}x{n}x{k}"
            kernels[gemm] = f"{name} {tile}" if launch.generated else launch.kernel
    return kernels


def _recorded(result: mxcompile.offline.CodegenResult) -> dict[str, str]:
    return {f"{gemm.name} {gemm.gemm}": gemm.kernel for gemm in result.report.gemms}


def _quantizes(tile: str) -> Choice:
    return lambda name, constants: "quantize_mm" in name and constants["BLOCK_M"] == tile


def _separate(name: str, constants: dict[str, str]) -> bool:
    return "then_scaled_mm" in name


@pytest.mark.parametrize(
    ("choice", "kernel"),
    [
        (_quantizes("32"), "mx_quantize_mm 128x32x128 swapped"),
        (_quantizes("64"), "mx_quantize_mm 128x64x128 swapped"),
        (_separate, "mx_scaled_mm 128x32x256 swapped"),
    ],
)
def test_few_row_product_records_the_winning_fused_or_separate_kernel(choice, kernel):
    """Few rows: the cast and the product that would run without the fused form compete with its tiles."""
    result = _generate(16, choice)
    assert _recorded(result) == dict.fromkeys(("up fprop", "down fprop"), f"{kernel} {MMA}")
    assert _launched(result) == dict.fromkeys(_recorded(result), kernel)
    casts = [launch for launch in result.launches if launch.cast in ("generated", "library")]
    assert casts == []
    assert len(result.launches) == (6 if choice is _separate else 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tiled", "n", "k"),
    [(False, "128", "128"), (False, "64", "128"), (True, "128", "128"), (True, "256", "128")],
)
def test_a_tile_of_the_product(tiled, n, k):
    """Many rows: timed alone, and for one of them with what is fused behind."""

    def choice(_: str, constants: dict[str, str]) -> bool:
        seen = "WARP_SPECIALIZE" in constants, constants.get("BLOCK_N"), constants.get("BLOCK_K")
        return seen == (tiled, n, k)

    result = _generate(300, choice)
    kernel = f"mx_scaled_mm{'_tiled' if tiled else ''} 128x{n}x{k}"
    assert set(_recorded(result).values()) == {f"{kernel} {MMA}"}
    assert set(_launched(result).values()) == {kernel}


def test_fused_epilogue_may_change_the_autotuned_kernel():
    def columns(n: str) -> Choice:
        return lambda _, constants: (constants.get("WARP_SPECIALIZE"), constants.get("BLOCK_N")) == (None, n)

    result = _generate(300, columns("64"), behind=columns("128"))
    launched = _launched(result)
    assert launched["up fprop"] == "mx_scaled_mm 128x64x128"
    assert launched["down fprop"].startswith("mx_scaled_mm 128x128x")
    assert _recorded(result) == {name: f"{kernel} {MMA}" for name, kernel in launched.items()}


def test_record_names_the_vendor_kernel_that_won():
    result = _generate(304, lambda name, _: "vendor" in name)
    assert _launched(result)["up fprop"] == "extern_kernels.mx_vendor_scaled_mm"
    assert _recorded(result)["up fprop"] == "torch._scaled_mm"


def test_record_names_the_inductor_template_that_won():
    result = _generate(300, lambda name, constants: "triton_mm" in name, "sm_90")
    launched = _launched(result)
    assert all(kernel.startswith("triton_mm ") for kernel in launched.values())
    assert _recorded(result) == {name: f"{k} (bfloat16, dequantized)" for name, k in launched.items()}


def test_winning_library_product_is_recorded():
    result = _generate(300, lambda name, _: "triton" not in name, "sm_90", behind=lambda *_: False)
    assert _launched(result)["down fprop"] == "extern_kernels.mm"
    assert _recorded(result)["down fprop"] == "aten.mm (bfloat16, dequantized)"


def _train(kernel: str, monkeypatch: pytest.MonkeyPatch) -> tuple[mxcompile.Report, list[Compilation]]:
    """A compile in which Inductor chooses `kernel` for the first product; its report."""
    compilations: list[Compilation] = []

    class Chosen(Compilation):
        def lower(self, graph: torch.fx.Graph) -> None:
            super().lower(graph)
            self.name_kernels({0: kernel})
            compilations.append(self)

    monkeypatch.setattr(backend, "Compilation", Chosen)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 80), nn.GELU(), nn.Linear(80, 48))
    torch.compile(model, backend="mxfp8", options={"policy": every("mxfp8")})(
        torch.randn(21, 48)
    ).sum().backward()
    return mxcompile.reports()[-1], compilations


@pytest.mark.slow
def test_the_report_and_the_one_kept_for_warm_caches(monkeypatch):
    first, compilations = _train("chosen 1x2x3", monkeypatch)
    assert first.gemms[0].kernel == "chosen 1x2x3"
    compilations[0].name_kernels({1: "chosen later"})  # as for a backward, lowered when the report is out
    assert [gemm.kernel for gemm in mxcompile.reports()[-1].gemms[:2]] == ["chosen 1x2x3", "chosen later"]
    torch._dynamo.reset()
    cached, compilations = _train("not asked", monkeypatch)
    assert (cached.summary.cache, compilations) == ("hit", [])
    assert [gemm.kernel for gemm in cached.gemms[:2]] == ["chosen 1x2x3", "chosen later"]


def test_setting_of_fused_timing_has_the_name_of_this_torch():
    """Torch 2.15 renamed it; a use of the old name is a warning there, once in a process."""
    renamed = torch.torch_version.TorchVersion(torch.__version__) >= (2, 15)
    name = "benchmark_template_fusion" if renamed else "benchmark_epilogue_fusion"
    assert name == winners.BENCHMARKED
    assert not getattr(config._config[winners.BENCHMARKED], "deprecated", False)  # 2.11 deprecates none
