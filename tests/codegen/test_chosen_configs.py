"""Of a kernel's configurations that of the least estimate is taken, where a machine would time them."""

from __future__ import annotations

import pytest
import torch

import mxcompile
from mxcompile.lowering.targets import TARGETS
from mxcompile.offline import binary
from mxcompile.offline.binary import Binary


class _Config:
    num_stages = 1

    def __init__(self, **kwargs) -> None:
        self.kwargs = kwargs


class _Tuner:
    def __init__(self, *configs) -> None:
        self.configs = configs


@pytest.fixture
def compiled(monkeypatch):
    """Function of configurations, each (its time, whether it lacks resources) → the binary that is taken."""

    def compile_all(*configs):
        tuner = _Tuner(*(_Config(time=time, lacks=lacks, NUM_STAGES=2) for time, lacks in configs))
        monkeypatch.setattr(binary.PyCodeCache, "load", lambda source: type("Module", (), {"kernel": tuner}))
        monkeypatch.setattr(
            binary,
            "_compiled",
            lambda name, tuner, config, target: Binary(
                settings=config.kwargs,
                problems=("too large",) if config.kwargs["lacks"] and config.kwargs["NUM_STAGES"] > 1 else (),
            ),
        )
        return binary.cross_compile("kernel", "", TARGETS["sm_100"], lambda program: program.settings["time"])

    return compile_all


@pytest.mark.parametrize(
    ("configs", "time", "stages"),
    [
        ([(5, False), (2, False), (3, False)], 2, 2),
        ([(5, False), (2, True)], 5, 2),
        ([(5, True), (2, True)], 2, 1),  # the last, its loads not pipelined
    ],
)
def test_the_least_time_of_those_that_fit(compiled, configs, time, stages):
    chosen = compiled(*configs)
    assert (chosen.settings["time"], chosen.settings["NUM_STAGES"]) == (time, stages)
    assert not chosen.problems


class Blocks(torch.nn.Module):
    """Largest magnitudes of blocks of 32, which Inductor times four ways."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.view(-1, 128, 32).abs().amax(-1) + 1).log2().floor()


def test_blocks_are_not_reduced_one_a_program():
    x = torch.empty(4096, 4096, device="meta", dtype=torch.bfloat16)
    result = mxcompile.codegen(Blocks(), x, target="sm_100", training=False, policy="bf16")
    (launch,) = result.launches
    assert result.kernel(launch).binary.num_configs > 1
    assert launch.estimate.us <= 2 * launch.estimate.memory_us + launch.estimate.launch_us
