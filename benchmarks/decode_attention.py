"""Attention of one decode step on this machine: keys and values in MXFP8 against BF16 and FP32.

There is one query for each of 32 heads, and 8 heads of keys and values, 128 wide, as in Llama 3 8B. Contexts
have several lengths and are filled. A round reads the caches of as many layers as take 256 MB in BF16, so
that every cache comes from memory, in calls of four layers. Variants run in turns; in a pause before each,
the threads of the previous variant fall asleep.

    sdpa bf16, repeated   PyTorch's attention over keys and values repeated for the heads that share them:
                          what Hugging Face's models compile to
    sdpa bf16, packed     the same without repeating; heads that share keys and values become queries of one
                          head: what Hugging Face's models run eagerly
    sdpa fp32, …          both in FP32; the class of CPU, which the first line names, decides which is faster
    mxfp8, dequantized    the cache in MXFP8 under backend="inductor", which dequantizes it first
    mxfp8                 the cache in MXFP8 under backend="mxfp8"

Compiled code is cached, so run ``--repeats 1 --dry`` first to keep the measuring run short.

Usage: python benchmarks/decode_attention.py [--repeats 10] [--contexts 1024 …] [--queries 1] [--dry]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import common
import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

import mxcompile  # noqa: F401 - registers the backend's operators
from mxcompile import ops
from mxcompile.formats import Copy, Format
from mxcompile.lowering.cpu.features import features

HEADS, KV_HEADS, DIM = 32, 8, 128
CONTEXTS = (1024, 2048, 4096, 8192, 16384)
TOTAL_BYTES = 256 << 20
TOGETHER = 4
PAUSE_S = 0.02
BASELINES = tuple(f"sdpa {dtype}, {form}" for dtype in ("bf16", "fp32") for form in ("repeated", "packed"))
ELEM = torch.float8_e4m3fn


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One implementation of attention.

    attend: compiled function from (q, caches of `TOGETHER` layers, mask) to the results of these layers.
    caches: caches of all layers, in groups of `TOGETHER`. num_bytes: bytes of the cache of one layer.
    """

    attend: Callable[..., Any]
    caches: list[list[tuple[Tensor, ...]]]
    num_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--contexts", type=int, nargs="*", default=list(CONTEXTS))
    parser.add_argument("--queries", type=int, default=1)
    parser.add_argument("--dry", action="store_true", help="write no results")
    options = parser.parse_args()
    print(f"class of CPU: {features().name}")
    rows: list[dict[str, Any]] = []
    for context in options.contexts:
        rows += measure(context, options.queries, options.repeats)
    common.show([{k: v for k, v in row.items() if k != "times_us"} for row in rows])
    if not options.dry:
        common.write("decode_attention", rows)


