"""Products of packed FP4 operands: the same values as of a code a byte, and the reasons for what is left."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

from mxcompile import ops
from mxcompile.formats import Format
from mxcompile.graph.tags import GemmTag, Kind, set_tag, tags_of
from mxcompile.lowering import optional
from mxcompile.lowering.graph.vendor_fp4 import VendorFP4
from mxcompile.lowering.targets import TARGETS
from mxcompile.policy import Gemm

NVFP4, SQUARE, MXFP4 = "e2m1 1x16 two-level", "e2m1 16x16 two-level", "e2m1 1x32 rceil"
TAG = GemmTag(
    layer="l", name="l", module="Linear", source="", gemm=Gemm.FPROP, kind=Kind.LINEAR, tensors=("x", "w")
)


def spread(m: int, n: int) -> Tensor:
    """Numbers whose magnitudes lie over 12 binades, by block."""
    gen = torch.Generator().manual_seed(m * n)
    powers = torch.randint(-6, 6, (-(-m // 16), -(-n // 16)), generator=gen).float()
    powers = powers.repeat_interleave(16, 0).repeat_interleave(16, 1)[:m, :n]
    return torch.randn(m, n, generator=gen) * torch.exp2(powers)


def cast(x: Tensor, dim: int, word: str) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
    """Codes and scales of x, and the FP32 scale of the tensor if the format has one."""
    if not Format.of(word).two_level:
        return ops.encode(x, dim, word), None
    amax = ops.largest(x)
    return ops.encode(x, dim, word, None, 0, None, amax), ops.known_scale(amax, 0, word, 1)


def product(
    x: Tensor,
    w: Tensor,
    words: tuple[str, str],
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """x [M, K] · w [K, N] of operands that are cast along K."""
    (a, tensor_a), (b, tensor_b) = cast(x, -1, words[0]), cast(w, -2, words[1])
    alpha = () if tensor_a is None or tensor_b is None else (tensor_a * tensor_b,)
    return ops.encoded_mm(*a, *b, bias, dtype, *words, *alpha)


def applied(function, *inputs: Tensor, target: str = "sm_100", mslk: bool = True):
    """The graph of `function` with its products on the vendor's FP4 GEMM, and the reasons of those left."""
    module = make_fx(function, tracing_mode="fake")(*inputs)
    for node in module.graph.nodes:
        if node.target in (ops.encoded_mm, ops.encoded_grouped_mm):
            set_tag(node, TAG)
    with mock.patch.object(optional, "has_mslk", return_value=mslk):
        reasons = VendorFP4(target=TARGETS[target], device="cpu").apply(module.graph)
    module.graph.lint()
    module.recompile()
    return module, list(reasons.values())


def count(module: torch.fx.GraphModule, op) -> int:
    return len(module.graph.find_nodes(op="call_function", target=op))


