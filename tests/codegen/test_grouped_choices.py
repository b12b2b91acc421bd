"""The vendor's product of experts: where it is offered, that torch takes its arguments, what they mean."""

from __future__ import annotations

import pytest
import torch
from helpers.casts import quantize
from helpers.eager import NVIDIA, grouped_product
from helpers.paces import mostly_slow
from helpers.policies import every
from helpers.reference import sqnr_db
from interpreted import interpret
from torch import Tensor, nn
from torch._inductor.select_algorithm import ExternKernelCaller
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import mxcompile
from mxcompile.lowering.targets import TARGETS
from mxcompile.lowering.templates import vendor
from mxcompile.offline.standin import DEVICE, stand_in

PREPARED = """
from helpers import documented_grouped_mm
import mxcompile.lowering.templates.vendor
documented_grouped_mm.install()
"""

pytestmark = pytest.mark.usefixtures("in_this_process")

E4M3, BF16, ALL = torch.float8_e4m3fn, torch.bfloat16, every("mxfp8")


@pytest.fixture
def offered(choose) -> list[list]:
    """Where Inductor autotunes, of groups on tiled scales, it takes the last choice; the lists it had."""
    return choose("mx_scaled_grouped_mm_tiled", -1)


class Experts(nn.Module):
    """One product of groups of rows; the weight is stored [G, N, K], K-major, or transposed."""

    def __init__(self, k: int, n: int, *, k_major: bool = True, dtype: torch.dtype = BF16) -> None:
        super().__init__()
        self.k_major = k_major
        self.weight = nn.Parameter(torch.randn((4, n, k) if k_major else (4, k, n)).to(dtype))

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        return F.grouped_mm(x, self.weight.mT if self.k_major else self.weight, offs=offs)


def _generate(model: Experts, rows: int, **options) -> mxcompile.offline.CodegenResult:
    k = model.weight.shape[2 if model.k_major else 1]
    x = torch.empty(rows, k, dtype=model.weight.dtype, requires_grad=options.get("training", False))
    offs = torch.empty(4, dtype=torch.int32)
    options = {"training": False, "policy": ALL, "target": "sm_100", **options}
    return mxcompile.codegen(model, x, offs, **options)


def _has_vendor(choices: list) -> bool:
    return isinstance(choices[-1], ExternKernelCaller)


@pytest.mark.parametrize(
    ("k", "n", "rows", "k_major", "expected"),
    mostly_slow(
        [
            (96, 272, 300, True, (True,)),
            (128, 272, 300, False, (False,)),  # the vendor's takes K-major operands alone
            (112, 272, 300, True, (False,)),  # a short block
            (96, 272, 200, True, ()),  # few rows a group, as many as the pointer form swaps
            (96, 264, 300, False, ()),  # rows that the accelerator cannot read
            (96, 272, 300, False, ()),  # its last step would read the next matrix
        ],
        (96, 272, 300, True, (True,)),
        rows=True,
    ),
)
def test_vendor_grouped_product_is_offered_for_supported_sizes(offered, k, n, rows, k_major, expected):
    result = _generate(Experts(k, n, k_major=k_major), rows)
    assert [_has_vendor(choices) for choices in offered] == [*expected]
    kernel = result.report.gemms[0].kernel
    assert kernel.startswith("mx_scaled_grouped_mm") or expected == (True,)
    if expected == (True,):
        (launch,) = (launch for launch in result.launches if launch.gemms)
        assert launch.kernel == "extern_kernels.mx_vendor_scaled_grouped_mm"


@pytest.mark.slow
def test_large_ones_run_on_it_unmeasured():
    with torch.device("meta"):
        model = Experts(512, 2048)
    result = _generate(model, 4096)
    (launch,) = (launch for launch in result.launches if launch.gemms)
    assert launch.kernel == "extern_kernels.mx_vendor_scaled_grouped_mm"
    assert [gemm.kernel for gemm in result.report.gemms] == ["torch._scaled_grouped_mm"]


@pytest.mark.slow
def test_vendor_grouped_product_is_offered_in_backward(offered):
    """Gradients of tokens contract N, along which weights that are stored N-major are K-major."""
    _generate(Experts(128, 256, k_major=False), 300, training=True)
    assert [_has_vendor(choices) for choices in offered] == [False, True]


@pytest.mark.slow
def test_e5m2_experts_have_no_vendor_choice(offered):
    _generate(Experts(96, 272), 300, policy=every({"precision": "mxfp8", "elem_dtype": "e5m2"}))
    assert [_has_vendor(choices) for choices in offered] == [False]


def test_torch_accepts_arguments_of_the_vendor_grouped_product(monkeypatch):
    monkeypatch.setattr(vendor, "zero_rows", lambda *_: None)
    with stand_in(TARGETS["sm_100"]), FakeTensorMode():
        x, w = (torch.empty(shape, dtype=BF16, device=DEVICE) for shape in ((300, 96), (4, 272, 96)))
        a, b = (quantize(side, -1, E4M3, "rceil")[0] for side in (x, w))
        tiles = [torch.empty(count, 512, dtype=torch.uint8, device=DEVICE) for count in (3 + 4, 4 * 3)]
        offs = torch.empty(4, dtype=torch.int32, device=DEVICE)
        out = vendor.mx_vendor_scaled_grouped_mm(a, tiles[0], b.mT, tiles[1], offs)
        assert out.shape == (300, 272)
        assert out.dtype is BF16
        n_major = torch.empty(4, 96, 272, dtype=E4M3, device=DEVICE)
        with pytest.raises(RuntimeError, match="column major"):
            vendor.mx_vendor_scaled_grouped_mm(a, tiles[0], n_major, tiles[1], offs)


@pytest.mark.parametrize("ends", [(70, 70, 271, 300)], ids=str)
def test_vendor_grouped_product_has_the_reference_values(offered, tmp_path, ends):
    """The generated code with a stand-in that reads them as documented; rows past the last group are 0."""
    model = Experts(160, 144)
    x = torch.randn(307, 160).mul_(torch.exp2(torch.randint(-8, 8, (307, 1)))).to(BF16)
    offs = torch.tensor(ends, dtype=torch.int32)
    mxcompile.codegen(model, x, offs, target="sm_100", training=False, policy=ALL, out_dir=tmp_path)
    assert [_has_vendor(choices) for choices in offered] == [True]
    text = (tmp_path / "inference.py").read_text()
    (tmp_path / "forward.py").write_text(f"{PREPARED}\n{text}")
    (out,) = interpret(tmp_path, [model.weight.detach(), x, offs])
    with torch.no_grad():
        expected = grouped_product(x[: ends[-1]], model.weight.mT, offs, NVIDIA)
    assert sqnr_db(expected, out[: ends[-1]]) > 50
    assert (out[ends[-1] :] == 0).all()