@torch.no_grad()
def measure(context: int, queries: int, repeats: int) -> list[dict[str, Any]]:
    """Returns a row for each implementation of attention, over `context` keys."""
    torch._dynamo.reset()
    layers = max(TOGETHER, TOTAL_BYTES // (2 * 2 * KV_HEADS * DIM * context) // TOGETHER * TOGETHER)
    torch.manual_seed(0)
    q = torch.randn(1, HEADS, queries, DIM).bfloat16()
    mask = torch.arange(context)[None] <= torch.arange(context - queries, context)[:, None]
    functions = ways(context, layers)
    queries_of = {name: q.float() if "fp32" in name else q for name in functions}
    check(
        {
            name: way.attend(queries_of[name], way.caches[0], mask[None, None])
            for name, way in functions.items()
        }
    )
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in tqdm(range(repeats), desc=f"{context}", leave=False):
        for name, way in functions.items():
            time.sleep(PAUSE_S)
            way.attend(queries_of[name], way.caches[0], mask[None, None])  # wakes up the threads
            start = time.perf_counter()
            for caches in way.caches:
                way.attend(queries_of[name], caches, mask[None, None])
            times[name].append((time.perf_counter() - start) * 1e3 / layers)
    return [_row(context, queries, name, way, times) for name, way in functions.items()]


def ways(context: int, layers: int) -> dict[str, Way]:
    """Returns the implementations to compare, by name. Each compiles at its first call."""
    shape = (1, KV_HEADS, context, DIM)
    dense = [tuple(torch.randn(shape).bfloat16() for _ in "kv") for _ in range(layers)]
    stored = [tuple(part for x in layer for part in _cast(x)) for layer in dense]
    wide = [tuple(x.float() for x in layer) for layer in dense]
    bf16, fp32, mxfp8 = (
        [tensors[i : i + TOGETHER] for i in range(0, layers, TOGETHER)] for tensors in (dense, wide, stored)
    )
    forms, caches = (_repeated, _packed), (bf16, fp32)
    baselines = [(_in_each_layer(form), cache, "inductor") for cache in caches for form in forms]
    functions = {
        **dict(zip(BASELINES, baselines, strict=True)),
        "mxfp8, dequantized": (_in_each_layer(_stored), mxfp8, "inductor"),
        "mxfp8": (_in_each_layer(_stored), mxfp8, "mxfp8"),
    }
    return {
        name: Way(
            attend=torch.compile(attend, backend=backend, dynamic=False),
            caches=caches,
            num_bytes=sum(part.nbytes for part in caches[0][0]),
        )
        for name, (attend, caches, backend) in functions.items()
    }


def _cast(x: Tensor) -> tuple[Tensor, Tensor]:
    codes, scales = ops.cast(x, [str(Copy.for_product(Format(), -1))])
    return codes.view(torch.uint8), scales


def _in_each_layer(attend: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    return lambda q, layers, mask: [attend(q, layer, mask) for layer in layers]


def _repeated(q: Tensor, layer: tuple[Tensor, ...], mask: Tensor) -> Tensor:
    k, v = (
        x[:, :, None].expand(-1, -1, HEADS // KV_HEADS, -1, -1).reshape(1, HEADS, *x.shape[2:]) for x in layer
    )
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).contiguous()


def _packed(q: Tensor, layer: tuple[Tensor, ...], mask: Tensor) -> Tensor:
    groups, queries = HEADS // KV_HEADS, q.shape[2]
    packed = q.reshape(1, KV_HEADS, groups * queries, DIM)
    out = F.scaled_dot_product_attention(packed, *layer, attn_mask=mask.repeat(1, 1, groups, 1))
    return out.reshape(1, HEADS, queries, DIM).transpose(1, 2).contiguous()


def _stored(q: Tensor, layer: tuple[Tensor, ...], mask: Tensor) -> Tensor:
    k, v = (
        ops.decode(codes.view(ELEM), scales, -1, "e4m3 1x32 rceil", torch.bfloat16)
        for codes, scales in (layer[:2], layer[2:])
    )
    return _repeated(q, (k, v), mask)


def check(by_name: dict[str, list[Tensor]]) -> None:
    """Raises `SystemExit` if a result is off the baseline by more than 1 %, or 5 % for an MXFP8 cache."""
    right = by_name[BASELINES[0]][0].float()
    for name, results in by_name.items():
        gap = float((results[0].float() - right).norm() / right.norm())
        if not gap <= (0.05 if "mxfp8" in name else 0.01):
            raise SystemExit(f"{name} is {gap:.3f} away from {BASELINES[0]}")


def _row(context: int, queries: int, run: str, way: Way, times: dict[str, list[float]]) -> dict[str, Any]:
    median = statistics.median(times[run])
    return {
        "context": context,
        "queries": queries,
        "run": run,
        "median_us": round(median * 1e3, 1),
        "least_us": round(min(times[run]) * 1e3, 1),
        "cache_mb": round(way.num_bytes / 1e6, 2),
        "gb_per_s": round(way.num_bytes / median / 1e6, 1),
        **{
            f"{name.removeprefix('sdpa ').replace(', ', '_')}_over_this": round(
                1 / common.median_ratio(times, run, name), 2
            )
            for name in BASELINES
        },
        "fastest": min(BASELINES, key=lambda name: statistics.median(times[name])),
        "times_us": [round(t * 1e3, 1) for t in times[run]],
    }


if __name__ == "__main__":
    main()
