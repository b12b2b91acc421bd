"""`MXTensor` as a tensor: operators give what they give for the values; what keeps blocks stays stored."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
from helpers.spread import spread
from safetensors.torch import save_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import mxcompile
from mxcompile import MXTensor
from mxcompile.errors import FormatError

BF16, F32 = torch.bfloat16, torch.float32
E2M1 = torch.float4_e2m1fn_x2
FORMATS = {
    "mxfp8": {},
    "mxint8": {"elem_dtype": torch.int8},
    "mxfp4": {"elem_dtype": E2M1},
    "nvfp4": {"elem_dtype": E2M1, "rounding": "two-level"},
}
"""What `quantize` is told; of packed elements something."""

ALL_FORMATS = pytest.mark.parametrize("how", FORMATS.values(), ids=FORMATS)


def joined() -> MXTensor:
    """Tensors in NVFP4 that were joined: rows keep the global scales they came with, which differ by 2^9."""
    return torch.cat([mxcompile.quantize(bf16(3, 100) * size, **FORMATS["nvfp4"]) for size in (1, 512)])


WEIGHTS = {
    **{name: lambda how=how: mxcompile.quantize(bf16(6, 100), **how) for name, how in FORMATS.items()},
    "joined nvfp4": joined,
}
ALL_WEIGHTS = pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)


def bf16(*shape: int) -> Tensor:
    return spread(*shape, binades=9).to(BF16)


def equal(tensor: Tensor, expected: Tensor) -> bool:
    dense = tensor.dequantize(tensor.dtype) if isinstance(tensor, MXTensor) else tensor
    return dense.dtype is expected.dtype and torch.equal(dense, expected)


KEEPING = {
    "detach": lambda w: w.detach(),
    "clone": lambda w: w.clone(),
    "to the same device": lambda w: w.to("cpu", copy=True),
    "cpu": lambda w: w.cpu(),
    "contiguous": lambda w: w.contiguous(),
    "row": lambda w: w[3],
    "rows": lambda w: w[2:5],
    "every other row": lambda w: w[::2],
    "chosen rows": lambda w: w[torch.tensor([4, 0, 0])],
    "index_select": lambda w: w.index_select(0, torch.tensor([1, 5])),
    "unsqueeze": lambda w: w.unsqueeze(0),
    "unsqueeze behind": lambda w: w.unsqueeze(-1),
    "squeeze": lambda w: w.unsqueeze(0).squeeze(0),
    "expand": lambda w: w.expand(3, *w.shape),
    "columns of whole blocks": lambda w: w[..., 32:96],
    "columns to the end": lambda w: w[..., 64:],
    "split rows": lambda w: w.split(3)[0],
    "split in blocks": lambda w: w.split(32, -1)[2],
    "split sizes": lambda w: w.split([64, 36], -1)[1],
    "chunk": lambda w: w.chunk(2)[1],
    "unbind": lambda w: w.unbind(0)[2],
    "cat": lambda w: torch.cat([w, w]),
    "stack": lambda w: torch.stack([w, w]),
    "flatten of rows": lambda w: torch.stack([w, w]).flatten(0, 1),
    "view": lambda w: w.view(2, -1, w.shape[-1]),
    "transpose": lambda w: w.transpose(-1, -2),
    "there and back": lambda w: w.mT.mT,
    "permute": lambda w: w.unsqueeze(0).permute(2, 0, 1),
    "column of a transpose": lambda w: w.mT[:, 1],
    "columns of a transpose": lambda w: w.mT[:, 1:3],
    "squeeze of a row": lambda w: w[2:3].squeeze(0),
    "squeeze of more": lambda w: w.squeeze(0),
    "stack behind": lambda w: torch.stack([w, w], 1),
    "copy": lambda w: torch.empty_like(w).copy_(w),
    "view of a copy": lambda w: w.view(2, -1, w.shape[-1]).transpose(0, 1).reshape(-1, w.shape[-1]),
    "deepcopy": copy.deepcopy,
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
}

DENSE = {
    "column": lambda w: w[..., 5],
    "columns across blocks": lambda w: w[..., 3:40],
    "flatten": lambda w: w.flatten(),
    "reshape across blocks": lambda w: w.reshape(-1, 25),
    "mask": lambda w: w[torch.tensor([True, False] * (w.shape[0] // 2))],
    "pairs": lambda w: w[torch.tensor([1, 2]), torch.tensor([3, 4])],
    "split across blocks": lambda w: w.split(20, -1)[1],
    "unbind of columns": lambda w: w.unbind(-1)[7],
    "cat of columns": lambda w: torch.cat([w, w], -1),
    "cat with dense": lambda w: torch.cat([w, torch.ones(1, w.shape[-1], dtype=w.dtype)]),
    "add": lambda w: w + 1,
    "linear": lambda w: F.linear(torch.ones(2, 100, dtype=w.dtype), w),
    "embedding": lambda w: F.embedding(torch.tensor([[3, 1], [0, 5]]), w),
    "matmul": lambda w: torch.ones(2, w.shape[0], dtype=w.dtype) @ w,
    "sum": lambda w: w.sum(),
    "int": lambda w: w.nan_to_num().clamp(-9, 9).to(torch.int32),
    "bool": lambda w: w.bool(),
    "zeros_like": lambda w: torch.zeros_like(w),
}


@ALL_WEIGHTS
@pytest.mark.parametrize("name", KEEPING)
def test_operations_that_keep_whole_blocks_return_mxtensors(name, weight):
    w = weight()
    result, dense = KEEPING[name](w), KEEPING[name](w.dequantize(BF16))
    assert isinstance(result, MXTensor)
    assert equal(result, dense)
    assert result.form == w.form
    assert result.stride() == dense.stride()
    qdata, whole = result.qdata.view(result.elem_dtype), result.global_scale
    MXTensor(qdata, result.scale, result.block_dim, global_scale=whole)  # the parts belong together


@ALL_WEIGHTS
@pytest.mark.parametrize("name", DENSE)
def test_everything_else_sees_the_values(name, weight):
    w = weight()
    result = DENSE[name](w)
    assert not isinstance(result, MXTensor)
    assert equal(result, DENSE[name](w.dequantize(BF16)))


@pytest.mark.parametrize("shape", [(2, 40, 70), (1, 64, 32), (3, 1, 5)], ids=str)
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2])
@ALL_FORMATS
def test_blocks_along_any_dimension_of_a_stack(shape, dim, how):
    if how.get("elem_dtype") is E2M1 and shape[dim] % 2:
        with pytest.raises(FormatError, match=f"2 e2m1 elements share a byte, and k={shape[dim]} is odd"):
            mxcompile.quantize(bf16(*shape), block_dim=dim, **how)
        return
    w = mxcompile.quantize(bf16(*shape), block_dim=dim, **how)
    dense = w.dequantize(BF16)
    for move in (
        lambda x: x[0], lambda x: x.mT, lambda x: x.permute(2, 0, 1), lambda x: x.unsqueeze(1),
        lambda x: x.transpose(0, 2)[..., 0], lambda x: x.unbind(1)[0], lambda x: x.flatten(0, 1),
        lambda x: torch.stack([x, x], -1), lambda x: x[:1], lambda x: torch.bmm(x, x.mT),
    ):  # fmt: skip
        assert equal(move(w), move(dense))


@ALL_FORMATS
def test_values_keep_the_strides_of_the_codes(how):
    w = mxcompile.quantize(bf16(6, 100), **how).t()
    assert w.dequantize().stride() == w.stride() == (1, 100)


def test_another_dtype_keeps_the_codes():
    w = mxcompile.quantize(bf16(6, 100))
    wide = w.to(F32)
    assert isinstance(wide, MXTensor)
    assert wide.dtype is F32
    assert torch.equal(wide + 0, w.dequantize(F32))
    assert mxcompile.quantize(torch.randn(2, 32)).dtype is F32


@pytest.mark.parametrize("change", [lambda w: w.add_(1), lambda w: w.zero_(), lambda w: w.mul_(2)])
def test_changes_in_place_are_refused(change):
    w = mxcompile.quantize(bf16(2, 64))
    before = w.dequantize()
    with pytest.raises(FormatError, match="in place"):
        change(w)
    assert torch.equal(w.dequantize(), before)


@ALL_FORMATS
def test_copy_takes_codes_or_quantizes(how):
    w, other = (mxcompile.quantize(bf16(2, 64), **how) for _ in range(2))
    w.copy_(other)
    assert equal(w, other.dequantize())
    dense = bf16(2, 64)
    w.copy_(dense)
    assert equal(w, mxcompile.quantize(dense, **how).dequantize())
    for source in (
        mxcompile.quantize(dense, block_dim=0, **how),
        mxcompile.quantize(dense, elem_dtype=torch.float8_e5m2),
    ):
        w.copy_(source)
        assert equal(w, mxcompile.quantize(source.dequantize(), **how).dequantize())
    w.copy_(other)
    plain = torch.empty(2, 64, dtype=BF16).copy_(other)
    assert torch.equal(plain, other.dequantize())


def stored_linear(n: int = 64, k: int = 100, how: dict = FORMATS["mxfp8"]) -> tuple[nn.Linear, nn.Linear]:
    """A layer with a stored weight, and the dense layer of its values."""
    stored, dense = (nn.Linear(k, n, dtype=BF16) for _ in range(2))
    weight = mxcompile.quantize(bf16(n, k), **how)
    stored.weight = nn.Parameter(weight, requires_grad=False)
    dense.weight = nn.Parameter(weight.dequantize(), requires_grad=False)
    dense.bias = stored.bias
    return stored, dense


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_a_layer_runs_on_it(mode):
    stored, dense = stored_linear()
    x = torch.randn(3, 100, dtype=BF16)
    with mode():
        assert torch.equal(stored(x), dense(x))


def test_the_input_of_a_layer_has_a_gradient():
    stored, dense = stored_linear()
    gradients = []
    for layer in (stored, dense):
        x = torch.randn(3, 100, dtype=BF16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        layer(x).square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


@ALL_FORMATS
def test_mxtensor_is_a_frozen_parameter_of_its_module(how):
    stored, _ = stored_linear(how=how)
    assert isinstance(stored.weight, nn.Parameter)
    assert dict(stored.named_parameters())["weight"] is stored.weight
    assert not stored.weight.requires_grad
    stored.float()
    assert stored.weight.dtype is F32
    assert isinstance(stored.weight, MXTensor)
    stored.to("meta")
    assert stored.weight.is_meta
    assert stored.weight.qdata.is_meta
    stored.to_empty(device="cpu")
    assert isinstance(stored.weight, MXTensor)
    assert not stored.weight.scale_bytes.is_meta


@ALL_FORMATS
def test_the_type_of_a_parameter_makes_parameters(how):
    """As `nn.Parameter` does: Accelerate's offloading moves weights so."""
    stored, dense = stored_linear(how=how)
    moved = type(stored.weight)(stored.weight.detach().to("meta"), requires_grad=False)
    assert isinstance(moved, nn.Parameter)
    assert isinstance(moved, MXTensor)
    assert moved.is_meta
    back = type(moved)(stored.weight.detach(), requires_grad=False)
    assert equal(back, dense.weight)
    with pytest.raises(FormatError, match="needs the scales"):
        type(moved)(dense.weight, requires_grad=False)


