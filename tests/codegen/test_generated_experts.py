"""Experts as batched and as grouped products: native instructions, no spills, and what they compute.

Values are those of the generated kernels in Triton's interpreter, held to the reference casts. Sizes are no
multiples of 32, of a tile, or of each other's blocks; groups end inside blocks, one is empty, and rows are
left over past the last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.casts import casts_both
from helpers.eager import FP4, NVIDIA, Recipe, grouped_product, product
from helpers.models import mixtral
from helpers.policies import every
from helpers.reference import sqnr_db
from helpers.written import Written
from interpreted import interpret
from torch import Tensor, nn
from torch.nn import functional as F

from mxcompile.offline import codegen
from mxcompile.versions import newer

RECIPES = {"mxfp8": NVIDIA, **FP4}


ALL = every("mxfp8")
BLOCK_SCALED = {"sm_100": "block_scale", "sm_120": "block_scale", "gfx950": "v_mfma_scale"}


def _spread(*shape: int) -> Tensor:
    """BF16 of many binades: equal scales would hide wrong ones."""
    binades = torch.randint(-6, 4, (*shape[:-1], -(-shape[-1] // 8))).repeat_interleave(8, -1)
    return torch.randn(shape).mul_(torch.exp2(binades[..., : shape[-1]])).to(torch.bfloat16)


class Batched(nn.Module):
    """x + down(gelu(up x)) for each expert; one weight is stored transposed, one product has a bias."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(_spread(experts, 1, hidden))
        self.up = nn.Parameter(_spread(experts, width, hidden))
        self.down = nn.Parameter(_spread(experts, width, hidden))

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(torch.baddbmm(self.bias, x, self.up))
        return x + torch.bmm(y, self.down.mT)

    def expected(self, x: Tensor, recipe: Recipe = NVIDIA) -> Tensor:
        """With the reference casts, rounded to BF16 where a kernel stores."""
        y = product(x, self.up, recipe, torch.float32)
        y = F.gelu((y + self.bias.float()).to(x.dtype).float()).to(x.dtype)
        return (x.float() + product(y, self.down.mT, recipe, x.dtype).float()).to(x.dtype)


class Grouped(nn.Module):
    """The same by F.grouped_mm."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Parameter(_spread(experts, width, hidden))
        self.down = nn.Parameter(_spread(experts, width, hidden))

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        y = F.gelu(F.grouped_mm(x, self.up, offs=offs))
        return x + F.grouped_mm(y, self.down.mT, offs=offs)

    def expected(self, x: Tensor, offs: Tensor, recipe: Recipe = NVIDIA) -> Tensor:
        """With the reference casts."""
        inside = x[: int(offs[-1])]
        y = F.gelu(grouped_product(inside, self.up, offs, recipe))
        y = grouped_product(y, self.down.mT, offs, recipe)
        return x + F.pad(y, (0, 0, 0, len(x) - len(y)))


SPILLED = 8 if newer("triton", "3.7") else 0
"""Bytes that a thread may spill: newer Triton keeps one or two values more in casts with 255 registers."""
FP4_MMA = ("kind::mxf4", "cbsz:4 blgp:4")


def _native(result, target: str, gemms: int, word: str = "mxfp8") -> None:
    """Every GEMM of `result` is on the chip's instruction, and nothing spills."""
    assert [gemm.precision for gemm in result.report.gemms] == [word] * gemms
    launches = [launch for launch in result.launches if launch.gemms]
    assert len({gemm for launch in launches for gemm in launch.gemms}) == gemms
    for launch in launches:
        names = result.kernel(launch).binary.mma if launch.generated else ()
        assert names, launch.kernel
        assert all(BLOCK_SCALED[target] in name for name in names), (launch.kernel, names)
        packed = all(any(instruction in name for instruction in FP4_MMA) for name in names)
        assert packed == (word != "mxfp8"), (launch.kernel, names)
    assert result.problems == ()
    assert not [kernel.name for kernel in result.kernels if kernel.binary.spill_bytes > SPILLED]


def _check(folder, expected: Tensor, inputs: list[Tensor]) -> None:
    """Outputs and gradients of the code in `folder` are those of the graph that made `expected`."""
    gradient, floating = torch.randn_like(expected), [x for x in inputs if x.is_floating_point()]
    wanted = torch.autograd.grad(expected, floating, gradient)
    out, *gradients = interpret(folder, inputs, gradient)
    assert sqnr_db(expected, out) > 50  # sums in another order, then rounded to BF16
    for computed, reference in zip(filter(lambda x: x is not None, gradients), wanted, strict=True):
        assert sqnr_db(reference, computed) > 40


@pytest.mark.slow
@pytest.mark.parametrize("word", RECIPES)
@pytest.mark.parametrize("tokens", [70, 3])
def test_batched_experts_run_native_batched_products(tmp_path, tokens: int, word: str):
    model, x = Batched(3, 72, 104), _spread(3, tokens, 72).requires_grad_()
    result = codegen(model, x, target="sm_100", policy=every(word), out_dir=tmp_path)
    _native(result, "sm_100", 6, word)
    assert all(gemm.kernel.startswith("mx_scaled_bmm ") for gemm in result.report.gemms)
    _check(tmp_path, model.expected(x, RECIPES[word]), [model.bias, model.up, x, model.down])


