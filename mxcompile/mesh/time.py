"""The time of a step on one rank of a mesh, as a range: kernels and exposed communication.

    kernels    forward and backward of the rank's graphs, from `offline.graph_work`
    around     FSDP2's copies of gathered weights and of gradients; loss, clipping and AdamW, as
               `offline.training` counts them
    exposed    collectives of activations in full, because the next kernel needs their result;
               FSDP2's collectives as far as they take longer than the work that overlaps with them in their
               phase; nothing overlaps with the first two gathers and the last two reductions
    bubble     idle time of a pipeline rank that waits for other stages (see `schedule`)

FSDP2's collectives overlap with kernels, and with collectives of activations on the other link. All parts use
the same rates, so the range of a ratio of two steps is narrower than the ranges of the steps. Not included:
host time, SMs that collectives take from kernels, and waiting for slower ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mxcompile.lowering.targets import Target
from mxcompile.mesh.collectives import SEND, Collective
from mxcompile.mesh.links import NET, NVLINK, Links
from mxcompile.mesh.schedule import Schedule
from mxcompile.offline.estimate import Work, peak_of
from mxcompile.offline.graph_work import Works
from mxcompile.offline.launch import INDISTINGUISHABLE, KINDS
from mxcompile.offline.rates import Range, Rates
from mxcompile.offline.training import loss_bytes, update_bytes
from mxcompile.report.data.fold import grouped
from mxcompile.report.forms.tables import Table, drawn

FORWARD, BACKWARD = "forward", "backward"
PHASES = (FORWARD, BACKWARD)
_ALONE = 2
"""Number of collectives at the start of forward, and at the end of backward, without overlapping work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWork:
    """The work of one rank in a step under one policy.

    policy: name of the policy. works: kernel launches by phase. collectives: collectives of a step. wire:
    whether collectives send mxcompile's bytes (`num_bytes`) or the plain model's (`without_bytes`). logits,
    gradients: bytes of the model's differentiable outputs and of the rank's gradients; 0 in inference.
    microbatches: micro-batches in a step; works, logits and collectives of activations are per micro-batch.
    waits: the bubble of a pipeline rank.
    """

    policy: str
    works: Mapping[str, Works]
    collectives: tuple[Collective, ...]
    wire: bool = True
    logits: int = 0
    gradients: int = 0
    microbatches: int = 1
    waits: Waits | None = None

    def parts(self, links: Links, rates: Rates) -> dict[str, float]:
        """Returns µs by part; their sum is the step. rates: rates of the chip and its links."""
        by_kind = dict.fromkeys(KINDS, 0.0)
        for side in self.works.values():
            for kind, us in _by_kind(side, rates).items():
                by_kind[kind] += us
        batches = self.microbatches
        copied = sum(  # out of gather buffers and into reduction buffers
            2 * self.times(c) * self.contributed_bytes(c) * (c.ranks if c.kind == "all-gather" else 1)
            for c in self._of_fsdp()
            if c.kind in ("all-gather", "reduce-scatter")
        )
        around = {"FSDP's copies": copied, "loss": batches * loss_bytes(self.logits)}
        around |= update_bytes(self.gradients)
        activations = sum(self._activations_us(phase, links, rates) for phase in PHASES)
        repeats = batches - 1 if self._gathers_in_backward else 0
        return {
            **{kind: batches * us for kind, us in by_kind.items()},
            **{
                part: Work(num_bytes=size).estimate(rates).us if size else 0.0
                for part, size in around.items()
            },
            "exposed, activations": batches * activations,
            "exposed, FSDP forward": (1 + repeats) * self._exposed_us(FORWARD, links, rates),
            "exposed, FSDP backward": self._exposed_us(BACKWARD, links, rates)
            + repeats * self._exposed_us(BACKWARD, links, rates, kinds=("all-gather",)),
            **({} if self.waits is None else {"bubble": self.waits.us(links, rates)}),
        }

    @property
    def _gathers_in_backward(self) -> bool:
        """Whether FSDP2 frees weights after forward, so every micro-batch gathers them again."""
        return any(collective.kind == "all-gather" for collective in self._of_fsdp(BACKWARD))

    def pass_us(self, phase: str, links: Links, rates: Rates) -> float:
        """Returns the µs of one micro-batch in `phase`: kernels and collectives of activations."""
        kernels = sum(_by_kind(self.works.get(phase, Works()), rates).values())
        return kernels + self._activations_us(phase, links, rates)

    def us(self, links: Links, rates: Rates) -> float:
        """Returns the µs of the step."""
        return sum(self.parts(links, rates).values())

    @property
    def sent(self) -> tuple[Collective, ...]:
        """The collectives of a step, each repeated as often as it runs."""
        return tuple(collective for collective in self.collectives for _ in range(self.times(collective)))

    def contributed_bytes(self, collective: Collective) -> int:
        """Returns the bytes that the rank contributes to a collective."""
        return collective.num_bytes if self.wire else collective.without_bytes

    def hidden_us(self, links: Links, rates: Rates) -> float:
        """Returns the µs of collectives that overlap with kernels."""
        everything = sum(links.us(c, self.contributed_bytes(c), rates) for c in self.sent)
        exposed = sum(us for part, us in self.parts(links, rates).items() if "exposed" in part)
        return max(everything - exposed, 0.0)

    def times(self, collective: Collective) -> int:
        """Returns how often a step runs a collective; activations and freed weights: per micro-batch."""
        every = not _is_fsdp(collective) or (collective.what == "weights" and self._gathers_in_backward)
        return self.microbatches if every else 1

    def _of_fsdp(self, phase: str | None = None) -> list[Collective]:
        return [c for c in self.collectives if _is_fsdp(c) and phase in (None, c.phase)]

    def _activations_us(self, phase: str, links: Links, rates: Rates, *, link: str | None = None) -> float:
        return sum(
            links.us(collective, self.contributed_bytes(collective), rates)
            for collective in self.collectives
            if not _is_fsdp(collective) and collective.kind != SEND and collective.phase == phase
            if link in (None, links.link(collective))
        )

    def _exposed_us(self, phase: str, links: Links, rates: Rates, *, kinds: Sequence[str] = ()) -> float:
        """Returns the µs of FSDP2's collectives in `phase` without overlap; `kinds` restricts them."""
        sent = [collective for collective in self._of_fsdp(phase) if not kinds or collective.kind in kinds]
        kind = "all-gather" if phase == FORWARD else "reduce-scatter"
        first = list(dict.fromkeys(c.name for c in sent if c.kind == kind))[:_ALONE]
        alone = shared = 0.0
        for collective in sent:
            us = links.us(collective, self.contributed_bytes(collective), rates)
            if collective.name in first and (phase == FORWARD or collective.kind != "all-gather"):
                alone += us
            else:
                shared += us
        used = {links.link(collective) for collective in sent}
        window = sum(_by_kind(self.works.get(phase, Works()), rates).values())
        window += sum(
            self._activations_us(phase, links, rates, link=link) for link in (NVLINK, NET) if link not in used
        )
        return alone + max(shared - window, 0.0)


