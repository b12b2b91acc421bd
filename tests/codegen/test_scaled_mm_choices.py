"""The kernels Inductor chooses among for a product: which are offered, that each compiles, what they mean."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from generating import generate
from helpers.casts import quantize, scaled_mm
from helpers.eager import NVIDIA, product
from helpers.paces import mostly_slow
from helpers.policies import every
from helpers.reference import sqnr_db
from helpers.written import Written
from interpreted import interpret
from torch._inductor.select_algorithm import ExternKernelCaller
from torch._subclasses.fake_tensor import FakeTensorMode

import mxcompile
from mxcompile.formats.scale_tiles import untile_scale
from mxcompile.lowering.choices.configs import tiled_configs
from mxcompile.lowering.graph.fuse import Fuse
from mxcompile.lowering.targets import TARGETS
from mxcompile.lowering.templates import vendor
from mxcompile.offline.standin import DEVICE, stand_in

pytestmark = pytest.mark.usefixtures("in_this_process")

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16


@pytest.fixture
def choose(choose, monkeypatch):
    """Function that makes Inductor take the choice of that number; it returns the lists it chose from."""
    monkeypatch.setattr(Fuse, "apply", lambda *_: {})  # casts stay apart
    return functools.partial(choose, "mx_scaled_mm")


def _linear(k: int, n: int, **options) -> torch.nn.Module:
    return torch.nn.Linear(k, n, device="meta", dtype=BF16, **options)


def _forms(choices) -> list[str]:
    """What each choice is: the vendor's, or the template with its tile."""
    return [
        "vendor"
        if isinstance(choice, ExternKernelCaller)
        else re.sub(r"triton_(mx_scaled_mm\w*?)_\d+", r"\1", choice.name)
        for choice in choices
    ]


@pytest.mark.parametrize(
    ("tokens", "k", "n", "target", "expected"),
    [
        (4096, 512, 1024, "sm_100", {"mx_scaled_mm_tiled", "mx_scaled_mm", "vendor"}),
        (4096, 512, 1000, "sm_100", {"mx_scaled_mm_tiled", "mx_scaled_mm"}),  # N is no multiple of 16
        (4096, 528, 1024, "sm_100", {"mx_scaled_mm_tiled", "mx_scaled_mm"}),  # K is no multiple of 32
        (4096, 520, 1024, "sm_100", {"mx_scaled_mm"}),  # nor of 16
        (32, 512, 1024, "sm_100", {"mx_scaled_mm", "vendor"}),  # few rows are swapped
        (4096, 512, 1024, "sm_120", {"mx_scaled_mm"}),
    ],
)
def test_choices_of_a_linear_layer_by_target_and_shape(choose, tokens, k, n, target, expected):
    offered = choose(0)
    generate(_linear(k, n), (tokens, k), target=target)
    (choices,) = offered
    assert set(_forms(choices)) == expected
    assert ("vendor" in expected) == (_forms(choices)[-1] == "vendor")  # never the default


@pytest.mark.slow
def test_the_vendors_is_for_bf16_in_every_layout(choose):
    """Backward reads operands along their other dimension; FP32 results are not the vendor's."""
    offered = choose(0)
    two = torch.nn.Sequential(_linear(512, 512), _linear(512, 512))
    generate(two, (256, 512), training=True)
    assert ["vendor" in _forms(choices) for choices in offered] == [True] * 5
    offered.clear()
    generate(two, (250, 512), training=True)
    aligned = ["vendor" in _forms(choices) for choices in offered]
    assert aligned == [True] * 3 + [False] * 2, "of wgrad the rows are K, no multiple of 16"
    offered.clear()
    generate(_linear(512, 512), (256, 512), dtype=torch.float32)
    assert ["vendor" in _forms(choices) for choices in offered] == [False]


NUM_TILED = len(tiled_configs(TARGETS["sm_100"]))  # they come first
NUM_POINTERS = 3


@pytest.mark.parametrize("number", mostly_slow(range(NUM_TILED + NUM_POINTERS), 0, NUM_TILED))
def test_every_choice_compiles_clean(choose, number):
    """With an epilogue that adds a bias, goes through an activation, gates and adds."""
    gated = Written(
        lambda model, x: x.repeat(1, 2) + torch.nn.functional.gelu(model.up(x)) * model.gate(x),
        up=_linear(512, 1024),
        gate=_linear(512, 1024),
    )
    offered = choose(number)
    result = generate(gated, (1024, 512))
    assert {len(choices) for choices in offered} == {NUM_TILED + NUM_POINTERS + 1}, "and the vendor's"
    assert result.problems == ()
    products = [result.kernel(launch).binary for launch in result.launches if launch.gemms]
    assert len(products) == 2
    for binary in products:
        assert all("block_scale" in name for name in binary.mma)
        assert binary.spill_bytes == 0
        assert binary.tmem_columns <= 512
        narrow = "BLOCK_N=64" in binary.config
        assert ("tcgen05.cp.cta_group::1.warpx4" in binary.text["ptx"]) or narrow
        assert ("cp.async.bulk.tensor" in binary.text["ptx"]) == (number < NUM_TILED)


