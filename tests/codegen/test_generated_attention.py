"""Attention over a cache in MXFP8 on GPUs: its code, and what that computes in Triton's interpreter."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from generating import assert_clean
from helpers.casts import quantize
from helpers.paces import mostly_slow
from interpreted import interpret
from torch import Tensor, nn
from torch.nn import functional as F

from mxcompile import ops
from mxcompile.formats import Format, elem_type
from mxcompile.lowering.targets import TARGETS
from mxcompile.offline import CodegenResult, codegen

BF16 = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attention.

    filled: how many keys the mask lets in; None: no mask. padding: how many of the first it excludes in the
    last sequence. processors: of the chip, if not its own number. form: what its record says.
    """

    target: str = "sm_90"
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    queries: int = 1
    keys: int = 150
    dim: int = 64
    filled: int | None = 100
    padding: int = 1
    processors: int | None = None
    elem: torch.dtype = torch.float8_e4m3fn
    as_bytes: bool = True
    form: str = "16x64 split 3"


CASES = {
    "one_query": Case(),
    "queries_of_many_heads": Case(queries=3, heads=28, kv_heads=1, form="64x32 split 5"),
    "odd_head_dim": Case(dim=20, filled=None),
    "wide_heads": Case(dim=256, keys=40, filled=33, form="16x32 split 2"),
    "nothing_to_attend": Case(filled=0),
    "by_integers": Case(target="sm_80", queries=16, heads=2, form="16x64 split 3"),
    "amd_e5m2": Case(target="gfx942", elem=torch.float8_e5m2, as_bytes=False),
    "native": Case(target="sm_100"),
    "tiles_in_turn": Case(
        heads=2, kv_heads=1, keys=220, filled=210, padding=70, processors=2, form="16x64 split 2"
    ),
}


class Attention(nn.Module):
    """Attention as Hugging Face's models compute it, over keys and values that are stored."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.word = str(Format.mx(elem_type(case.elem)))
        for name in ("keys", "values"):
            rows = torch.randn(case.batch, case.kv_heads, case.keys, case.dim)
            codes, scales = quantize(rows, -1, case.elem, "rceil")
            self.register_buffer(name, codes.view(torch.uint8) if case.as_bytes else codes)
            self.register_buffer(f"{name}_scale", scales)

    def values_of(self, name: str, dtype: torch.dtype) -> Tensor:
        """Keys or values, repeated for the heads that share them."""
        codes = getattr(self, name)
        codes = codes.view(self.case.elem) if self.case.as_bytes else codes
        rows = ops.decode(codes, getattr(self, f"{name}_scale"), -1, self.word, dtype)
        batch, heads, *rest = rows.shape
        shared = self.case.heads // heads
        return rows[:, :, None].expand(-1, -1, shared, -1, -1).reshape(batch, heads * shared, *rest)

    def forward(self, q: Tensor, mask: Tensor | None = None) -> Tensor:
        """[B, H, Q, D], with a mask that is True where a key takes part."""
        keys, values = (self.values_of(name, q.dtype) for name in ("keys", "values"))
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)


def inputs(case: Case) -> list[Tensor]:
    """A query, and a mask."""
    q = torch.randn(case.batch, case.heads, case.queries, case.dim).to(BF16)
    if case.filled is None:
        return [q]
    mask = (torch.arange(case.keys) < case.filled).expand(case.batch, 1, case.queries, -1).clone()
    mask[-1, :, :, : case.padding] = False
    return [q, mask]


def generate(case: Case, folder: Path | None = None) -> tuple[CodegenResult, Attention, list[Tensor]]:
    torch.manual_seed(0)
    model, arguments = Attention(case), inputs(case)
    target = TARGETS[case.target]
    changed = dataclasses.replace(target, processors=case.processors or target.processors)
    with mock.patch.dict(TARGETS, {case.target: changed}):
        result = codegen(model, *arguments, target=case.target, training=False, policy="bf16", out_dir=folder)
    return result, model, arguments


def exact(model: Attention, q: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The attention in FP64, and the same of the values' magnitudes."""
    keys, values = (model.values_of(name, torch.float64) for name in ("keys", "values"))
    scores = q.double() @ keys.transpose(-1, -2) * q.shape[-1] ** -0.5
    scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    return weights @ values, weights @ values.abs()


VALUES = (
    "one_query",
    "queries_of_many_heads",
    "odd_head_dim",
    "nothing_to_attend",
    "amd_e5m2",
    "tiles_in_turn",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", VALUES)
def test_generated_attention_is_within_bf16_rounding(name: str, tmp_path: Path):
    """Within BF16's rounding of each e^s and of the result, 2⁻⁸ of either, and FP32's of the sums."""
    case = CASES[name]
    result, model, arguments = generate(case, tmp_path)
    kernels = {gemm.kernel for gemm in result.report.gemms}
    assert kernels == {f"mx_attention {case.form} (keys and values mxfp8)"}
    q, *mask = arguments
    (output,) = interpret(tmp_path, [q, *model.buffers(), *mask])
    wanted, magnitude = exact(model, *arguments)
    bound = (2.0**-8 + case.dim * 2.0**-20) * magnitude + 2.0**-8 * wanted.abs() + 2.0**-40
    worst = ((output.double() - wanted).abs() / bound).max()
    assert worst <= 1, f"error {worst:.3g} times the bound"


CODE = ("one_query", "queries_of_many_heads", "wide_heads", "by_integers", "amd_e5m2", "native")


@pytest.mark.parametrize("name", mostly_slow(CODE, "one_query"))
def test_attention_reads_the_cache_in_one_kernel_without_spills(name: str):
    result, _, _ = generate(CASES[name])
    assert_clean(result)
    (reading,) = (launch for launch in result.launches if launch.gemms)
    assert reading.flops > 0
    assert not any("mx.decode" in name for launch in result.launches for name in launch.operators)
    binary = result.kernel(reading).binary
    assert binary.registers > 0
    assert binary.mma


def as_is(**changes: Any) -> set[str]:
    result, _, _ = generate(Case(**changes))
    return {gemm.kernel.partition("; ")[2] for gemm in result.report.gemms}


@pytest.mark.slow
def test_attention_beyond_kernel_limits_stays_dequantized_with_reason():
    reason = "keys and values dequantized: "
    assert as_is(queries=17) == {f"{reason}17 queries, the kernel takes up to 16"}
    assert as_is(dim=288, keys=33) == {f"{reason}head_dim 288, the kernel takes up to 256"}