def test_guards_compare_the_format_without_spelling_it(monkeypatch: pytest.MonkeyPatch):
    """Dynamo's guards flatten every weight in each call of compiled code."""
    x = mxcompile.quantize(torch.ones(2, 64))
    x.data = mxcompile.quantize(torch.ones(2, 64), elem_dtype=torch.int8)
    word = str(x.form)
    monkeypatch.setattr(type(x.form), "__str__", lambda form: pytest.fail("the format is spelled again"))
    assert word.startswith("int8 ")
    assert x.__tensor_flatten__()[1] == (-1, torch.float32, word)


@ALL_FORMATS
def test_copied_and_pickled_mxtensor_keeps_values(how):
    stored, dense = stored_linear(how=how)
    x = torch.randn(3, 100, dtype=BF16)
    copied = copy.deepcopy(stored)
    assert torch.equal(copied(x), dense(x))
    assert copied.weight.qdata.data_ptr() != stored.weight.qdata.data_ptr()
    restored = pickle.loads(pickle.dumps(stored.weight))
    assert isinstance(restored, nn.Parameter)
    assert equal(restored, dense.weight)


def test_is_shared_between_processes():
    stored, dense = stored_linear()
    assert not stored.weight.is_shared()
    assert stored.share_memory().weight.is_shared()
    assert equal(stored.weight, dense.weight)