@pytest.mark.parametrize("bias", [False, True])
def test_vendor_call_takes_tiled_scales_without_copies(choose, bias):
    """Elements and tiled scale bytes as the casts wrote them, the weight transposed by its strides."""
    choose(100)
    result = generate(_linear(512, 1024, bias=bias), (300, 512))
    (call,) = re.findall(r"extern_kernels\.mx_vendor_scaled_mm\((.*)\)", result.wrappers["inference"])
    a, scale_a, b, scale_b, *others = re.findall(r"(?:reinterpret_tensor\(.*?\), \d+\)|[^,]+)(?:, |$)", call)
    assert len(others) == 1 + bias
    assert "reinterpret_tensor" in b
    assert "(512, 1024), (1, 512)" in b
    assert not any("reinterpret" in side for side in (a, scale_a, scale_b))


@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3)])
@pytest.mark.parametrize("shape", [(300, 272, 96), (2, 16, 32), (128, 128, 512)])
@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
def test_vendor_arguments_read_as_documented_equal_scaled_mm(monkeypatch, shape, dtypes, gemm):
    """A stand-in that reads them as documented gives what the operator means."""
    m, n, k = shape
    bias = torch.randn(n).to(BF16)

    def documented(a, b, scale_a, scale_b, bias, *, out_dtype, out):
        assert scale_a.dtype is scale_b.dtype is torch.float8_e8m0fnu
        assert (a.stride(1) == 1, b.stride(0) == 1) == (gemm != "wgrad", gemm == "fprop")
        sides = []
        for codes, scale in ((a, scale_a), (b.t(), scale_b)):
            blocks = untile_scale(scale.view(torch.uint8), codes.shape[0], -(-k // 32))
            values = torch.exp2(blocks.double() - 127).repeat_interleave(32, 1)[:, :k]
            sides.append(codes.double() * values)
        out.copy_((sides[0] @ sides[1].t() + bias.double()).to(out_dtype))

    a = quantize(torch.randn(m, k), -1, dtypes[0], "rceil", False, "128x4")
    weight = torch.randn(n, k).mul_(torch.exp2(torch.randint(-9, 9, (n, k))))
    b = quantize(weight, -1, dtypes[1], "rceil", False, "128x4")
    if gemm == "wgrad":
        a = a[0].t().contiguous().t(), a[1]
    right = b[0].t() if gemm == "fprop" else b[0].t().contiguous()
    operands = (*a, right, b[1], bias)
    monkeypatch.setattr(torch, "_scaled_mm", documented)
    out = vendor.mx_vendor_scaled_mm(*operands, out=torch.empty(m, n, dtype=BF16))
    torch.testing.assert_close(out, scaled_mm(*operands, BF16), rtol=2**-7, atol=1e-3)


def test_torch_accepts_the_vendors_arguments(monkeypatch):
    """By its own checks of layouts, sizes and scales, which only its form without `out` has here."""
    checked = torch._scaled_mm
    monkeypatch.setattr(
        torch, "_scaled_mm", lambda *args, out, **options: out.copy_(checked(*args, **options))
    )
    with stand_in(TARGETS["sm_100"]), FakeTensorMode():
        x, w = (torch.empty(shape, dtype=BF16, device=DEVICE) for shape in ((300, 96), (272, 96)))
        a, b = (quantize(side, -1, E4M3, "rceil", False, "128x4") for side in (x, w))
        out = torch.empty(300, 272, dtype=BF16, device=DEVICE)
        assert vendor.mx_vendor_scaled_mm(*a, b[0].t(), b[1], out=out).shape == (300, 272)


@pytest.mark.parametrize("number", mostly_slow([0, 1, NUM_TILED, NUM_TILED + 1], 0))
def test_scaled_mm_of_other_configs_has_the_reference_values(choose, number, tmp_path):
    model = torch.nn.Linear(288, 272).to(BF16)
    x = torch.randn(300, 288).mul_(torch.exp2(torch.randint(-8, 8, (300, 1)))).to(BF16)
    choose(number)
    mxcompile.codegen(model, x, target="sm_100", training=False, policy=every("mxfp8"), out_dir=tmp_path)
    (out,) = interpret(tmp_path, [model.weight.detach(), model.bias.detach(), x])
    exact = product(x, model.weight.detach().t(), NVIDIA, torch.float32) + model.bias.detach().float()
    assert sqnr_db(exact.to(BF16), out) > 50