@pytest.mark.slow
@pytest.mark.parametrize("word", RECIPES)
@pytest.mark.parametrize("ends", [(1, 2, 2, 40), (70, 70, 271, 300)], ids=str)
def test_grouped_experts_run_native_grouped_products(tmp_path, ends: tuple[int, ...], word: str):
    model, x = Grouped(4, 72, 104), _spread(max(307, ends[-1]), 72).requires_grad_()
    offs = torch.tensor(ends, dtype=torch.int32)
    result = codegen(model, x, offs, target="sm_100", policy=every(word), out_dir=tmp_path)
    _native(result, "sm_100", 6, word)
    assert all(gemm.kernel.startswith("mx_scaled_grouped_mm") for gemm in result.report.gemms)
    _check(tmp_path, model.expected(x, offs, RECIPES[word]), [model.up, x, offs, model.down])
    if word != "mxfp8":
        return
    read = [launch for launch in result.launches if not launch.gemms]
    casts = [launch for launch in read if "mx.cast.default" in launch.operators]
    both = [launch for launch in casts if casts_both(result, launch)]
    assert len(both) == 2, "tokens of both layers: one read each"
    assert len(casts) == len(both) + 4 + 4, "of gradients twice, of the weights forward and backward"


@pytest.mark.slow
def test_one_scale_for_all_experts_is_of_the_rows_in_groups(tmp_path):
    """FP8 with a scale a tensor; rows past the last group hold anything."""
    model, offs = Grouped(4, 64, 128), torch.tensor((70, 70, 121, 150), dtype=torch.int32)
    x = _spread(160, 64)
    policy = every({"precision": "fp8", "scaling": "tensor"})
    result = codegen(model, x.requires_grad_(), offs, target="sm_90", policy=policy, out_dir=tmp_path)
    assert result.problems == ()
    assert {gemm.precision for gemm in result.report.gemms} == {"fp8"}
    gradient, outputs = torch.randn_like(x), []
    for left_over in (0.0, 1e30):
        rows, above = x.detach().clone(), gradient.clone()
        rows[150:] = above[150:] = left_over
        out, *gradients = interpret(tmp_path, [model.up, rows.requires_grad_(), offs, model.down], above)
        up, dx, _, down = gradients
        outputs.append((out[:150], up, dx[:150], down))
    for clean, other in zip(*outputs, strict=True):
        assert clean.isfinite().all()
        assert torch.equal(clean, other)


@pytest.mark.slow
@pytest.mark.parametrize("word", RECIPES)
def test_groups_of_many_rows_read_tiled_scales(tmp_path, word: str):
    """By the tensor memory accelerator; K is 128 or ends inside a step, and so do N and the groups.

    Of wgrad the groups are of K: they begin and end inside blocks, and take one step, several or none. Packed
    operands have it innermost, of which the accelerator reads no part that starts anywhere.
    """
    ends = (3, 3, 399, 560)
    hidden = 272 if word == "mxfp8" else 288  # its rows are whole chunks of 16 bytes
    model, x = Grouped(4, 128, hidden), _spread(ends[-1] + 7, 128).requires_grad_()
    offs = torch.tensor(ends, dtype=torch.int32)
    result = codegen(model, x, offs, target="sm_100", policy=every(word), out_dir=tmp_path)
    _native(result, "sm_100", 6, word)
    forms = {gemm.gemm: gemm.kernel.split()[0] for gemm in result.report.gemms}
    rows, along_k = "mx_scaled_grouped_mm_tiled", f"mx_scaled_grouped_mm_k{'_tiled' * (word == 'mxfp8')}"
    assert forms == {"fprop": rows, "dgrad": rows, "wgrad": along_k}
    for launch in result.launches:
        if launch.gemms and not (word != "mxfp8" and "wgrad" in launch.gemms[0]):
            text = result.kernel(launch).binary.text["ptx"]
            assert "cp.async.bulk.tensor" in text
            assert "tcgen05.cp.cta_group::1.warpx4" in text
    _check(tmp_path, model.expected(x, offs, RECIPES[word]), [model.up, x, offs, model.down])


def product_alone(forward: Callable[..., Tensor], *shape: int) -> Any:
    """A product of groups with one weight of `shape`."""
    return Written(forward, weight=nn.Parameter(_spread(*shape)))


