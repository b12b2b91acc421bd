"""The time of a collective on the links between the GPUs of a mesh: α + β · bytes, by ring or tree.

    all-gather, reduce-scatter   ring: p − 1 steps, (p − 1) / p of the whole tensor
    all-reduce                   ring: 2 (p − 1) steps, 2 (p − 1) / p; tree: 2 log₂ nodes steps between nodes
    all-to-all                   p − 1 steps, (p − 1) / p; traffic to other nodes uses the rank's own port
    broadcast                    p − 1 steps, the whole tensor
    send                         one step, the whole tensor

Ranks of a mesh are numbered with the innermost axis fastest. Each `node` consecutive ranks form a node,
connected by NVLink; network ports connect the nodes. A ring with g ranks in each node uses all g ports. Link
bandwidths come from data sheets; published measurements give the fraction that NCCL reaches. The model
takes the fastest of NCCL's three protocols. It leaves out: other traffic on the link, oversubscribed
switches, and slow ranks.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass

from mxcompile.errors import OptionError, not_allowed, shown
from mxcompile.lowering.chips.target import Rate
from mxcompile.mesh.collectives import SEND, Collective
from mxcompile.offline.rates import Rates

NVLINK, NET = "nvlink", "net"
NODE = 8
"""Default number of GPUs in a node."""

_LINK = re.compile(r"(\w+)=(\d+(?:\.\d+)?)")
_FORM = "names with speeds in 10⁹ bytes/s a GPU, each way, such as nvlink=900,net=50"

_RATES = {
    "nvlink": Rate(
        low=0.70,
        centre=0.80,
        high=0.84,
        source="nccl-tests #212: a ring reaches 370 of an H100's 450 GB/s; nccl #1807: 722 of a B200's 900",
    ),
    "nvlink_all_reduce": Rate(
        low=0.75,
        centre=0.92,
        high=1.06,
        source="sums in the switch: nccl-tests #272, 475 GB/s of an H200's 450; nccl #1807, 830 of 900",
    ),
    "net": Rate(
        low=0.50,
        centre=0.85,
        high=0.95,
        source="nccl-tests #290: 46 to 48 of 50 GB/s on 2 nodes; nccl #1218: 200 of 400 on 32; rest assumed",
    ),
    "steps": Rate(
        low=0.5,
        centre=1.0,
        high=2.0,
        source="assumed: NCCL's own constants of latency, made on one kind of system, within a factor of 2",
    ),
}
"""Achieved fractions of the data-sheet bandwidth, as in `offline.rates`; "steps" scales latencies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Protocol:
    """An NCCL protocol: fraction of the bandwidth, and µs of a start and of a step on each link."""

    share: float
    alone: float
    start_us: float
    nvlink_us: float
    net_us: float


_PROTOCOLS = (
    _Protocol(share=1.0, alone=1.0, start_us=8.4, nvlink_us=3.4, net_us=14.0),  # Simple
    _Protocol(share=0.92, alone=0.7, start_us=14.0, nvlink_us=1.9, net_us=4.0),  # LL128
    _Protocol(share=0.5, alone=0.25, start_us=6.6, nvlink_us=0.6, net_us=2.7),  # LL
)
"""For rings, from NCCL's src/graph/tuning.cc. alone: the fraction with one rank in each node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """Links of a GPU. nvlink, net: 10⁹ bytes per second each way, None if unknown. node: GPUs in a node."""

    nvlink: float | None = None
    net: float | None = None
    node: int = NODE

    @staticmethod
    def parse(text: str, *, node: int = NODE) -> Links:
        """Parses ``nvlink=900,net=50``. Raises `OptionError` for other text or fewer than 1 GPU in a node."""
        rates: dict[str, float] = {}
        for word in text.split(",") if isinstance(text, str) else [""]:
            match = _LINK.fullmatch(word.strip())
            if match is None:
                raise OptionError(f"cannot read links {shown(text)}: expected {_FORM}")
            name, speed = match[1], float(match[2])
            if name not in (NVLINK, NET):
                raise OptionError(not_allowed("link", name, (NVLINK, NET)))
            if name in rates:
                raise OptionError(f"links {shown(text)} name {name} twice")
            if not speed:
                raise OptionError(f"links {shown(text)}: the speed of {name} must be above 0")
            rates[name] = speed
        if not isinstance(node, int) or node < 1:
            raise OptionError(f"`node` must be a whole number of at least 1, found {shown(node)}")
        return Links(**rates, node=node)

    def __str__(self) -> str:
        rates = {NVLINK: self.nvlink, NET: self.net}
        words = [f"{name}={speed:g}" for name, speed in rates.items() if speed is not None]
        return f"{','.join(words)}, nodes of {self.node}"

    def rates(self, rates: Rates) -> Rates:
        """Returns `rates` of a chip, extended by the rates of links."""
        centres = {kind: rate.centre for kind, rate in _RATES.items()}
        return dataclasses.replace(rates, table={**rates.table, **_RATES}, values={**rates.values, **centres})

    def in_node(self, collective: Collective) -> int:
        """Returns the number of the collective's ranks that are in one node."""
        return min(collective.ranks, max(1, self.node // collective.stride))

    def link(self, collective: Collective) -> str:
        """Returns "nvlink" if all ranks of the collective are in one node, else "net"."""
        return NVLINK if self.in_node(collective) == collective.ranks else NET

    def check(self, collective: Collective) -> None:
        """Raises `OptionError` if the speed of the link that a collective uses is unknown."""
        link = self.link(collective)
        if getattr(self, link) is None:
            where = "within nodes" if link == NVLINK else "between nodes"
            raise OptionError(
                f"ranks of {collective.axis} ({collective.ranks}) send {where} of {self.node} GPUs: give the"
                f" speed of {link}, as in {_FORM.rpartition(' ')[2]}"
            )

    def us(self, collective: Collective, num_bytes: int, rates: Rates) -> float:
        """Returns the µs of a collective to which each rank contributes `num_bytes`."""
        ranks, near = collective.ranks, self.in_node(collective)
        nodes = ranks / near
        rounds = 2 if collective.kind == "all-reduce" else 1
        leaving = {"all-gather": ranks - 1, "broadcast": 1.0, SEND: 1.0}
        sent = num_bytes * leaving.get(collective.kind, rounds * (ranks - 1) / ranks)
        between = rounds * (nodes - 1)
        within = rounds * (ranks - 1) - between
        if collective.kind == "all-reduce" and nodes > 2:  # NCCL then uses a tree, which has fewer steps
            within, between = rounds * (near - 1), rounds * math.log2(nodes)
        sent_us = sent / (self._gbs(collective, near, rates) * 1e3)
        return min(
            (way.start_us + within * way.nvlink_us + between * way.net_us) / rates["steps"]
            + sent_us / (way.alone if near == 1 else way.share)
            for way in _PROTOCOLS
        )

    def _gbs(self, collective: Collective, near: int, rates: Rates) -> float:
        """Returns the 10⁹ bytes per second that leave a rank. near: number of ranks in a node."""
        within = (self.nvlink or math.inf) * rates[
            "nvlink_all_reduce" if collective.kind == "all-reduce" and near == collective.ranks else "nvlink"
        ]
        if near == collective.ranks:
            return within
        port = (self.net or math.inf) * rates["net"]
        if collective.kind == "all-to-all":
            outside = (collective.ranks - near) / (collective.ranks - 1)
            return min(within, port / outside)
        return min(within, near * port)