def _is_fsdp(collective: Collective) -> bool:
    return collective.what in ("weights", "gradients")


def _by_kind(works: Works, rates: Rates) -> dict[str, float]:
    total: dict[str, float] = {}
    for (kind, work), times in works.items():
        total[kind] = total.get(kind, 0.0) + times * work.estimate(rates).us
    return total


@dataclass(frozen=True, kw_only=True, slots=True)
class Waits:
    """The bubble of a pipeline rank.

    stages: work of a micro-batch in each stage. send: transfer to the next stage.
    """

    schedule: Schedule
    rank: int
    stages: tuple[RankWork, ...]
    send: Collective

    def us(self, links: Links, rates: Rates) -> float:
        """Returns the µs of the bubble."""
        forward, backward = ([c.pass_us(phase, links, rates) for c in self.stages] for phase in PHASES)
        us, busy = self.schedule.run(forward, backward, links.us(self.send, self.send.num_bytes, rates))
        return us - busy[self.rank]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """The time of a step under several policies; the last policy is the baseline.

    works: work of the rank under each policy. links: links of a GPU. rates: rates of the chip and its links.
    """

    works: tuple[RankWork, ...]
    links: Links
    rates: Rates

    @staticmethod
    def from_works(works: Sequence[RankWork], links: Links, target: Target) -> StepTime:
        """Returns the step time by the rates of `target`. Raises `OptionError` if a link speed is missing."""
        for collective in works[0].collectives:
            links.check(collective)
        return StepTime(works=tuple(works), links=links, rates=links.rates(Rates.for_target(target)))

    def range(self, work: RankWork) -> Range:
        """Returns the µs of the step at the low, centre and high rates."""
        return Range.from_rates(lambda rates: work.us(self.links, rates), self.rates)

    def over(self, work: RankWork, other: RankWork) -> Range:
        """Returns the ratio of the steps of `work` and `other`."""
        return Range.from_rates(
            lambda rates: work.us(self.links, rates) / other.us(self.links, rates), self.rates
        )

    @property
    def us(self) -> Range:
        """µs of the step under the first policy."""
        return self.range(self.works[0])

    def __str__(self) -> str:
        chip = peak_of(self.rates.target).chip
        title = f"time of a step on {chip}, links {self.links}: an estimate, not measured"
        return "\n".join([title, drawn(self._parts()), *self._notes(), "", drawn(self._collectives())])

    def _parts(self) -> Table:
        head = ["ms", *(work.policy for work in self.works)]
        parts = [work.parts(self.links, self.rates) for work in self.works]
        rows = [
            [part, *(_ms(us[part]) for us in parts)] for part in parts[0] if any(us[part] for us in parts)
        ]
        steps = [self.range(work) for work in self.works]
        rows.append(["step", *(Range(s.low / 1e3, s.centre / 1e3, s.high / 1e3).text(",.1f") for s in steps)])
        if len(self.works) > 1:
            last = self.works[-1]
            ratios = [self.over(work, last).text(".2f") for work in self.works[:-1]]
            rows.append([f"of {last.policy}", *ratios, "1.00"])
        rows.append(["hidden", *(_ms(work.hidden_us(self.links, self.rates)) for work in self.works)])
        return [head, *rows]

    def _notes(self) -> Iterable[str]:
        yield "step: centre (low–high); hidden: collectives beside kernels, not part of the step"
        last = self.works[-1]
        for work in self.works[:-1]:
            ratio = self.over(work, last)
            if ratio.low <= 1.0 <= ratio.high:
                yield f"{work.policy} and {last.policy}: {INDISTINGUISHABLE}"

    def _collectives(self) -> Table:
        """Returns a table with a row for each kind of collective under the first policy."""
        work, links = self.works[0], self.links
        alike = grouped(work.sent, lambda c: (c.kind, c.what, f"{c.axis} ({c.ranks})", links.link(c)))
        rows = []
        for key, same in alike.items():
            us = sum(links.us(c, work.contributed_bytes(c), self.rates) for c in same)
            rows.append([*key, str(len(same)), _ms(us)])
        return [["collective", "of", "axis", "link", "times", "ms"], *rows]

    def as_data(self) -> dict[str, Any]:
        """Returns the times as data for JSON, in µs."""
        return {
            "links": {"nvlink": self.links.nvlink, "net": self.links.net, "node": self.links.node},
            "steps": [
                {
                    "policy": work.policy,
                    "us": asdict(self.range(work)),
                    "ratio": asdict(self.over(work, self.works[-1])),
                    "parts_us": work.parts(self.links, self.rates),
                    "hidden_us": work.hidden_us(self.links, self.rates),
                }
                for work in self.works
            ],
        }


def _ms(us: float) -> str:
    return f"{us / 1e3:,.1f}"
