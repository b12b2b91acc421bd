"""torch.export of a compiled module: an error, and the way it names works."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mxcompile
from mxcompile.errors import ModelError


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))


def compiled_in_place() -> nn.Module:
    compiled = model()
    compiled.compile(backend="mxfp8")
    return compiled


COMPILED = {
    "by name": lambda: torch.compile(model(), backend="mxfp8"),
    "with options": lambda: torch.compile(model(), backend="mxfp8", options={"policy": "ocp"}),
    "by a Backend": lambda: torch.compile(model(), backend=mxcompile.Backend(policy="ocp")),
    "in place": compiled_in_place,
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("how", COMPILED)
def test_exporting_a_compiled_module_raises_error_with_remedy(how: str, strict: bool):
    compiled = COMPILED[how]()
    with pytest.raises(ModelError, match=r"drops the quantization of the model.*exported\.module\(\)"):
        torch.export.export(compiled, (torch.randn(4, 64),), strict=strict)


def test_a_compiled_part_is_found_by_its_path():
    whole = nn.Sequential(nn.Linear(64, 64), compiled_in_place())
    with pytest.raises(ModelError, match="drops the quantization of 1, "):
        torch.export.export(whole, (torch.randn(4, 64),))


def test_other_modules_are_exported_as_ever():
    import mxcompile.compiler.backend  # noqa: F401 - what a compile imports

    x = torch.randn(4, 64)
    other = torch.compile(model(), backend="aot_eager")
    for module in (model(), other):
        torch.testing.assert_close(torch.export.export(module, (x,)).module()(x), module(x))


def test_exported_module_compiles_to_the_same_result():
    x = torch.randn(4, 64)
    exported = torch.export.export(model(), (x,))
    with torch.no_grad():
        y = torch.compile(exported.module(), backend="mxfp8")(x)
        expected = torch.compile(model(), backend="mxfp8")(x)
    assert torch.equal(y, expected)
    after, before = ({(g.name, g.role, g.precision) for g in r.gemms} for r in mxcompile.reports())
    assert after == before == {("0", "ffn_in", "mxfp8"), ("2", "ffn_out", "mxfp8")}
