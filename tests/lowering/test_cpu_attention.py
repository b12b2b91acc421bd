"""The C++ attention over a cache, stored or not, in every form this machine can run, against FP64."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
from cpp_forms import exported, fixture_of, integer, pointer
from torch import Tensor

from mxcompile import ops
from mxcompile.formats import stored_form
from mxcompile.formats.encoding import decode_tensors, encode_stored
from mxcompile.lowering.graph import pipeline as pipeline  # registers the lowerings

ELEMS = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2, "INT8": torch.int8}
TYPES = {"Bfloat16": torch.bfloat16, "float": torch.float32}
BF16, F32 = torch.bfloat16, torch.float32

Attend = Callable[..., Tensor]
"""q, (codes, scales) of keys and of values, mask, element type, threads → [B, Q, H, D].

Keys and values in q's dtype have no scales.
"""


def _functions() -> Iterator[str]:
    sizes = ", ".join(f"int64_t n{i}" for i in range(9))
    problem = f"Attention{{{', '.join(f'n{i}' for i in range(9))}, factor}}"
    for x, mask in product(TYPES, TYPES):
        rest = f"const {mask}* m, {sizes}, float factor, int threads, {x}* out"
        sides = (
            f"const {x}* q, const uint8_t* k, const uint8_t* ks, const uint8_t* v, const uint8_t* vs, {rest}"
        )
        for elem in ELEMS:
            body = f"attention<{elem}>(q, k, ks, v, vs, m, {problem}, threads, out);"
            yield exported(f"attend_{elem}_{x}_{mask}", sides, body)
        body = f"dense_attention(q, k, v, m, {problem}, threads, out);"
        yield exported(f"dense_{x}_{mask}", f"const {x}* q, const {x}* k, const {x}* v, {rest}", body)
    loop = "for (int64_t i = 0; i < n; i++) out[i] = exp_of(x[i]);"
    yield exported("exps", "const float* x, int64_t n, float* out", loop)


functions = fixture_of("attention.h", _functions())


@pytest.fixture(scope="module")
def attend(functions: ctypes.CDLL) -> Attend:
    words = {dtype: word for word, dtype in TYPES.items()}

    def call(q: Tensor, keys, values, mask: Tensor | None, elem: str = "E4M3", threads: int = 2) -> Tensor:
        (batch, heads, queries, dim), (_, kv_heads, length, _) = q.shape, keys[0].shape
        strides = [0, 0, 0]
        if mask is not None:
            mask = mask.contiguous()
            strides = [0 if n == 1 else s for n, s in zip(mask.shape[:3], mask.stride()[:3], strict=True)]
        out = torch.full((batch, queries, heads, dim), 3.0, dtype=q.dtype)
        mask_word = "float" if mask is None else words[mask.dtype]
        kind = f"attend_{elem}" if keys[1] is not None else "dense"
        function = getattr(functions, f"{kind}_{words[q.dtype]}_{mask_word}")
        parts = [part for part in (*keys, *values) if part is not None]
        tensors = [t if t.dtype is torch.uint8 else t.view(torch.uint8) for t in parts]
        sizes = map(integer, (batch, heads, kv_heads, queries, length, dim, *strides))
        factor = ctypes.c_float(dim**-0.5)
        function(*map(pointer, (q, *tensors, mask)), *sizes, factor, ctypes.c_int(threads), pointer(out))
        return out

    return call


def exact(q: Tensor, keys, values, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The attention in FP64, and what the kernel's may be away from it before it is rounded.

    A score is off by FP32's rounding of D + 6 operations on its terms' magnitudes; its weight by that times
    itself, and by the exponential's units in the last place; a sum over T keys by T more. What numerator
    and denominator are off adds up.
    """
    repeats = q.shape[1] // keys[0].shape[1]
    k, v = (_numbers(*side).repeat_interleave(repeats, 1) for side in (keys, values))
    factor = float(torch.tensor(q.shape[3] ** -0.5, dtype=F32))
    scores = q.double() @ k.transpose(-1, -2) * factor
    most = q.double().abs() @ k.abs().transpose(-1, -2) * factor
    added = torch.zeros(()) if mask is None else mask.double()
    scores = scores + added
    weights = torch.where((scores == -torch.inf).all(-1, keepdim=True), 0, scores.softmax(-1))
    taken = most + torch.where(added.isfinite(), added.abs(), 0)
    off = 2.0**-24 * ((q.shape[3] + 6) * taken + scores.masked_fill(scores == -torch.inf, 0).abs())
    off = torch.where(weights > 0, off, 0).amax(-1, keepdim=True)
    relative = 2 * (off + (k.shape[2] + 10) * 2.0**-24)
    return (weights @ v).transpose(1, 2), (relative * (weights @ v.abs()) + 1e-35).transpose(1, 2)


