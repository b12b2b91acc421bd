"""Values of nodes that are made without a fake call are those that the call would give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mxcompile.graph.build import Builder

aten, prims = torch.ops.aten, torch.ops.prims

HEADS = torch.empty(2, 3, 4, 6).transpose(1, 2)
ONE_HEAD = torch.empty(2, 3, 1, 6).transpose(1, 2)

CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "permute": (aten.permute.default, (torch.empty(4, 6), [1, 0])),
    "permute of a view": (aten.permute.default, (torch.empty(3, 4, 6)[1:, :, ::2], [0, 2, 1])),
    "mm": (aten.mm.default, (torch.empty(4, 6).bfloat16(), torch.empty(6, 5).bfloat16())),
    "mm of transposes": (aten.mm.default, (torch.empty(6, 4).t(), torch.empty(5, 6).t())),
    "convert": (prims.convert_element_type.default, (torch.empty(4, 6), torch.bfloat16)),
    "convert a transpose": (prims.convert_element_type.default, (torch.empty(4, 6).t(), torch.float16)),
    "convert heads": (prims.convert_element_type.default, (HEADS, torch.half)),
    "convert one head": (prims.convert_element_type.default, (ONE_HEAD, torch.half)),
    "convert a part": (prims.convert_element_type.default, (torch.empty(4, 6)[:, ::2], torch.bfloat16)),
    "add": (aten.add.Tensor, (torch.empty(4, 6), torch.empty(6))),
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", CALLS)
def test_values_are_those_of_the_call(name: str, device: str):
    target, args = CALLS[name]
    mode = FakeTensorMode()
    graph = fx.Graph()
    arguments: list[Any] = []
    for index, arg in enumerate(args):
        if isinstance(arg, Tensor):
            node = graph.placeholder(f"x{index}")
            whole = arg if arg._base is None else arg._base
            meta = whole.to("meta").as_strided(arg.shape, arg.stride(), arg.storage_offset())
            converter = mode.fake_tensor_converter
            node.meta["val"] = converter.from_meta_and_device(mode, meta, torch.device(device))
            arguments.append(node)
        else:
            arguments.append(arg)
    result = Builder(graph, "test").call(target, *arguments, like=arguments[0]).meta["val"]
    values = [node.meta["val"] if isinstance(node, fx.Node) else node for node in arguments]
    with mode:
        expected = target(*values)
    assert type(result) is type(expected)
    properties, right = (
        (x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, x.fake_mode) for x in (result, expected)
    )
    assert properties == right
    shares = [value.untyped_storage()._cdata for value in values if isinstance(value, Tensor)]
    assert (result.untyped_storage()._cdata in shares) == (expected.untyped_storage()._cdata in shares)
