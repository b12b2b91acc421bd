"""The code of one rank of a mesh: kernels of its shards, and what it sends between them."""

from __future__ import annotations

from collections import Counter

import meshed
import pytest

import mxcompile
from mxcompile.cli import main
from mxcompile.errors import OptionError


@pytest.mark.slow
def test_code_of_a_rank_is_that_of_its_shards():
    code = mxcompile.codegen(meshed.fsdp_sp, mesh="dp=64,tp=2", policy="bf16", target="sm_100")
    assert not code.problems
    rank = mxcompile.explain_rank(meshed.fsdp_sp, mesh="dp=64,tp=2", policy="bf16", target="sm_100")
    sizes = {(gemm.name, gemm.gemm): 2 * gemm.m * gemm.n * gemm.k for gemm in rank.report.gemms}
    products = [launch for launch in code.launches if launch.kind == "product"]
    assert len(products) == 2 * 7 * 3 + 3
    for launch in products:
        (name, gemm) = launch.gemms[0].split(" ")
        assert launch.flops == sizes[name, gemm]
    sends = Counter(
        launch.kernel.rpartition("._c10d_functional.")[2].partition(".")[0]
        for launch in code.launches
        if launch.kind == "collective"
    )
    in_graphs = Counter(c.kind for c in rank.collectives if c.what == "activations")
    assert sends["all_gather_into_tensor"] == in_graphs["all-gather"]
    assert sends["reduce_scatter_tensor"] == in_graphs["reduce-scatter"]
    assert all(launch.estimate is None for launch in code.launches if launch.kind == "collective")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"parallel": "fsdp"}, "give `mesh`"),
        ({"parallel": "fsdp", "mesh": "pp=2,dp=2"}, "leave the axis pp out"),
        ({"parallel": "fsdp", "mesh": "ep=2"}, "needs a mesh with the axis"),
    ],
)
def test_codegen_of_a_mesh_refuses_wrong_arguments(settings: dict[str, str], words: str):
    model, args, _ = meshed.plain()
    with pytest.raises(OptionError, match=words):
        mxcompile.codegen(model, *args, **settings)


def test_the_command_takes_no_sizes_for_a_factory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(meshed.__file__.rpartition("/")[0])
    assert main(["codegen", "meshed:fsdp", "--mesh", "dp=8", "--length", "64"]) != 0
    assert "leave out --length" in capsys.readouterr().err
