"""Weights that travel in MXFP8, by themselves: casts of shards, types, states, what is refused."""

from __future__ import annotations

import copy
import io
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import weight_ranks as model_of
from helpers.casts import quantize
from helpers.eager_backend import EagerBackend
from helpers.made import Made
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

import mxcompile
from mxcompile import ops
from mxcompile.compiler.capture.capture import Gathers, gathers_of
from mxcompile.distributed.gathers import register_state_hooks
from mxcompile.distributed.tensors import MasterWeight, TileCast, TiledWeight
from mxcompile.errors import FormatError, ModelError, OptionError, PolicyError
from mxcompile.formats import Format, elem_type
from mxcompile.formats.encoding import decode_tensors
from mxcompile.models.names import GraphInput

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
IDS = (torch.zeros(2, 8, dtype=torch.long),)
MIXED = SimpleNamespace(param_dtype=torch.bfloat16)


def cast(elem: torch.dtype = E4M3, rounding: str = "rceil") -> TileCast:
    return TileCast(name="w", elem_dtype=elem, rounding=rounding)


def spread(*shape: int) -> Tensor:
    """Values whose blocks have scales of their own."""
    return torch.randn(shape) * torch.exp2(torch.randint(-20, 20, shape).float())


def mesh(ranks: int) -> Any:
    return SimpleNamespace(shape=(ranks,), size=lambda: ranks)


