"""The table of private names is what the source uses, and what is installed has them."""

from __future__ import annotations

import re
import zipfile

import torch
from names_in_wheel import absent
from private_uses import uses

from mxcompile import private_names
from mxcompile.cli import main


def test_the_table_is_what_the_source_uses():
    assert {module: {*names} for module, names in private_names.USED.items()} == uses()


def test_the_installed_versions_have_them(capsys):
    assert private_names.missing() == []
    main(["env"])
    assert re.search(r"private names +all \d+ there", capsys.readouterr().out)


def test_what_is_missing_is_said(monkeypatch, capsys):
    monkeypatch.delattr(torch._inductor.utils, "triton_type")
    monkeypatch.setitem(private_names.USED, "torch._inductor.no_such_module", ("name",))
    lacking = ["torch._inductor.utils.triton_type", "torch._inductor.no_such_module.name"]
    assert private_names.missing() == lacking
    main(["env"])
    assert f"missing: {', '.join(lacking)}" in capsys.readouterr().out


def test_a_wheel_is_read(tmp_path):
    """Of what is in it: a name that is not defined is named, one that is only used is not taken for one."""
    wheel = tmp_path / "torch-9.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("torch/__init__.py", "")
        archive.writestr("torch/overrides.py", "def _pop_mode():\n    return _push_mode\n")
        archive.writestr(
            "torch/nn/utils/stateless.py", "try:\n    from x import _reparametrize_module\nfinally: 0"
        )
    found = absent(str(wheel))
    assert "torch.overrides._push_mode" in found
    assert "torch.overrides._pop_mode" not in found
    assert "torch.nn.utils.stateless._reparametrize_module" not in found
    assert not any(name.startswith("triton") for name in found)
