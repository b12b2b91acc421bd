"""Which attentions read a cache as it is, what the others say, and that both mean the same."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers import graphs
from helpers.casts import WITHOUT_SCHEMA, quantize
from torch import Tensor, fx
from torch.library import opcheck
from torch.nn import functional as F

import mxcompile
from mxcompile import ops
from mxcompile.graph import dead
from mxcompile.graph.tags import Kind, set_tag
from mxcompile.lowering.cpu import kernel
from mxcompile.lowering.graph.cached_attention import CachedAttention
from mxcompile.lowering.targets import TARGETS

TAG = replace(graphs.TAG, module="", kind=Kind.PRODUCT, tensors=("x", "x"))
BF16, ELEM = torch.bfloat16, torch.float8_e4m3fn
FOR_CPUS = "aten._scaled_dot_product_flash_attention_for_cpu"

E4M3, E5M2 = "e4m3 1x32 rceil", "e5m2 1x32 rceil"
KERNEL = "mx_attention C++ (keys and values mxfp8)"


def inputs(queries: int = 1, heads: int = 4, keys: int = 50, dtype: torch.dtype = BF16) -> list[Tensor]:
    """A query, a cache of two heads (bytes, scales, bytes, scales), a mask for the last 10 keys."""
    torch.manual_seed(0)
    q = torch.randn(1, heads, queries, 64).to(dtype)
    cache = []
    for _ in "kv":
        codes, scales = quantize(torch.randn(1, 2, keys, 64), -1, ELEM, "rceil")
        cache += [codes.view(torch.uint8), scales]
    return [q, *cache, (torch.arange(keys) < keys - 10)[None, None, None].expand(1, 1, queries, keys)]


def values(codes: Tensor, scales: Tensor, dtype: torch.dtype = BF16) -> Tensor:
    return ops.decode(codes.view(ELEM), scales, -1, E4M3, dtype)


def repeated(x: Tensor, heads: int) -> Tensor:
    batch, kv_heads, *rest = x.shape
    return x[:, :, None].expand(-1, -1, heads // kv_heads, -1, -1).reshape(batch, heads, *rest)


def attend(q, k, ks, v, vs, mask) -> Tensor:
    keys, vals = (repeated(values(*copies, q.dtype), q.shape[1]) for copies in ((k, ks), (v, vs)))
    return F.scaled_dot_product_attention(q, keys, vals, attn_mask=mask)


def unmasked(q, k, ks, v, vs, mask) -> Tensor:
    return attend(q, k, ks, v, vs, None)


def both(q: Tensor, *cache: Tensor) -> list[Tensor]:
    """Keys and values for every head."""
    return [repeated(values(*copies), q.shape[1]) for copies in (cache[:2], cache[2:])]


def additive(q, k, ks, v, vs, mask) -> Tensor:
    bias = torch.where(mask, torch.arange(mask.shape[-1]) / -8, -math.inf).to(q.dtype)
    sides = (values(*copies, q.dtype) for copies in ((k, ks), (v, vs)))
    return F.scaled_dot_product_attention(q, *sides, attn_mask=bias, scale=0.3)


def mixed(q, k, ks, v, vs, mask) -> Tensor:
    vals = ops.decode(v.view(torch.float8_e5m2), vs, -1, E5M2, BF16)
    return F.scaled_dot_product_attention(q, *(repeated(x, q.shape[1]) for x in (values(k, ks), vals)))


def sliced(q, *cache_and_mask) -> Tensor:
    return F.scaled_dot_product_attention(q, *(side[:, :, :20] for side in both(q, *cache_and_mask[:-1])))


def causal(q, *cache_and_mask) -> Tensor:
    return F.scaled_dot_product_attention(q, *both(q, *cache_and_mask[:-1]), is_causal=True)


def capped(q, k, ks, v, vs, mask) -> Tensor:
    keys, vals = both(q, k, ks, v, vs)
    scores = 5 * torch.tanh(q @ keys.transpose(-1, -2) / 40)
    return scores.masked_fill(~mask, -math.inf).softmax(-1) @ vals


def lowered(function, example_inputs: list[Tensor], target: str = "cpu") -> tuple[fx.GraphModule, list[str]]:
    """`function` as a graph after the pass, and the reasons it gives."""
    with torch.no_grad():
        module = graphs.traced(function, *example_inputs)
    for node in graphs.calls(module, torch.ops.aten.bmm.default):
        set_tag(node, TAG)  # as `find` does
    step = CachedAttention(target=TARGETS[target], device="cpu")
    candidates = list(step.candidates(module.graph))
    reasons = dict.fromkeys(candidates, step.obstacle) if step.obstacle else step.apply(module.graph)
    assert set(reasons) <= set(candidates)
    dead.eliminate(module.graph)
    module.graph.lint()
    module.recompile()
    return module, list(reasons.values())


def count(module: fx.GraphModule) -> int:
    return len(graphs.calls(module, ops.attention))


@pytest.mark.parametrize("queries", [1, 16])
@pytest.mark.parametrize("function", [attend, unmasked, additive])
def test_attention_over_mx_cache_reads_quantized_values(function, queries: int):
    example_inputs = inputs(queries, heads=2 if function is additive else 6, dtype=torch.float32)
    module, reasons = lowered(function, example_inputs)
    assert (count(module), reasons) == (1, [])
    assert not graphs.calls(module, ops.decode)
    torch.testing.assert_close(module(*example_inputs), function(*example_inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("function", "changes", "target", "reason"),
    [
        (attend, {"queries": 17}, "cpu", "17 queries, the kernel takes up to 16"),
        (attend, {}, "sm_90", f"a form of attention, {FOR_CPUS}, that has no kernel"),
        (attend, {"dtype": torch.float16}, "cpu", "queries in torch.float16"),
        (mixed, {}, "cpu", f"keys in {E4M3}, values in {E5M2}"),
        (sliced, {"queries": 2}, "cpu", "it reads a part of the cache, or values computed from it"),
        (causal, {"queries": 2}, "cpu", "it is causal without a mask"),
        (capped, {}, "cpu", "scores and values are separate products"),
    ],
)
def test_unsupported_attention_dequantizes_keys_and_values(function, changes, target: str, reason: str):
    module, reasons = lowered(function, inputs(**changes), target)
    assert (count(module), set(reasons)) == (0, {f"keys and values dequantized: {reason}"})


def shared_heads(q, k, v, mask) -> Tensor:
    keys, vals = (repeated(tensor, q.shape[1]) for tensor in (k, v))
    return F.scaled_dot_product_attention(q, keys, vals, attn_mask=mask, scale=0.2)


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_few_queries_read_many_keys_in_their_own_dtype(dtype: torch.dtype):
    """Shared heads are read once, not copied."""
    q, k, v = (torch.randn(2, heads, n, 64).to(dtype) for heads, n in ((6, 1), (2, 100), (2, 100)))
    mask = (torch.arange(100) < 80)[None, None, None].expand(2, 1, 1, 100)
    module, reasons = lowered(cast_queries, [q, k, v, mask])
    assert (count(module), reasons) == (1, [])
    (node,) = graphs.calls(module, ops.attention)
    assert [value.meta["val"].shape for value in (node.args[1], node.args[3])] == [k.shape, v.shape]
    rounding = {"rtol": 0.01, "atol": 0.01} if dtype is BF16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(module(q, k, v, mask), cast_queries(q, k, v, mask), **rounding)


def cast_queries(q, *others) -> Tensor:
    (q,) = ops.cast(q, [f"e4m3 1x32 rceil @-1 {str(q.dtype).removeprefix('torch.')}"])
    return shared_heads(q, *others)


PLAIN = {
    "few keys": {"keys": 63},
    "many queries": {"queries": 17},
    "strided keys": {"strided": True},
    "FP16": {"dtype": torch.float16},
    "GPU": {"target": "sm_90"},
    "nothing quantized": {"function": shared_heads, "keys": 100, "dtype": torch.float32},  # policy bf16
}
ORDINARY = {
    "function": cast_queries, "keys": 64, "queries": 1, "dtype": BF16, "strided": False, "target": "cpu",
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
def test_leaves_other_attention_without_a_stored_cache(name: str):
    case = ORDINARY | PLAIN[name]
    q, k = (torch.randn(1, 2, case[side], 64).to(case["dtype"]) for side in ("queries", "keys"))
    if case["strided"]:
        k = k.transpose(1, 2).contiguous().transpose(1, 2)
    module, reasons = lowered(case["function"], [q, k, k.clone(), None], case["target"])
    assert (count(module), reasons) == (0, [])


def test_attention_without_compiler_records_the_reason(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernel, "_no_compiler", lambda: "no C++ compiler: none is found")
    module, reasons = lowered(attend, inputs())
    assert (count(module), reasons) == (0, ["keys and values dequantized: no C++ compiler: none is found"])


@pytest.mark.parametrize("masked", [False, True])
def test_attention_operator_with_mask_passes_opcheck(masked: bool):
    q, *cache, mask = inputs(queries=3)
    added = torch.where(mask, 0.0, -torch.inf) if masked else None
    opcheck(ops.attention, (q, *cache, added, 0.1, "e4m3 1x32 rceil"), test_utils=WITHOUT_SCHEMA)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_attention_records_the_kernel_that_ran(dynamic: bool):
    compiled = torch.compile(attend, backend="mxfp8", dynamic=dynamic)
    for queries, kernel_name in ((3, KERNEL), (5, KERNEL), (20, "20 queries, the kernel takes up to 16")):
        example_inputs = inputs(queries)
        with torch.no_grad():
            output = compiled(*example_inputs)
            right = attend(*(x.float() if x.dtype is BF16 else x for x in example_inputs))
        torch.testing.assert_close(output.float(), right, rtol=0.01, atol=0.01)
        if not dynamic:  # where the number of queries varies, that of the first call chose
            assert all(gemm.kernel.endswith(kernel_name) for gemm in mxcompile.reports()[-1].gemms)
    assert {gemm.kernel for gemm in mxcompile.reports()[0].gemms} >= {KERNEL}
