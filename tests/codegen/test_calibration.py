"""Estimates beside published times: how many are met, which classes are known to be worse, and the page."""

from __future__ import annotations

import pytest

from mxcompile.lowering.targets import TARGETS
from mxcompile.offline import Work
from mxcompile.offline.training import LayerWork


@pytest.fixture
def calibration(benchmark):
    return benchmark("calibration")


def test_four_of_five_points_are_met(calibration):
    points = calibration.points()
    assert len(points) >= 55
    near = sum(point.is_near for point in points)
    assert near >= 0.8 * len(points), f"{near} of {len(points)}"


def test_points_far_from_estimates_are_of_known_bad_kinds(calibration):
    missed = [point for point in calibration.points() if not point.is_near]
    unknown = [point for point in missed if point.kind not in calibration.KNOWN_BAD]
    assert not unknown, [(point.kernel, point.chip, point.shape, round(point.ratio, 2)) for point in unknown]


def test_the_page_names_every_known_class(calibration):
    page = calibration.PAGE.read_text(encoding="utf-8")
    for kind in calibration.KNOWN_BAD:
        assert f"- **{kind}**" in page


def test_calibration_ratio_equals_bytes_over_bandwidth(calibration):
    """By bytes alone, on a chip that is a variant of its target's."""
    (point,) = [point for point in calibration.points() if point.source == "triton #11644"]
    us = 32768**2 * (3 + 1 / 32) / (0.89 * 3350e3) + 3
    assert point.estimate_us == pytest.approx(us, rel=1e-4)
    assert point.ratio == pytest.approx(1281 / us, rel=1e-4)


@pytest.fixture
def whole_steps(benchmark):
    return benchmark("whole_steps")


def test_published_steps_lie_in_their_ranges(whole_steps):
    rows = whole_steps.predicted.newest(whole_steps.predicted.TOKENS)
    for run in whole_steps.RUNS:
        theirs = whole_steps.estimates(run, rows).theirs
        assert theirs.low - 0.005 <= run.measured <= theirs.high + 0.005, (run.name, theirs)


def test_the_casts_of_a_library_by_hand(whole_steps):
    """Products that read the same tensor share its cast; a published time stays what it is."""
    graph, rates = whole_steps.GRAPHS["torchao, NVFP4"], whole_steps.Rates.for_target(TARGETS["sm_100"])
    empty = LayerWork(forward=(("product", Work(mma_us=1.0, product="bf16")),) * 3, backward=())
    layer = whole_steps.graph_layer(empty, graph, 1000, rates)
    casts = [work.estimate(rates).us - rates["launch_us"] for kind, work in layer.forward if kind == "cast"]
    assert casts[:2] == pytest.approx([4.096 * 0.73, 4.096 * 1.94])
    assert len(casts) == 2 * 4 + 2 * 7, "inputs and weights"
    assert len(layer.backward) == 2 * 7, "gradients"
    assert [kind for kind, _ in layer.recomputed].count("product") == 2, "all but the last"
    assert casts[-1] == pytest.approx(4096 * 14336 / 1e6 * 4.24)


@pytest.mark.slow
def test_a_kernel_compiles_to_the_work_that_is_kept(calibration, benchmark):
    """One of each way: a row a program, a tile of FP4, and rows one after the other.

    Within what another Triton may change: other versions issue a few percent more or fewer instructions.
    """
    kernels = benchmark("calibration_kernels")
    kept = {(point.kernel, point.chip, point.shape): point for point in calibration.points()}
    forward = kernels.by_rows(kernels.rms_norm, 2048, 16384, element="bf16", operands=2)
    (work,) = kept["rms_norm forward", "A100", "2048×16384"].plus
    assert forward.work(calibration.chip("A100")).as_data() == pytest.approx(work.as_data(), rel=0.05)
    (work,) = kept["NVFP4 cast along rows", "B200", "16384²"].plus
    cast = kernels.cast_to_nvfp4(16384).work(calibration.chip("B200"))
    assert cast.as_data() == pytest.approx(work.as_data(), rel=0.05)
    target = calibration.chip("A100")
    backward = kernels.looping(
        kernels.rms_norm_backward, 2048, 16384, target.processors, element="bf16", sums=1
    )
    (work,) = kept["rms_norm backward, difference", "A100", "2048×(16384 − 8192)"].plus
    assert backward.work(target).as_data() == pytest.approx(work.as_data(), rel=0.05)
