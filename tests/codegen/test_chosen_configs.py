"""Of a kernel's configurations that of the least estimate is taken, where a machine would time them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from generating import generate
from helpers.written import Written

from mxcompile.lowering.targets import TARGETS
from mxcompile.offline import binary
from mxcompile.offline.binary import Binary


@pytest.fixture
def compiled(monkeypatch):
    """Function of configurations, each (its time, whether it lacks resources) → the binary that is taken."""

    def compile_all(*configs):
        def compiled_as(name, tuner, config, target):
            too_large = config.kwargs["lacks"] and config.kwargs["NUM_STAGES"] > 1
            return Binary(settings=config.kwargs, problems=("too large",) if too_large else ())

        settings = [{"time": time, "lacks": lacks, "NUM_STAGES": 2} for time, lacks in configs]
        tuner = SimpleNamespace(
            configs=[SimpleNamespace(num_stages=1, kwargs=setting) for setting in settings]
        )
        monkeypatch.setattr(binary.PyCodeCache, "load", lambda source: SimpleNamespace(kernel=tuner))
        monkeypatch.setattr(binary, "_compiled", compiled_as)
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


def test_blocks_are_not_reduced_one_a_program():
    """Largest magnitudes of blocks of 32, which Inductor times four ways."""
    blocks = Written(lambda _, x: (x.view(-1, 128, 32).abs().amax(-1) + 1).log2().floor())
    result = generate(blocks, (4096, 4096), policy="bf16")
    (launch,) = result.launches
    assert result.kernel(launch).binary.num_configs > 1
    assert launch.estimate.us <= 2 * launch.estimate.memory_us + launch.estimate.launch_us