def _numbers(codes: Tensor, scales: Tensor | None) -> Tensor:
    if scales is None:
        return codes.double()
    return decode_tensors(codes, scales, -1, stored_form(codes.dtype), torch.float64)


def check(computed: Tensor, q: Tensor, keys, values, mask: Tensor | None) -> None:
    right, off = exact(q, keys, values, mask)
    rounding = 2.0**-8 if computed.dtype is BF16 else 2.0**-24
    error = (computed.double() - right).abs()
    assert bool((error <= off + rounding * (right.abs() + off)).all()), float((error - off).max())


def cast(x: Tensor, elem: str = "E4M3") -> tuple[Tensor, Tensor]:
    qdata, scales, _ = encode_stored(x, -1, stored_form(ELEMS[elem]))
    return qdata, scales


def causal(queries: int, keys: int, used: int, dtype: torch.dtype = BF16) -> Tensor:
    """As of a static cache with room for `keys`, of which the last query sees `used`."""
    places = torch.arange(keys)[None] <= torch.arange(used - queries, used)[:, None]
    return torch.where(places, 0.0, -torch.inf).to(dtype)[None, None]


@pytest.mark.parametrize("elem", ELEMS)
@pytest.mark.parametrize("dtype", TYPES.values(), ids=str)
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "queries", "keys", "dim"),
    [
        (1, 4, 4, 1, 64, 64),
        (2, 8, 2, 1, 200, 128),
        (1, 6, 1, 3, 129, 80),
        (1, 3, 1, 16, 300, 33),
        (2, 2, 2, 5, 1, 256),
        (1, 5, 5, 2, 70, 7),
        (1, 1, 1, 1, 3000, 128),
    ],
)
def test_cpu_attention_matches_the_reference_for_any_sizes(
    attend: Attend, batch, heads, kv_heads, queries, keys, dim, dtype, elem
):
    """Any sizes, with and without a mask, one thread or more: parts of the keys are put together."""
    torch.manual_seed(0)
    q = torch.randn(batch, heads, queries, dim).to(dtype)
    k, v = (cast(torch.randn(batch, kv_heads, keys, dim), elem) for _ in range(2))
    used = max(queries, keys * 2 // 3)
    per_head = torch.randn(batch, heads, queries, keys).to(dtype)
    masks = (None, causal(queries, keys, min(used, keys)) if keys >= queries else None, per_head)
    for mask in masks:
        check(attend(q, k, v, mask, elem), q, k, v, mask)
    check(attend(q, k, v, per_head, elem, threads=1), q, k, v, per_head)


@pytest.mark.parametrize("dtype", TYPES.values(), ids=str)
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "queries", "keys", "dim"),
    [(1, 4, 1, 1, 640, 256), (2, 6, 2, 1, 200, 80), (1, 3, 1, 16, 129, 33), (1, 2, 2, 5, 1, 16)],
)
def test_attention_over_keys_in_the_dtype_of_queries_matches_the_reference(
    attend: Attend, batch, heads, kv_heads, queries, keys, dim, dtype
):
    torch.manual_seed(2)
    q = torch.randn(batch, heads, queries, dim).to(dtype)
    k, v = ((torch.randn(batch, kv_heads, keys, dim).to(dtype), None) for _ in range(2))
    per_head = torch.randn(batch, heads, queries, keys).to(dtype)
    for mask in (None, causal(queries, keys, keys * 2 // 3, F32) if keys > queries else None, per_head):
        for threads in (1, 2):
            check(attend(q, k, v, mask, threads=threads), q, k, v, mask)
    k[0][:, 0, keys // 2] = math.nan
    output = attend(q, k, v, None)
    first = heads // kv_heads
    assert output[:, :, :first].isnan().all()
    assert output[:, :, first:].isfinite().all()


def test_a_wide_range_of_scores_and_values(attend: Attend):
    """Maxima that grow from tile to tile, scales of all sizes, weights that vanish."""
    torch.manual_seed(1)
    q = torch.randn(1, 4, 2, 64)
    growing = torch.linspace(0.01, 12, 500)[None, None, :, None]
    k = cast(torch.randn(1, 2, 500, 64) * growing)
    v = cast(torch.randn(1, 2, 500, 64) * torch.exp2(torch.randint(-100, 100, (1, 2, 500, 1)).float()))
    for values in (v, cast(torch.randn(1, 2, 500, 64))):
        check(attend(q, k, values, None), q, k, values, None)
        falling = (k[0].flip(2).contiguous(), k[1].flip(2).contiguous())
        check(attend(q, falling, values, None), q, falling, values, None)


def test_keys_that_a_mask_excludes_are_not_read(attend: Attend):
    """Tiles that no query takes part in: NaN there is nobody's; a query without keys gets 0."""
    q, values = torch.randn(1, 2, 2, 64).to(BF16), cast(torch.randn(1, 2, 256, 64))
    k = cast(torch.randn(1, 2, 256, 64))
    k[1][:, :, 128:] = 255
    mask = causal(2, 256, 100)
    clean = (k[0], torch.where(k[1] == 255, 0, k[1]).to(torch.uint8))
    check(attend(q, k, values, mask), q, clean, values, mask)
    mask[..., 1, :] = -torch.inf
    output = attend(q, k, values, mask)
    assert output[:, 0].count_nonzero() > 0
    assert output[:, 1].count_nonzero() == 0


@pytest.mark.parametrize("where", ["query", "key", "value", "infinite"])
def test_nan_stays_with_its_head(attend: Attend, where: str):
    q = torch.randn(1, 4, 1, 64).to(BF16)
    k, v = (cast(torch.randn(1, 2, 90, 64)) for _ in range(2))
    if where == "query":
        q[0, 2, 0, 5] = math.nan
    elif where == "infinite":
        q[0, 2, 0, 5] = math.inf
    else:
        (k if where == "key" else v)[1][0, 1, 70, 0] = 255
    output = attend(q, k, v, None)[0, 0]
    assert output[:2].isfinite().all()
    assert output[2].isnan().any()
    assert where != "key" or output[2].isnan().all()


def test_exponential_is_within_two_units_of_fp64(functions: ctypes.CDLL):
    """Within 2 units in the last place of FP64's; 0 and NaN where they belong."""
    x = -torch.linspace(0, 87, 1 << 20)
    x = torch.cat(
        [x, -torch.exp2(torch.linspace(-40, 6, 1 << 16)), torch.tensor([-math.inf, -200.0, math.nan])]
    )
    out = torch.empty_like(x)
    functions.exps(pointer(x), integer(len(x)), pointer(out))
    right = x.double().exp()
    within = (out.double() - right).abs() <= 2 * 2.0**-23 * right
    assert bool(within[:-3].all())
    assert out[-3:-1].tolist() == [0.0, 0.0]
    assert out[-1].isnan()


def test_mask_that_is_equal_for_all_keys_is_broadcast():
    """The kernel would read a number for each key."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, rows, 64) for heads, rows in ((4, 2), (2, 70), (2, 70)))
    mask = torch.randn(2, 1, 2, 1)

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return ops.attention(q, k, None, v, None, mask, 0.3, "")

    torch.testing.assert_close(torch.compile(attention)(q, k, v, mask), attention(q, k, v, mask))