@pytest.mark.parametrize("shape", [(64, 96), (96, 40), (70, 33), (3, 40, 64), (32, 1)])
@pytest.mark.parametrize(("elem", "rounding"), [(E4M3, "rceil"), (E5M2, "floor"), (E4M3, "even")])
def test_tiles_are_those_of_the_operator(shape: tuple[int, ...], elem: torch.dtype, rounding: str):
    x = spread(*shape)
    x[..., 5, 0] = float("inf")
    qdata, scale = cast(elem, rounding)(x)
    codes, repeated = quantize(x, -1, elem, rounding, True)
    assert torch.equal(qdata.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(scale, repeated[..., ::32, :])
    values = ops.decode(qdata, scale, -1, f"{elem_type(elem)} 32x32 {rounding}", torch.float32)
    assert torch.equal(
        values.nan_to_num(-1), decode_tensors(codes, repeated, -1, Format(), torch.float32).nan_to_num(-1)
    )


def test_large_weights_are_cast_in_pieces(monkeypatch: pytest.MonkeyPatch):
    x = spread(160, 64)
    whole = cast()(x)
    monkeypatch.setattr("mxcompile.distributed.tensors._CHUNK", 64 * 64)
    assert all(
        map(torch.equal, (t.view(torch.uint8) for t in whole), (t.view(torch.uint8) for t in cast()(x)))
    )


def test_shards_are_cast_like_the_whole():
    x = spread(128, 80)
    parts = [
        MasterWeight(part, cast()).fsdp_pre_all_gather(mesh(4), x.shape, x.stride(), None, MIXED)[0]
        for part in x.chunk(4)
    ]
    sent = [torch.cat([part[index].view(torch.uint8) for part in parts]) for index in (0, 1)]
    qdata, scale = cast()(x.bfloat16())
    assert torch.equal(sent[0], qdata.view(torch.uint8))
    assert torch.equal(sent[1], scale)
    assert sum(part.numel() for part in sent) <= 0.53 * 2 * x.numel()


def test_on_one_rank_codes_and_scales_are_one_tensor():
    """FSDP2 takes but one there."""
    x = spread(70, 96)
    w = MasterWeight(x, cast())
    sent, metadata = w.fsdp_pre_all_gather(mesh(1), x.shape, x.stride(), None, MIXED)
    (buffer,) = sent
    gathered, inner = w.fsdp_post_all_gather((buffer.view(-1).clone(),), metadata, torch.bfloat16)
    qdata, scale = cast()(x.bfloat16())
    assert torch.equal(gathered + 0, ops.decode(qdata, scale, -1, "e4m3 32x32 rceil", torch.bfloat16))
    assert inner == ()


@pytest.mark.parametrize(
    ("ranks", "shard", "message"),
    [
        (2, (48, 64), "48 of its 96 rows on each of 2 ranks are not a multiple of 32"),
        (5, (20, 64), "its 96 rows do not come in equal shards on 5 ranks"),
        (3, (96, 22), "a rank has a shard of 96×22, not 32×64"),
    ],
)
def test_gather_of_shards_that_cut_tiles_raises(ranks: int, shard: tuple[int, int], message: str):
    with pytest.raises(ModelError, match=message):
        MasterWeight(torch.zeros(shard), cast()).fsdp_pre_all_gather(
            mesh(ranks), torch.Size((96, 64)), (64, 1), None, MIXED
        )


def test_master_weight_operates_like_its_plain_tensor():
    p = nn.Parameter(MasterWeight(torch.randn(64, 32), cast()))
    x = torch.randn(4, 32)
    torch.nn.functional.linear(x, p).sum().backward()
    assert type(p.grad) is Tensor
    assert torch.equal(p.grad, x.sum(0).expand(64, 32))
    for optimizer in (torch.optim.AdamW([p], foreach=True), torch.optim.SGD([p], lr=0.1, momentum=0.9)):
        before = p.detach().clone()
        optimizer.step()
        assert not torch.equal(p, before)
        assert {type(m) for s in optimizer.state.values() for m in s.values()} <= {Tensor}
    assert type(p + 1) is Tensor
    assert isinstance(p.to(torch.bfloat16), MasterWeight)
    assert isinstance(nn.Parameter(p.detach()), MasterWeight)
    copied = copy.deepcopy(p)
    assert isinstance(copied, MasterWeight)
    assert isinstance(copied, nn.Parameter)
    nn.init.zeros_(p)
    assert not p.any()
    assert copied.any()


def test_tiles_answer_with_their_values():
    x = spread(64, 96).bfloat16()
    values = decode_tensors(*quantize(x, -1, E4M3, "rceil", True), -1, Format(), torch.bfloat16)
    w = nn.Parameter(TiledWeight(*cast()(x), "rceil", torch.bfloat16))
    y = torch.randn(5, 96).bfloat16().requires_grad_()
    out = torch.nn.functional.linear(y, w)
    out.sum().backward()
    assert torch.equal(out, torch.nn.functional.linear(y, values))
    assert torch.equal(y.grad, torch.ones_like(out) @ values)
    assert torch.equal(w.grad, torch.ones_like(out).t() @ y)
    with pytest.raises(FormatError, match="gathered in MXFP8; change its shards"):
        w.detach().zero_()


def test_only_weights_with_aligned_shards_are_gathered_in_mxfp8():
    model = model_of.build()
    result = mxcompile.quantize_gathers_(model, model_of.POLICY, mesh=mesh(4), args=IDS)
    weights = {weight.name: weight for weight in result.weights}
    assert {name for name, weight in weights.items() if weight.travels} == {
        f"blocks.0.{name}.weight" for name in ("q", "o", "gate", "up", "down")
    }
    assert weights["head.weight"].reason == "role head"
    assert (
        weights["blocks.0.k.weight"].reason == "16 of its 64 rows on each of 4 ranks are not a multiple of 32"
    )
    assert isinstance(model.blocks[0].q.weight, MasterWeight)
    assert model.blocks[0].gate.weight.cast == cast_of(model, "gate", E5M2, "rceil")
    assert model.blocks[0].down.weight.cast == cast_of(model, "down", E4M3, "floor")
    assert not isinstance(model.embed.weight, MasterWeight)
    assert result.num_bytes <= 0.53 * result.bytes_bf16
    assert "5 of 8 weights are gathered in MXFP8" in str(result)


def cast_of(_: nn.Module, name: str, elem: torch.dtype, rounding: str) -> TileCast:
    return TileCast(name=f"blocks.0.{name}.weight", elem_dtype=elem, rounding=rounding)


def test_weights_inside_wrappers_of_blocks_travel_too():
    model, plain = model_of.build(), model_of.gather(model_of.build(), mesh=mesh(1))
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    assert model_of.gather(model, mesh=mesh(1)) == plain
    assert isinstance(model.blocks[0]._checkpoint_wrapped_module.up.weight, MasterWeight)


def test_weights_that_something_else_reads_stay():
    model = model_of.build()

    class Penalised(Made, model=lambda: model):
        def forward(self, ids: Tensor) -> Tensor:
            return self.model(ids) + self.model.blocks[0].up.weight.square().sum()

    result = mxcompile.quantize_gathers_(Penalised(), model_of.POLICY, mesh=mesh(2), args=IDS)
    reasons = {weight.name: weight.reason for weight in result.weights if not weight.travels}
    assert reasons.pop("model.head.weight") == "role head"
    assert set(reasons) == {"model.blocks.0.up.weight"}
    assert "reads it too" in reasons["model.blocks.0.up.weight"]


def test_policy_without_square_blocks_raises_error_naming_weight_block():
    with pytest.raises(ModelError, match=r"weight_block: 32x32"):
        mxcompile.quantize_gathers_(model_of.build(), "nvidia", mesh=mesh(2), args=IDS)


def test_a_dgrad_in_bf16_needs_the_weight():
    use = {"fprop": "mxfp8", "dgrad": "bf16", "wgrad": "mxfp8", "weight_block": "32x32"}
    policy = {"version": 1, "rules": [{"match": {"name": "*.up"}, "use": use}, *model_of.POLICY["rules"]]}
    result = mxcompile.quantize_gathers_(model_of.build(), policy, mesh=mesh(2), args=IDS)
    (up,) = (weight for weight in result.weights if weight.name.endswith("up.weight"))
    assert not up.travels
    assert "reads it too" in up.reason


def test_quantize_gathers_without_mesh_raises():
    with pytest.raises(OptionError, match="mesh"):
        mxcompile.quantize_gathers_(model_of.build(), model_of.POLICY, args=IDS)


def wrapped() -> model_of.Model:
    """The model with one weight that travels, by hand."""
    model = model_of.build()
    q = model.blocks[0].q
    q.weight = nn.Parameter(MasterWeight(q.weight.detach(), cast()))
    register_state_hooks(q)
    return model


def test_state_dict_of_master_weights_has_plain_tensors():
    model = wrapped()
    expected = model_of.build().state_dict()
    state = model.state_dict()
    assert {type(value) for value in state.values()} == {Tensor}
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    state["blocks.0.q.weight"].zero_()  # as of any model: the same memory
    assert not model.blocks[0].q.weight.any()
    model.load_state_dict(expected)
    assert torch.equal(model.state_dict()["blocks.0.q.weight"], expected["blocks.0.q.weight"])
    model.load_state_dict({name: value + 1 for name, value in expected.items()}, assign=True)
    assert isinstance(model.blocks[0].q.weight, MasterWeight)
    assert torch.equal(model.blocks[0].q.weight.detach(), expected["blocks.0.q.weight"] + 1)


def test_pickled_master_weight_is_a_plain_parameter():
    weight = wrapped().blocks[0].q.weight
    for value in (weight, weight.detach()):
        data = pickle.dumps(value)
        assert b"mxcompile" not in data
        restored = pickle.loads(data)
        assert isinstance(restored, nn.Parameter) == isinstance(value, nn.Parameter)
        assert not isinstance(restored, MasterWeight)
        assert torch.equal(restored, weight)
    file = io.BytesIO()
    torch.save({"w": weight.detach()}, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True)["w"], weight)