def test_save_model_of_safetensors_raises_error_naming_save_quantized():
    """`save_pretrained` comes here too; it said that data pointers are accessed."""
    stored, _ = stored_linear()
    with pytest.raises(FormatError, match="save_quantized"):
        save_model(stored, "never written")


@ALL_FORMATS
def test_loads_under_weights_only(how):
    stored, dense = stored_linear(how=how)
    file = io.BytesIO()
    torch.save(stored.state_dict(), file)
    assert file.tell() < 64 * 100 * (1.0 if how else 1.5) + 4000
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert isinstance(state["weight"], MXTensor)
    fresh, _ = stored_linear(how=how)
    fresh.load_state_dict(state)
    x = torch.randn(3, 100, dtype=BF16)
    assert torch.equal(fresh(x), dense(x))
    plain = nn.Linear(100, 64, dtype=BF16)
    plain.load_state_dict(state)
    assert torch.equal(plain(x), dense(x))
    plain.load_state_dict(state, assign=True)
    assert isinstance(plain.weight, MXTensor)


def test_loads_under_weights_only_where_nothing_but_the_class_was_imported(tmp_path):
    torch.save({"w": mxcompile.quantize(torch.ones(2, 32))}, tmp_path / "w.pt")
    load = f"torch.load({str(tmp_path / 'w.pt')!r}, weights_only=True)"
    script = f"import torch; from mxcompile import MXTensor; print({load})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "MXTensor((2, 32)" in done.stdout, done.stderr


def test_tied_weights_stay_tied():
    stored, _ = stored_linear(64, 64)
    model = nn.Sequential(stored, nn.Linear(64, 64, bias=False, dtype=BF16))
    model[1].weight = stored.weight
    copied = copy.deepcopy(model).float().to("meta")
    assert copied[0].weight is copied[1].weight


@ALL_FORMATS
def test_fake_and_meta_mxtensors_have_shapes(how):
    w = mxcompile.quantize(bf16(6, 100), **how)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(w)
        assert isinstance(fake, MXTensor)
        assert (torch.ones(2, 100, dtype=BF16) @ fake.t()).shape == (2, 6)
    meta = mxcompile.quantize(torch.empty(4, 70, device="meta"), **how)
    assert meta.shape == (4, 70)
    assert meta.scale.shape == (4, 5 if "rounding" in how else 3)


@ALL_FORMATS
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_graphs_have_codes_and_scales(backend, how):
    stored, dense = stored_linear(how=how)
    x = torch.randn(3, 100, dtype=BF16)
    compiled = torch.compile(stored, backend=backend, fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(x), dense(x))


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch.export copies its own
@ALL_FORMATS
def test_exported_program_with_stored_weights_has_equal_outputs(how):
    stored, dense = stored_linear(how=how)
    x = torch.randn(3, 100, dtype=BF16)
    program = torch.export.export(stored, (x,))
    assert torch.equal(program.module()(x), dense(x))
    lowered = program.run_decompositions()
    assert any("mx.decode" in str(node.target) for node in lowered.graph.nodes)


def test_text_of_mxtensor_names_format_and_bytes():
    w = mxcompile.quantize(bf16(6, 100))
    assert str(w) == "MXTensor((6, 100), mxfp8 e4m3, block_dim=-1, dtype=torch.bfloat16)"
    assert w.stored_bytes == 6 * 100 + 6 * 4
    packed = mxcompile.quantize(bf16(6, 100), elem_dtype=E2M1)
    assert str(packed) == "MXTensor((6, 100), mxfp4 e2m1, block_dim=-1, dtype=torch.bfloat16)"
    assert packed.stored_bytes == 6 * 50 + 6 * 4
    packed = mxcompile.quantize(bf16(6, 100), **FORMATS["nvfp4"])
    assert str(packed) == "MXTensor((6, 100), nvfp4 e2m1, block_dim=-1, dtype=torch.bfloat16)"
    assert packed.stored_bytes == 6 * 50 + 6 * 7 + 4


def test_a_global_scale_of_one_number_stays_one():
    w = mxcompile.quantize(bf16(6, 100), **FORMATS["nvfp4"])
    stack = torch.stack([w, w])
    for result in (w[1:3], w.t(), w.view(2, 3, 100), w[torch.tensor([1])], w.split(2)[1], stack, stack[0]):
        assert result.global_scale.numel() == (2 if result is stack else 1)
        assert result.global_scale.ndim == result.ndim


def _nvfp4(**changes):
    w = mxcompile.quantize(bf16(6, 100), **FORMATS["nvfp4"])
    parts = {"qdata": w.qdata.view(E2M1), "scale": w.scale, "global_scale": w.global_scale}
    return MXTensor(**parts | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_scale": None}, "scale must be torch.float8_e8m0fnu without a global scale"),
        ({"scale": torch.ones(6, 7).to(torch.float8_e8m0fnu)}, "scale must be torch.float8_e4m3fn beside"),
        ({"scale": torch.ones(6, 4).to(torch.float8_e4m3fn)}, "in blocks of 1x16 along dimension -1 needs"),
        ({"global_scale": torch.ones(1, dtype=BF16)}, "global_scale must be torch.float32"),
        ({"global_scale": torch.ones(1, 7)}, "takes one number, or sizes of 1 or as in"),
        ({"global_scale": torch.ones(6)}, "takes one number, or sizes of 1 or as in"),
        ({"qdata": torch.ones(6, 100).to(torch.float8_e4m3fn)}, "rounding"),
    ],
)
def test_parts_of_nvfp4_that_do_not_belong_together(changes, message):
    with pytest.raises(FormatError, match=message):
        _nvfp4(**changes)