@pytest.mark.slow
def test_tokens_come_into_the_order_of_experts_by_their_cast(tmp_path):
    """One kernel reads tokens by their numbers and writes codes; no permuted copy of the tokens is stored."""
    permuted_tokens = lambda model, x, order, offs: F.grouped_mm(x[order], model.weight, offs=offs)  # noqa: E731
    model, x = product_alone(permuted_tokens, 3, 128, 144), _spread(40, 128)
    order, offs = torch.randperm(80) // 2, torch.tensor((30, 30, 80), dtype=torch.int32)
    result = codegen(model, x, order, offs, target="sm_100", policy=ALL, training=False, out_dir=tmp_path)
    (permuted,) = (launch for launch in result.launches if "aten.index.Tensor" in launch.operators)
    assert "mx.cast.default" in permuted.operators
    codes, scales = 80 * 128, 80 * 4
    assert permuted.num_bytes == x.nbytes + order.nbytes + codes + scales
    (out,) = interpret(tmp_path, [x, order, model.weight, offs])
    expected = grouped_product(x[order], model.weight, offs, NVIDIA)
    assert sqnr_db(expected, out) > 50


@pytest.mark.slow
def test_nonfinite_element_reaches_only_experts_of_its_block(tmp_path):
    """Of wgrad: an element in a block of 32 tokens that two experts share, and in one that is one's."""
    ends = (140, 300, 300, 535, 600)
    model = product_alone(lambda model, x, offs: F.grouped_mm(x, model.weight, offs=offs), 5, 128, 144)
    x, offs = _spread(607, 128), torch.tensor(ends, dtype=torch.int32)
    x[5, 3], x[540, 7] = torch.nan, torch.inf
    result = codegen(model, x, offs, target="sm_100", policy=ALL, out_dir=tmp_path)
    kernels = {gemm.gemm: gemm.kernel.split()[0] for gemm in result.report.gemms}
    assert kernels["wgrad"] == "mx_scaled_grouped_mm_k_tiled"
    _, gradient, *_ = interpret(tmp_path, [model.weight, x, offs], _spread(607, 144))
    expected = torch.zeros(5, 128, dtype=torch.bool)
    expected[0, 3] = True
    expected[3, 7] = expected[4, 7] = True
    assert torch.equal(gradient.isnan().any(2), expected)
    assert (gradient[2] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize(("hidden", "width", "ends"), [(104, 72, (41, 41, 80)), (144, 96, (131, 131, 208))])
def test_groups_of_columns_run_native_grouped_products(tmp_path, hidden: int, width: int, ends):
    """Weights on the left, tokens side by side."""
    columns = lambda model, x, offs: F.grouped_mm(model.weight, x.t(), offs=offs)  # noqa: E731
    model, x = product_alone(columns, 3, hidden, width), _spread(ends[-1], width).requires_grad_()
    offs = torch.tensor(ends, dtype=torch.int32)
    result = codegen(model, x, offs, target="sm_100", policy=ALL, out_dir=tmp_path)
    _native(result, "sm_100", 3)
    fprop = next(gemm.kernel for gemm in result.report.gemms if gemm.gemm == "fprop")
    assert ("grouped_mm_tiled " in fprop) == (width == 96)
    expected = grouped_product(x, model.weight.mT, offs, NVIDIA).t().contiguous()
    _check(tmp_path, expected, [model.weight, x, offs])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "word"),
    [
        ("sm_120", "mxfp8"), ("sm_120", "mxfp4"), ("sm_120", "nvfp4"),
        ("gfx950", "mxfp8"), ("gfx950", "mxfp4"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", [Batched, Grouped])
def test_experts_on_other_chips_run_native_products(target: str, word: str, form: type[nn.Module]):
    experts, width, hidden = 4, 256, 384
    x = torch.empty(experts, 200, width, dtype=torch.bfloat16, requires_grad=True)
    inputs = [x] if form is Batched else [x[0], torch.empty(experts, dtype=torch.int32)]
    result = codegen(form(experts, width, hidden), *inputs, target=target, policy=every(word))
    _native(result, target, 6, word)


@pytest.mark.slow
@pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled")  # torch 2.11, of the router's
def test_mixtral_experts_run_native_grouped_products():
    """As transformers writes it: tokens sorted by expert, grouped products, in a block with attention."""
    case = mixtral(1)
    result = codegen(case.model, target="sm_100", **case.kwargs)
    experts = [gemm for gemm in result.report.gemms if gemm.role in ("expert_in", "expert_out")]
    assert len(experts) == 6
    assert all(gemm.kernel.startswith("mx_scaled_grouped_mm") for gemm in experts)
    chosen = [gemm for gemm in result.report.gemms if gemm.precision == "mxfp8"]
    assert len(chosen) == 3 * 6
    assert all(gemm.kernel.endswith("(tcgen05.mma block_scale)") for gemm in chosen)
    launches = [launch for launch in result.launches if launch.generated and launch.gemms]
    computed = {gemm for launch in launches for gemm in launch.gemms}
    assert {f"{gemm.name} {gemm.gemm}" for gemm in chosen} <= computed
    for launch in launches:
        assert any("block_scale" in name for name in result.kernel(launch).binary.mma), launch.kernel
    assert result.problems == ()
    assert not [kernel.name for kernel in result.kernels if kernel.binary.spill_bytes > SPILLED]
