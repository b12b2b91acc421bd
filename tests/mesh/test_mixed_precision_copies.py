"""Copies of models in FSDP with mixed precision: dtypes of the gathers, casts of inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from helpers.made import Made
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import mxcompile
from mxcompile.models.fake_copy import fake_copy
from mxcompile.ranks.shape import MeshShape, fake_ranks

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def ranks() -> Iterator[None]:
    with fake_ranks(MeshShape.parse("dp=2")):
        yield


class Block(Made, up=(64, 128), down=(128, 64)):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64), Block(), Block(), nn.Linear(64, 32))


def fsdp2(**dtypes: torch.dtype | bool) -> nn.Module:
    model = build()
    for block in model[1:3]:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(**dtypes))
    return fully_shard(model, mp_policy=MixedPrecisionPolicy(**dtypes))


def partly_gathered() -> nn.Module:
    """FSDP2 keeps the root's parameters after a forward, in the dtype of the gather."""
    model = fsdp2(param_dtype=BF16)
    model(torch.randn(4, 32))
    assert {parameter.dtype for parameter in model.parameters()} == {BF16, FP32}
    return model


def fsdp1(**dtypes: torch.dtype | bool) -> nn.Module:
    return FullyShardedDataParallel(
        build(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        mixed_precision=MixedPrecision(**dtypes),
        use_orig_params=True,
    )


@pytest.mark.parametrize(
    ("wrap", "parameters", "result"),
    [
        (partial(fsdp2, param_dtype=BF16), BF16, BF16),
        (partial(fsdp2, param_dtype=BF16, output_dtype=FP32), BF16, FP32),
        (partial(fsdp2, output_dtype=BF16), FP32, BF16),
        (fsdp2, FP32, FP32),
        (partly_gathered, BF16, BF16),
        (partial(fsdp1, param_dtype=BF16), BF16, BF16),
        (fsdp1, FP32, FP32),
    ],
    ids=["fsdp2", "output", "output_alone", "no_mixing", "partly_gathered", "fsdp1", "fsdp1_no_mixing"],
)
def test_a_copy_computes_in_the_dtypes_of_the_gathers(
    wrap: Callable[[], nn.Module], parameters: torch.dtype, result: torch.dtype
):
    model = wrap()
    before = [parameter.dtype for parameter in model.parameters()]
    mode = FakeTensorMode()
    copied = fake_copy(model, mode)
    assert {parameter.dtype for parameter in copied.parameters()} == {parameters}
    with mode:
        assert copied(torch.empty(4, 32)).dtype == result
    assert [parameter.dtype for parameter in model.parameters()] == before


@pytest.mark.parametrize(
    "kept", [partial(fsdp2, param_dtype=BF16), partly_gathered], ids=["fresh", "after_a_call"]
)
def test_reasons_of_explain_do_not_depend_on_gathered_parameters(kept: Callable[[], nn.Module]):
    report = mxcompile.explain(kept(), torch.randn(4, 32))
    reasons = {(record.name, record.reason) for record in report.gemms}
    plain = mxcompile.explain(build().bfloat16(), torch.randn(4, 32, dtype=BF16))
    assert reasons == {(record.name, record.reason) for record in plain.gemms}
    assert any(record.precision == "mxfp8" for record in report.gemms)


def test_inputs_keep_their_dtype_if_fsdp_does_not_cast_them():
    mode = FakeTensorMode()
    copied = fake_copy(fsdp2(param_dtype=BF16, cast_forward_inputs=False), mode)
    dtypes: list[torch.dtype] = []
    copied[0].register_forward_pre_hook(lambda _, args: dtypes.extend(value.dtype for value in args))
    with mode:
        copied(torch.empty(4, 32, dtype=FP32))
    assert dtypes == [FP32]
