"""Products of packed FP4 operands: the same values as of a code a byte, and the reasons for what is left."""

from __future__ import annotations

import pytest
import torch
from helpers.bits import assert_same_bits
from helpers.casts import encode, encode_packed, packed
from helpers.graphs import calls, lowered, traced
from helpers.spread import spread
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from mxcompile import ops
from mxcompile.formats import Copy, CopyPart, Format
from mxcompile.formats.encoding import encode_stored
from mxcompile.graph.tags import tags_of
from mxcompile.lowering.choices.families import NO_CAST
from mxcompile.lowering.graph.packed import Packed
from mxcompile.ops.view import Casts, Product

NVFP4, SQUARE, MXFP4 = "e2m1 1x16 two-level", "e2m1 16x16 two-level", "e2m1 1x32 rceil"
ROW_MAJOR, TILED = "row-major", "128x4"


def by_blocks(*shape: int) -> Tensor:
    return spread(*shape, binades=6, tile=(16, 16))


def cast(x: Tensor, dim: int, word: str) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
    """Codes and scales of x, and the FP32 scale of the tensor if the format has one."""
    form = Format.parse(word)
    if not form.two_level:
        return encode(x, dim, word), None
    amax = ops.largest(x, dim) if form.row_scaled else ops.largest(x)
    state = (amax.unsqueeze(0), 0, word, x.ndim) if form.row_scaled else (amax, 0, word, 1)
    return encode(x, dim, word, None, 0, None, amax), ops.known_scale(*state)


def product(
    x: Tensor,
    w: Tensor,
    words: tuple[str, str],
    extra: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    operator=ops.matmul,
) -> Tensor:
    """x [.., M, K] · w [.., K, N] of operands that are cast along K. extra: a bias, or ends of groups."""
    (a, tensor_a), (b, tensor_b) = cast(x, -1, words[0]), cast(w, -2, words[1])
    tensors = None if tensor_a is None or tensor_b is None else [tensor_a, tensor_b]
    return operator(*a, *b, extra, dtype, *words, tensors)


def applied(function, *inputs: Tensor, target: str = "sm_100", mode: str = "fake"):
    """The graph of `function` with its products packed, and the reasons of those left."""
    return lowered([Packed], target, traced(function, *inputs, mode=mode))


