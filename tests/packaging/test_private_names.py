"""The private names that the source uses are found in it, and what is installed has them."""

from __future__ import annotations

import ast
import re
import zipfile

import pytest
import torch
from names_in_wheel import absent

from mxcompile import private_names
from mxcompile.cli import main

SOURCE = """
import torch
from torch._inductor import config, ir as nodes
from torch.overrides import _pop_mode, is_tensor_like

class Kernel(nodes.Kernel):
    def render(self):
        return super().render()

    def own(self):
        return super().other()

class Module(torch.nn.Module):
    def train(self):
        return super().train()

torch._dynamo.reset()
config.max_autotune, config._pre_fusion_custom_pass, nodes.TensorBox
torch.nn.Module.__init__, torch.compiler._is_compiling_flag.get
"""


def test_names_are_read_from_source():
    assert set(private_names.uses_of(ast.parse(SOURCE))) == {
        ("torch", "_dynamo"),
        ("torch", "compiler._is_compiling_flag"),
        ("torch._inductor", "config"),
        ("torch._inductor", "config._pre_fusion_custom_pass"),
        ("torch._inductor", "ir"),
        ("torch._inductor", "ir.Kernel.render"),
        ("torch.overrides", "_pop_mode"),
    }


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch._inductor.select_algorithm", "TritonTemplate"),  # of lowering/
        ("torch._subclasses.fake_tensor", "FakeTensor"),
        ("triton.runtime", "_allocation"),
        ("torch._inductor.select_algorithm", "TritonTemplateKernel.render"),
    ],
)
def test_all_rooms_are_read(module: str, name: str):
    assert name in private_names.used()[module]


def test_the_installed_versions_have_them(capsys):
    assert private_names.missing() == []
    main(["env"])
    assert re.search(r"private names .* all \d+ found", capsys.readouterr().out)


def test_missing_private_names_are_listed_by_env(monkeypatch, capsys):
    """Names of modules, modules, and methods that a class of ours overrides."""
    monkeypatch.delattr(torch._inductor.utils, "triton_type")
    monkeypatch.delattr(torch._inductor.select_algorithm.TritonTemplateKernel, "render")
    names = {**private_names.used(), "torch._inductor.no_such_module": ("name",)}
    monkeypatch.setattr(private_names, "used", lambda: names)
    lacking = [
        "torch._inductor.select_algorithm.TritonTemplateKernel.render",
        "torch._inductor.utils.triton_type",
        "torch._inductor.no_such_module.name",
    ]
    assert private_names.missing() == lacking
    main(["env"])
    assert f"missing: {', '.join(lacking)}" in capsys.readouterr().out


def test_a_name_that_is_imported_under_a_try_is_not_needed():
    source = "from torch._inductor import {}"
    first, other = source.format("old"), source.format("new as old")
    tree = ast.parse(f"try:\n    {first}\nexcept ImportError:\n    {other}")
    assert list(private_names.uses_of(tree)) == [("torch._inductor", "new")]


def test_a_wheel_is_read(tmp_path):
    """Of what is in it: a name that is not defined is named, one that is only used is not taken for one."""
    wheel = tmp_path / "torch-9.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("torch/__init__.py", "")
        archive.writestr("torch/overrides.py", "def _pop_mode():\n    return _push_mode\n")
        archive.writestr(
            "torch/nn/utils/stateless.py", "try:\n    from x import _reparametrize_module\nfinally: 0"
        )
    names = absent(str(wheel))
    assert "torch.overrides._push_mode" in names
    assert "torch.overrides._pop_mode" not in names
    assert "torch.nn.utils.stateless._reparametrize_module" not in names
    assert not any(name.startswith("triton") for name in names)