def test_another_policy_at_compile_time_is_an_error():
    x = spread(64, 96).bfloat16()
    layer = nn.Linear(96, 64, bias=False, dtype=torch.bfloat16)
    layer.weight = nn.Parameter(TiledWeight(*cast()(x), "rceil", torch.bfloat16))
    rows = {"version": 1, "rules": [{"match": {"name": "*"}, "use": "mxfp8"}]}
    with pytest.raises(Exception, match="give quantize_gathers_ the policy of this compile") as error:
        torch.compile(layer, backend=EagerBackend(policy=rows))(torch.randn(4, 96).bfloat16())
    assert isinstance(getattr(error.value, "inner_exception", error.value), PolicyError)


def test_gathers_of_modules_that_share_a_state_of_two_groups_count_once():
    """Also below a wrapper of checkpointing, whose path is not the user's."""
    layers = nn.Sequential(*(checkpoint_wrapper(nn.Linear(32, 32, bias=False)) for _ in range(2)))
    parameters = [
        SimpleNamespace(
            _module_info=SimpleNamespace(module=wrapper._checkpoint_wrapped_module, param_name="weight"),
            all_gather_outputs=[torch.empty(32 * 32, dtype=torch.bfloat16)],
            param_dtype=torch.bfloat16,
            padded_sharded_param_size=torch.Size((16, 32)),
        )
        for wrapper in layers
    ]
    mesh = SimpleNamespace(shard_mesh_size=2)
    state = FSDPState()  # a state with several groups, as `shard_placement_fn` makes them
    state._modules = (*layers,)
    state._fsdp_param_groups = [
        SimpleNamespace(fsdp_params=[entry], mesh_info=mesh, post_forward_mesh_info=mesh, _module_fqn="")
        for entry in parameters
    ]
    for layer in layers:
        layer._get_fsdp_state = lambda: state
    inputs = [GraphInput(path=f"{index}.weight", static=True) for index in range(2)]
    num_bytes = 2 * 16 * 32 * 2
    assert gathers_of(layers, inputs) == Gathers(
        forward=num_bytes, forward_without=num_bytes, backward=num_bytes, backward_without=num_bytes
    )


def test_states_that_fsdp_keeps_otherwise_are_not_counted(caplog: pytest.LogCaptureFixture):
    """A figure of the report is no reason to fail."""
    layer = nn.Linear(32, 32)
    layer._get_fsdp_state = lambda: SimpleNamespace(_fsdp_param_groups=[SimpleNamespace()])  # type: ignore[assignment]
    assert gathers_of(layer, []) == Gathers()
    assert "reports do not count the bytes that FSDP2" in caplog.text