def products(module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """The products of packed operands."""
    return [node for node in module.graph.nodes if (view := Product.from_node(node)) and view.is_packed]


def copies_of(module: torch.fx.GraphModule) -> list[Copy]:
    """The copies that casts make."""
    return [copy for node in calls(module, ops.cast) for copy in Casts.read(node).parsed]


def layouts(module: torch.fx.GraphModule) -> set[str]:
    """The layouts of the scales that casts write."""
    return {str(copy.layout) for copy in copies_of(module)}


def all_packed(module: torch.fx.GraphModule) -> bool:
    return all(copy.format.packed for copy in copies_of(module))


def check(function, *inputs: Tensor, **how: str) -> torch.fx.GraphModule:
    """The graph of `function`, all its products packed, which has the same values."""
    module, reasons = applied(function, *inputs, **how)
    assert reasons == []
    assert_same_bits(flat(module(*inputs)), flat(function(*inputs)))
    return module


def flat(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else results


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("sm_100", (NVFP4, NVFP4)),
        ("sm_120", (NVFP4, SQUARE)),
        ("sm_120", (MXFP4, MXFP4)),
        ("gfx950", (MXFP4, "e2m1 32x32 even")),
    ],
)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(70, 96, 48), (33, 47, 25)])
def test_packed_matrix_product_equals_codes_per_byte(
    shape: tuple[int, int, int], has_bias: bool, target: str, words: tuple[str, str]
):
    """Of odd sizes too, in any dtype; on a chip that reads rows, casts write rows."""
    m, k, n = shape
    x, w = by_blocks(m, k), by_blocks(k, n)
    x[4] = 0.0
    bias = by_blocks(1, n)[0]

    def function(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return product(x, w, words, bias if has_bias else None, torch.float32)

    module = check(function, x, w, bias, target=target)
    assert all_packed(module)
    (node,) = products(module)
    assert tags_of(node)[0].name == "l"
    a, b = (argument.meta["val"] for argument in node.args[:4:2])
    assert (a.dtype, tuple(a.shape), a.is_contiguous()) == (torch.uint8, (m, (k + 1) // 2), True)
    assert (b.dtype, tuple(b.shape), b.t().is_contiguous()) == (torch.uint8, ((k + 1) // 2, n), True)
    assert layouts(module) == {ROW_MAJOR if target == "gfx950" else TILED}
    x[3, 5] = torch.nan
    reference = function(x, w, bias)
    assert reference[3].isnan().all()
    assert_same_bits([module(x, w, bias)], [reference])


@pytest.mark.parametrize("words", [(NVFP4, SQUARE), (MXFP4, MXFP4)])
def test_packed_batched_product_equals_codes_per_byte(words: tuple[str, str]):
    inputs = by_blocks(3, 20, 47), by_blocks(3, 47, 18), by_blocks(3, 1, 18)
    module = check(lambda x, w, bias: product(x, w, words, bias), *inputs)
    assert layouts(module) == {ROW_MAJOR}


GROUPS = {
    "rows": ((50, 64), (4, 64, 48)),
    "columns": ((4, 48, 64), (64, 50)),
    "contracted": ((48, 50), (50, 64)),
    "batch": ((4, 10, 64), (4, 64, 48)),
}


@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize("word", [NVFP4, MXFP4])
def test_packed_grouped_product_equals_codes_per_byte(word: str, kind: str):
    """Of rows, columns and K, whose groups end inside bytes."""
    left, right = GROUPS[kind]
    x, w, offs = by_blocks(*left), by_blocks(*right), torch.tensor([10, 10, 31, 46], dtype=torch.int32)

    def function(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
        return product(x, w, (word, word), offs, torch.float32, ops.grouped_matmul)

    module, reasons = applied(function, x, w, offs)
    assert (reasons, layouts(module)) == ([], {ROW_MAJOR})
    assert len(products(module)) == 1
    values, reference = module(x, w, offs), function(x, w, offs)
    atol = 1e-6 * float(reference.abs().max())  # strides decide the order in which CPUs add
    torch.testing.assert_close(values, reference, rtol=0, atol=atol)


def test_packed_product_with_symbolic_sizes_equals_codes_per_byte():
    function = lambda x, w: product(x, w, (NVFP4, NVFP4))  # noqa: E731
    module = check(function, by_blocks(40, 62), by_blocks(62, 24), mode="symbolic")
    x, w = by_blocks(33, 51), by_blocks(51, 17)
    assert torch.equal(module(x, w), function(x, w))


def test_the_three_products_of_a_layer_share_casts():
    """A square copy of the weight is packed along both of its dimensions, from one cast's source each."""
    x, w, dy = by_blocks(64, 96), by_blocks(160, 96), by_blocks(64, 160)

    def function(x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        codes, scale = cast(w, -1, SQUARE)
        word = NVFP4, SQUARE
        (a, sa), tensor_a = cast(x, -1, NVFP4)
        y = ops.matmul(a, sa, codes[0].t(), codes[1].t(), None, torch.bfloat16, *word, [tensor_a, scale])
        (a, sa), tensor_a = cast(dy, -1, NVFP4)
        dx = ops.matmul(a, sa, *codes, None, torch.bfloat16, *word, [tensor_a, scale])
        return y, dx, product(dy.t(), x, (NVFP4, NVFP4))

    module = check(function, x, w, dy)
    assert all_packed(module)
    assert (len(products(module)), len(calls(module, ops.cast))) == (3, 6)


def test_stochastic_casts_keep_their_numbers():
    x, w, seed = by_blocks(32, 64), by_blocks(64, 32), torch.tensor([77])
    word = f"{NVFP4} stochastic"

    def function(x: Tensor, w: Tensor, seed: Tensor) -> Tensor:
        amax, other = ops.largest(x), ops.largest(w)
        a, b = encode(x, -1, word, seed, 3, None, amax), encode(w, -2, word, seed, 4, None, other)
        tensors = [ops.known_scale(state, 0, word, 1) for state in (amax, other)]
        return ops.matmul(*a, *b, None, torch.bfloat16, word, word, tensors)

    check(function, x, w, seed)


@pytest.mark.parametrize("tokens", [64, 50])
def test_a_transform_is_part_of_the_casts(tokens: int):
    """Neither the cast nor the search for its largest magnitude reads a transform from memory."""
    x, dy = by_blocks(tokens, 96), by_blocks(tokens, 160)
    word, signs = f"{NVFP4} hadamard:55272", 55272

    def function(x: Tensor, dy: Tensor) -> Tensor:
        sides = []
        for source in (dy, x):
            rotated = ops.hadamard(source, -2, signs)
            amax = ops.largest(rotated)
            cast = encode(rotated, -2, word, None, 0, None, amax)
            sides.append((cast, ops.known_scale(amax, 0, word, 1)))
        ((a, sa), left), (b, right) = sides
        return ops.matmul(a.t(), sa.t(), *b, None, torch.bfloat16, word, word, [left, right])

    module = check(function, x, dy)
    assert not any(calls(module, op) for op in (ops.hadamard, ops.largest))
    assert [copy.part for copy in copies_of(module)] == [CopyPart.LARGEST, CopyPart.CODES] * 2


def stored_product(word: str, batch: tuple[int, ...] = ()):
    """A function of x and the parts of a weight that is stored packed, and these parts; K is 64, N 40."""
    form = Format.parse(word)
    packed, scale, whole = encode_stored(by_blocks(*batch, 40, 64), -1, form)
    parts = [packed, scale if whole is None else scale.view(form.scale.dtype)]
    parts += [] if whole is None else [whole]

    def function(x: Tensor, packed: Tensor, scale: Tensor, *whole: Tensor) -> Tensor:
        a, tensor_a = cast(x, -1, word)
        codes = ops.decode(packed, None, -1, f"{word} packed", torch.uint8)
        tensors = None if tensor_a is None else [tensor_a, whole[0].reshape(1).reciprocal()]
        return ops.matmul(*a, codes.mT, scale.mT, None, torch.bfloat16, word, word, tensors)

    return function, parts


@pytest.mark.parametrize("word", [NVFP4, MXFP4])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_a_stored_weight_is_read_as_it_is(batch: tuple[int, ...], word: str):
    function, parts = stored_product(word, batch)
    module = check(function, by_blocks(*batch, 30, 64), *parts)
    assert not any(calls(module, op) for op in (ops.decode, ops.scale_bytes))
    (node,) = products(module)
    assert node.args[2].args[0].op == "placeholder"


@pytest.mark.parametrize(
    ("target", "word", "tiled"),
    [
        ("sm_100", NVFP4, True), ("sm_100", MXFP4, True), ("sm_120", NVFP4, True), ("sm_120", MXFP4, False),
        ("gfx950", MXFP4, False),
    ],
)  # fmt: skip
def test_a_large_product_has_the_scales_of_its_weight_tiled(target: str, word: str, tiled: bool):
    """So that the persistent form, or the library's, can run it; where there is neither, rows are read."""
    function, parts = stored_product(word)
    wide = [torch.empty(8192, *part.shape[1:], dtype=part.dtype) if part.ndim > 1 else part for part in parts]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(tensor) for tensor in (torch.empty(8192, 64), *wide[:2], *parts[2:])]
        module, reasons = applied(function, *fakes, target=target)
    assert reasons == []
    assert len(calls(module, ops.scale_bytes)) == tiled


def test_a_weight_with_a_scale_for_every_row():
    """As where several were joined."""
    _, parts = stored_product(NVFP4)
    parts[2] = torch.logspace(0, 3, 40)[:, None]

    def joined(x: Tensor, packed: Tensor, scale: Tensor, whole: Tensor) -> Tensor:
        a, tensor_a = cast(x, -1, NVFP4)
        tensors = [tensor_a, whole.t().reciprocal()]
        codes = ops.decode(packed, None, -1, f"{NVFP4} packed", torch.uint8)
        return ops.matmul(*a, codes.mT, scale.mT, None, torch.bfloat16, NVFP4, NVFP4, tensors)

    check(joined, by_blocks(30, 64), *parts)


def given_codes(x: Tensor, w: Tensor) -> Tensor:
    """The right operand's codes are an input."""
    b = w.to(torch.uint8), w[::32].to(torch.uint8)
    return ops.matmul(*encode(x, -1, MXFP4), *b, None, torch.bfloat16, MXFP4, MXFP4)


def given_alpha(x: Tensor, w: Tensor) -> Tensor:
    """Nothing tells the scale of one tensor from the other's."""
    a, b = (
        encode(operand, dim, NVFP4, None, 0, None, ops.largest(operand))
        for operand, dim in ((x, -1), (w, -2))
    )
    return ops.matmul(*a, *b, None, torch.bfloat16, NVFP4, NVFP4, [x[0, :1]])


def packed_along_columns(x: Tensor, w: Tensor) -> Tensor:
    """A stored weight [K, N] whose bytes hold neighbours of a column."""
    packed, scale = w.to(torch.uint8)[::2].clone(), w[::32].to(torch.uint8)
    codes = ops.decode(packed, None, 0, f"{MXFP4} packed", torch.uint8)
    return ops.matmul(*encode(x, -1, MXFP4), codes, scale, None, torch.bfloat16, MXFP4, MXFP4)


def of(*words: str, **how):
    return lambda x, w: product(x, w, words, **how)


def several_scales(x: Tensor, w: Tensor) -> Tensor:
    """Groups of rows, a scale for each column of the weights."""
    (a, tensor_a), (b, _) = cast(x, -1, NVFP4), cast(w.view(2, 32, 32), -2, NVFP4)
    offs = torch.tensor([10, 32], dtype=torch.int32)
    tensors = [tensor_a, w[:1, :32]]
    return ops.grouped_matmul(*a, *b, offs, torch.bfloat16, NVFP4, NVFP4, tensors)


INNERMOST = "another dimension innermost than the contraction"
NOT_FP64 = "its result is float64, not BF16, FP16 or FP32"


@pytest.mark.parametrize(
    ("function", "left", "right", "reason"),
    [
        (given_codes, (32, 64), (64, 32), "an operand was cast in another graph"),
        (given_alpha, (32, 64), (64, 32), "the graph lacks the global scale of an operand"),
        (packed_along_columns, (32, 64), (64, 32), f"a weight is stored with {INNERMOST}"),
        (several_scales, (32, 32), (64, 32), "a tensor has several scales, and groups share one"),
        (of(MXFP4, MXFP4), (1, 2), (2, 32), "an operand is one byte"),
        (of(MXFP4, MXFP4), (0, 64), (64, 32), "a dimension is empty"),
        (of(MXFP4, MXFP4), (32, 0), (0, 32), "a dimension is empty"),
        (of(MXFP4, MXFP4), (1, 64), (64, 1), "its result is one element"),
        (of(MXFP4, MXFP4, dtype=torch.float64), (32, 64), (64, 32), NOT_FP64),
        (of(NVFP4, f"{NVFP4} 4over6:256:mae"), (32, 64), (64, 32), NO_CAST),
        (of(f"{NVFP4} row-scaled", NVFP4), (32, 64), (64, 32), NO_CAST),
    ],
)
def test_products_not_packed_have_a_recorded_reason(
    function, left: tuple[int, int], right: tuple[int, int], reason: str
):
    module, reasons = applied(function, by_blocks(*left), by_blocks(*right))
    assert (reasons, products(module)) == ([reason], [])


@pytest.mark.parametrize(
    ("target", "words", "runs"),
    [
        ("sm_103", (NVFP4, NVFP4), True),
        ("sm_103", (MXFP4, MXFP4), True),
        ("sm_120", (NVFP4, NVFP4), True),
        ("sm_120", (MXFP4, MXFP4), True),
        ("gfx950", (MXFP4, MXFP4), True),
        ("gfx950", (NVFP4, NVFP4), False),
        ("sm_90", (NVFP4, NVFP4), False),
        ("sm_100", ("e4m3 1x16 rceil",) * 2, False),
        ("sm_100", ("e2m1 1x64 rceil",) * 2, False),
        ("sm_100", (MXFP4, "e2m3 1x32 rceil"), False),
    ],
)
def test_packed_products_run_on_chips_with_the_format(target: str, words: tuple[str, str], runs: bool):
    module, reasons = applied(of(*words), by_blocks(32, 64), by_blocks(64, 32), target=target)
    half = target == "gfx950" and not runs  # it multiplies FP4 with other scales
    assert reasons == (["no kernel multiplies E2M1 under E4M3 scales"] if half else [])
    assert len(products(module)) == runs


@pytest.mark.parametrize("word", [NVFP4, MXFP4])
def test_pytorch_accepts_packed_operands_and_tiled_scales(word: str):
    """By the checks of its operator for shapes, dtypes and lengths of scales, without a GPU."""
    pytest.importorskip("triton")
    from mxcompile.lowering.templates import vendor

    with FakeTensorMode(allow_non_fake_inputs=True):
        x, w = torch.empty(200, 96, device="cuda"), torch.empty(96, 48, device="cuda")
        amax = torch.ones(1, device="cuda") if Format.parse(word).two_level else None
        (a, sa), (b, sb) = (
            encode_packed(operand, dim, word, None, 0, amax) for operand, dim in ((x, -1), (w, -2))
        )
        if amax is None:
            result = vendor.mx_vendor_mxfp4_mm(a, sa, b.t(), sb, out_dtype=torch.bfloat16)
        else:
            tensors = (amax.expand(200, 48),) * 2
            result = vendor.mx_vendor_nvfp4_mm(a, sa, b.t(), sb, *tensors, out_dtype=torch.bfloat16)
    assert (tuple(result.shape), result.dtype, result.device.type) == ((200, 48), torch.bfloat16, "cuda")


@pytest.mark.parametrize("word", [NVFP4, SQUARE, MXFP4])
@pytest.mark.parametrize("shape", [(70, 96), (130, 33), (3, 17, 31)])
def test_packed_casts_and_products_pass_opcheck(shape: tuple[int, ...], word: str):
    *batch, _, k = shape
    x, w = by_blocks(*shape), by_blocks(*batch, k, 48)
    amax = ops.largest(x) if Format.parse(word).two_level else None
    for layout in (TILED, ROW_MAJOR) if not batch else (ROW_MAJOR,):
        (a, sa), (b, sb) = (
            encode_packed(operand, dim, word, None, 0, amax, layout) for operand, dim in ((x, -1), (w, -2))
        )
        right = b.mT, sb if sb.ndim == 1 else sb.mT
        copies = [*packed(-1, word, layout), *packed(-2, word, layout)]
        opcheck(ops.cast, (x, copies, None, 0, None, [amax, amax]))
        how = f"{word} packed", f"{word} packed", None if amax is None else [amax, amax]
        opcheck(ops.matmul, (a, sa, *right, None, torch.bfloat16, *how))
        if layout == ROW_MAJOR and not batch:
            opcheck(ops.cast, (x, [f"{word} hadamard:9 packed @-2 largest"]))
            opcheck(ops.scale_bytes, (sa, a, -1, how[0], TILED))
            offs = torch.tensor([9, k], dtype=torch.int32)
            opcheck(ops.grouped_matmul, (a, sa, *right, offs, torch.float32, *how))
