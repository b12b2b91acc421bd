"""Times of collectives on the links of a mesh: which link, how many bytes, how many steps."""

from __future__ import annotations

import pytest

from mxcompile.errors import OptionError
from mxcompile.lowering.targets import TARGETS
from mxcompile.mesh import Collective
from mxcompile.mesh.links import Links
from mxcompile.offline.rates import Range, Rates

LINKS = Links.parse("nvlink=900,net=50")
RATES = LINKS.rates(Rates.for_target(TARGETS["sm_100"]))
LARGE = 10**10


def collective(kind: str, ranks: int, stride: int = 1) -> Collective:
    return Collective(
        kind=kind,
        what="weights",
        name="layers.0",
        dtype="bfloat16",
        num_bytes=LARGE,
        without_bytes=LARGE,
        axis="dp",
        ranks=ranks,
        stride=stride,
        phase="forward",
    )


@pytest.mark.parametrize(
    ("ranks", "stride", "node", "link", "near"),
    [
        (8, 1, 8, "nvlink", 8),
        (16, 1, 8, "net", 8),
        (128, 8, 8, "net", 1),
        (2, 4, 8, "nvlink", 2),
        (4, 4, 8, "net", 2),
        (64, 1, 72, "nvlink", 64),
        (2, 8, 4, "net", 1),
    ],
)
def test_link_of_collective_follows_from_rank_order(ranks: int, stride: int, node: int, link: str, near: int):
    links = Links(nvlink=900, net=50, node=node)
    gather = collective("all-gather", ranks, stride)
    assert (links.link(gather), links.in_node(gather)) == (link, near)


@pytest.mark.parametrize(
    ("kind", "leaves"),
    [("all-gather", 7.0), ("reduce-scatter", 7 / 8), ("all-reduce", 14 / 8), ("all-to-all", 7 / 8)],
)
def test_large_ones_take_their_bytes(kind: str, leaves: float):
    us = LARGE * leaves / (900e3 * RATES["nvlink_all_reduce" if kind == "all-reduce" else "nvlink"])
    assert LINKS.us(collective(kind, 8), LARGE, RATES) == pytest.approx(us, rel=0.01)


def test_a_ring_uses_the_ports_of_all_its_ranks_in_a_node():
    alone = LINKS.us(collective("all-gather", 16, 8), LARGE, RATES)
    assert alone / LINKS.us(collective("all-gather", 16, 1), LARGE, RATES) == pytest.approx(8, rel=0.01)
    assert alone == pytest.approx(15 * LARGE / (50e3 * RATES["net"]), rel=0.01)


def test_few_bytes_wait_for_steps():
    """127 steps between nodes, the fastest of which take 2.7 µs; a tree of 128 nodes has 14."""
    assert LINKS.us(collective("all-gather", 128, 8), 1, RATES) == pytest.approx(6.6 + 127 * 2.7, rel=0.01)
    assert LINKS.us(collective("all-reduce", 128, 8), 1, RATES) == pytest.approx(6.6 + 14 * 2.7, rel=0.01)


def test_the_range_is_of_the_links_rates():
    gather = collective("all-gather", 16, 8)
    span = Range.from_rates(lambda rates: LINKS.us(gather, LARGE, rates), RATES)
    assert span.low == pytest.approx(span.centre * 0.85 / 0.95, rel=0.01)
    assert span.high == pytest.approx(span.centre * 0.85 / 0.50, rel=0.01)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nvlink", "expected names with speeds"),
        ("nvlink=900;net=50", "expected names with speeds"),
        ("infiniband=50", "unknown link 'infiniband'"),
        ("net=50,net=60", "net twice"),
        ("net=0", "must be above 0"),
        (900, "expected names with speeds"),
    ],
)
def test_links_refuse_text_that_does_not_parse(text: str, words: str):
    with pytest.raises(OptionError, match=words):
        Links.parse(text)


def test_a_missing_link_is_named():
    with pytest.raises(OptionError, match=r"dp \(16\) send between nodes of 8 GPUs: give the speed of net"):
        Links.parse("nvlink=900").check(collective("all-gather", 16))
    with pytest.raises(OptionError, match="`node` must be a whole number of at least 1"):
        Links.parse("net=50", node=0)