@pytest.mark.parametrize(
    "words", [(NVFP4, NVFP4), (NVFP4, SQUARE), (MXFP4, MXFP4), (MXFP4, "e2m1 32x32 even")]
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_one_product(words: tuple[str, str], has_bias: bool):
    x, w = spread(70, 96), spread(96, 48)
    x[4] = 0.0
    bias = spread(1, 48)[0].bfloat16()

    def function(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return product(x, w, words, bias if has_bias else None)

    module, reasons = applied(function, x, w, bias)
    assert reasons == []
    assert not count(module, ops.encode)
    (node,) = module.graph.find_nodes(op="call_function", target=ops.packed_mm)
    word = "nvfp4" if Format.of(words[0]).two_level else "mxfp4"
    assert [tag.kernel for tag in tags_of(node)] == [f"aten._scaled_mm_v2 ({word})"]
    packed = [each.meta["val"] for each in node.args[:4:2]]
    assert [(each.dtype, tuple(each.shape), each.is_contiguous()) for each in packed] == [
        (torch.uint8, (70, 48), True),
        (torch.uint8, (48, 48), True),
    ]
    assert torch.equal(module(x, w, bias), function(x, w, bias))
    x[3, 5] = torch.nan
    values, reference = module(x, w, bias), function(x, w, bias)
    assert reference[3].isnan().all()
    torch.testing.assert_close(values, reference, rtol=0, atol=0, equal_nan=True)


def test_the_three_products_of_a_layer_share_casts():
    """A square copy of the weight is packed along both of its dimensions, from one cast's source each."""
    x, w, dy = spread(64, 96), spread(160, 96), spread(64, 160)

    def function(x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        codes, scale = cast(w, -1, SQUARE)
        word = NVFP4, SQUARE
        (a, sa), tensor_a = cast(x, -1, NVFP4)
        y = ops.encoded_mm(a, sa, codes[0].t(), codes[1].t(), None, torch.bfloat16, *word, tensor_a * scale)
        (a, sa), tensor_a = cast(dy, -1, NVFP4)
        dx = ops.encoded_mm(a, sa, *codes, None, torch.bfloat16, *word, tensor_a * scale)
        return y, dx, product(dy.t(), x, (NVFP4, NVFP4))

    module, reasons = applied(function, x, w, dy)
    assert reasons == []
    assert (count(module, ops.encode), count(module, ops.packed_mm)) == (0, 3)
    assert count(module, ops.encode_packed) == 6
    for values, reference in zip(module(x, w, dy), function(x, w, dy), strict=True):
        assert torch.equal(values, reference)


def test_stochastic_casts_keep_their_numbers():
    x, w, seed = spread(32, 64), spread(64, 32), torch.tensor([77])
    word = f"{NVFP4} stochastic"

    def function(x: Tensor, w: Tensor, seed: Tensor) -> Tensor:
        amax, other = ops.largest(x), ops.largest(w)
        a, b = ops.encode(x, -1, word, seed, 3, None, amax), ops.encode(w, -2, word, seed, 4, None, other)
        alpha = ops.known_scale(amax, 0, word, 1) * ops.known_scale(other, 0, word, 1)
        return ops.encoded_mm(*a, *b, None, torch.bfloat16, word, word, alpha)

    module, reasons = applied(function, x, w, seed)
    assert reasons == []
    assert torch.equal(module(x, w, seed), function(x, w, seed))


def test_a_transform_is_part_of_the_casts():
    """Neither the cast nor the search for its largest magnitude reads a transform from memory."""
    x, dy = spread(64, 96), spread(64, 160)
    word, signs = f"{NVFP4} hadamard:55272", 55272

    def function(x: Tensor, dy: Tensor) -> Tensor:
        sides = []
        for source in (dy, x):
            rotated = ops.hadamard(source, -2, signs)
            amax = ops.largest(rotated)
            cast = ops.encode(rotated, -2, word, None, 0, None, amax)
            sides.append((cast, ops.known_scale(amax, 0, word, 1)))
        ((a, sa), left), (b, right) = sides
        return ops.encoded_mm(a.t(), sa.t(), *b, None, torch.bfloat16, word, word, left * right)

    module, reasons = applied(function, x, dy)
    assert reasons == []
    assert not any(count(module, op) for op in (ops.hadamard, ops.largest, ops.encode))
    assert (count(module, ops.hadamard_largest), count(module, ops.encode_packed)) == (2, 2)
    assert torch.equal(module(x, dy), function(x, dy))


def grouped(x: Tensor, w: Tensor) -> Tensor:
    """Two groups of rows."""
    a, b = ops.encode(x, -1, MXFP4), ops.encode(w.view(2, 64, 16), -2, MXFP4)
    offs = torch.tensor([10, 32], dtype=torch.int32)
    return ops.encoded_grouped_mm(*a, *b, offs, torch.bfloat16, MXFP4, MXFP4)


def batched(x: Tensor, w: Tensor) -> Tensor:
    """Two matrices of each."""
    a, b = ops.encode(x.view(2, 16, 64), -1, MXFP4), ops.encode(w.view(2, 64, 16), -2, MXFP4)
    return ops.encoded_mm(*a, *b, None, torch.bfloat16, MXFP4, MXFP4)


def given_codes(x: Tensor, w: Tensor) -> Tensor:
    """The right operand's codes are an input."""
    b = w.to(torch.uint8), w[::32].to(torch.uint8)
    return ops.encoded_mm(*ops.encode(x, -1, MXFP4), *b, None, torch.bfloat16, MXFP4, MXFP4)


def given_alpha(x: Tensor, w: Tensor) -> Tensor:
    """Nothing tells the scale of one tensor from the other's."""
    a, b = (
        ops.encode(each, dim, NVFP4, None, 0, None, ops.largest(each)) for each, dim in ((x, -1), (w, -2))
    )
    return ops.encoded_mm(*a, *b, None, torch.bfloat16, NVFP4, NVFP4, x[0, :1])


@pytest.mark.parametrize(
    ("function", "size", "reason"),
    [
        (grouped, (32, 64), "the FP4 GEMM multiplies two matrices, not batches or groups"),
        (batched, (32, 64), "the FP4 GEMM multiplies two matrices, not batches or groups"),
        (given_codes, (32, 64), "an operand is stored, or was cast in another graph"),
        (given_alpha, (32, 64), "the scales of both tensors are not at hand"),
        (
            lambda x, w: product(x, w, (NVFP4, NVFP4), None, torch.float32),
            (32, 64),
            "the FP4 GEMM gives BF16 or FP16, not float32",
        ),
        (
            lambda x, w: product(x, w, (NVFP4, NVFP4), w[0].float()),
            (32, 64),
            "the FP4 GEMM adds a bias of the dtype of the result alone",
        ),
        (
            lambda x, w: product(x, w, (NVFP4, NVFP4)),
            (32, 48),
            "the FP4 GEMM wants k a multiple of 32 and n one of 16; here k=48, n=32",
        ),
        (
            lambda x, w: product(x, w[:, :24], (NVFP4, NVFP4)),
            (32, 64),
            "the FP4 GEMM wants k a multiple of 32 and n one of 16; here k=64, n=24",
        ),
    ],
)
def test_what_is_left_has_a_reason(function, size: tuple[int, int], reason: str):
    module, reasons = applied(function, spread(*size), spread(size[1], 32))
    assert reasons == [reason]
    assert not count(module, ops.packed_mm)


def test_mxfp4_needs_mslk():
    module, reasons = applied(
        lambda x, w: product(x, w, (MXFP4, MXFP4)), spread(32, 64), spread(64, 32), mslk=False
    )
    assert reasons == ["this build of PyTorch has no MSLK, whose product of MXFP4 operands it would call"]
    assert not count(module, ops.packed_mm)


@pytest.mark.parametrize(
    ("target", "word", "runs"),
    [
        ("sm_103", NVFP4, True),
        ("sm_103", MXFP4, True),
        ("sm_120", NVFP4, True),
        ("sm_120", MXFP4, False),
        ("sm_90", NVFP4, False),
        ("gfx950", NVFP4, False),
        ("sm_100", "e4m3 1x16 rceil", False),
    ],
)
def test_which_chips(target: str, word: str, runs: bool):
    module, reasons = applied(
        lambda x, w: product(x, w, (word, word)), spread(32, 64), spread(64, 32), target=target
    )
    assert reasons == []
    assert count(module, ops.packed_mm) == runs


@pytest.mark.parametrize("word", [NVFP4, MXFP4])
def test_pytorch_takes_the_layout(word: str):
    """By the checks of its operator for shapes, dtypes and lengths of scales, without a GPU."""
    pytest.importorskip("triton")
    from mxcompile.lowering.templates import vendor_fp4

    with FakeTensorMode(allow_non_fake_inputs=True):
        x, w = torch.empty(200, 96, device="cuda"), torch.empty(96, 48, device="cuda")
        amax = torch.ones(1, device="cuda") if Format.of(word).two_level else None
        a = ops.encode_packed(x, -1, word, None, 0, amax)
        b = ops.encode_packed(w, -2, word, None, 0, amax)
        if amax is None:
            result = vendor_fp4.mx_vendor_mxfp4_mm(*a, *b, out_dtype=torch.bfloat16)
        else:
            result = vendor_fp4.mx_vendor_nvfp4_mm(*a, *b, amax, amax, out_dtype=torch.bfloat16)
    assert (tuple(result.shape), result.dtype, result.device.type) == ((200, 48), torch.bfloat16, "cuda")


@pytest.mark.parametrize("word", [NVFP4, SQUARE, MXFP4])
@pytest.mark.parametrize("shape", [(70, 96), (130, 32)])
def test_operators_pass_opcheck(shape: tuple[int, int], word: str):
    x, w = spread(*shape), spread(shape[1], 48)
    amax = ops.largest(x) if Format.of(word).two_level else None
    opcheck(ops.encode_packed, (x, -1, word, None, 0, amax))
    opcheck(ops.encode_packed, (w, -2, word, None, 0, amax))
    a, b = ops.encode_packed(x, -1, word, None, 0, amax), ops.encode_packed(w, -2, word, None, 0, amax)
    opcheck(ops.hadamard_largest, (x, 9))
    opcheck(ops.encode_packed_both, (x, word, word, amax, amax))
    opcheck(ops.packed_mm, (*a, *b, None, torch.bfloat16, word, word, amax, amax))
