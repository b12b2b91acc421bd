"""Rules of a watch: actions when a statistic passes a limit.

    {"when": {"underflow": "> 0.3", "over": 5}, "operand": "dy", "do": "warn"}

A rule fires for an operand once all its conditions have held in `over` consecutive samples. It can fire again
after a sample in which a condition does not hold. With several ranks, rank 0 evaluates the joined sample.
`layer`, `role`, `gemm` and `operand` are a word or a list, as in a policy.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mxcompile.errors import OptionError, check_word, shown
from mxcompile.passes.watch import OPERANDS, RESULTS
from mxcompile.policy import Gemm, Match
from mxcompile.policy.schema import MATCH
from mxcompile.policy.values import Invalid, Value, listed, word
from mxcompile.watch.tally import NUMBERS, OF_RESULTS, Key

ACTIONS = ("warn", "bf16", "dump", "stop")
"""Actions of a rule (see `actions`). They run before the optimizer steps."""

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
_CONDITION = re.compile(r"\s*(>=|<=|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*")
_WHERE = {
    "layer": MATCH["name"],
    "role": MATCH["role"],
    "gemm": listed(word("GEMM", {str(gemm): str(gemm) for gemm in Gemm})),
    "operand": listed(word("operand", {name: name for name in OPERANDS})),
}
_KEYS = ("when", *_WHERE, "do")


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """A statistic, a comparison and its limit."""

    name: str
    word: str
    limit: float

    def holds(self, row: Mapping[str, Any]) -> bool:
        """Whether the condition holds; False for an undefined statistic."""
        value = row.get(self.name)
        return value is not None and _COMPARISONS[self.word](value, self.limit)

    def __str__(self) -> str:
        return f"{self.name} {self.word} {self.limit:g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A rule. conditions: all must hold, in `over` consecutive samples. match, gemms, operands: its scope."""

    conditions: tuple[Condition, ...]
    over: int
    match: Match
    gemms: tuple[str, ...]
    operands: tuple[str, ...]
    do: str
    _streaks: dict[Key, int] = field(default_factory=dict, compare=False)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Rule:
        """Returns the rule that the mapping `mapping` describes. Raises `OptionError` if it is invalid."""
        if not isinstance(mapping, Mapping):
            raise OptionError(f"a watch rule must be a mapping, found {shown(mapping)}")
        for key in mapping:
            check_word("key of a watch rule", key, _KEYS)
        when = mapping.get("when")
        if not isinstance(when, Mapping) or not when.keys() - {"over"}:
            raise OptionError(
                "watch rule: 'when' must name a statistic and its limit, such as {'underflow': '> 0.3'}"
            )
        over = when.get("over", 1)
        if isinstance(over, bool) or not isinstance(over, int) or over < 1:
            raise OptionError(f"watch rule: over must be a number of samples, found {shown(over)}")
        do = mapping.get("do", "warn")
        check_word("action of a watch rule", do, ACTIONS)
        where = {key: words_of(key, _WHERE[key], mapping[key]) if key in mapping else () for key in _WHERE}
        of_results = where["operand"] and {*where["operand"]} <= {*RESULTS.values()}
        allowed = OF_RESULTS if of_results else NUMBERS
        conditions = []
        for name, text in when.items():
            check_word("statistic", name, (*allowed, "over"))
            if name == "over":
                continue
            limit = _CONDITION.fullmatch(str(text))
            if limit is None:
                raise OptionError(
                    f"watch rule: the limit of {name} must be like '> 0.3', found {shown(text)}"
                )
            conditions.append(Condition(name=name, word=limit[1], limit=float(limit[2])))
        return cls(
            conditions=tuple(conditions),
            over=over,
            match=Match(name=where["layer"], role=where["role"]),
            gemms=where["gemm"],
            operands=where["operand"],
            do=do,
        )

    def covers(self, layer: str, role: str, gemm: str) -> bool:
        """Whether the rule applies to `gemm` of the layer named `layer` with `role`."""
        where = (self.match.role, role), (self.gemms, gemm)
        return self.match.names(layer) and all(not words or value in words for words, value in where)

    def looks_at(self, row: Mapping[str, Any]) -> bool:
        """Whether the rule applies to the operand of `row`."""
        is_its = not self.operands or row["operand"] in self.operands
        return is_its and self.covers(row["layer"], row["role"], row["gemm"])

    def fires(self, row: Mapping[str, Any]) -> bool:
        """Whether the rule fires for the operand of `row`. Every call counts as the next sample."""
        key = row["layer"], row["gemm"], row["operand"]
        if not self.looks_at(row):
            return False
        streak = self._streaks.get(key, 0) + 1 if all(c.holds(row) for c in self.conditions) else 0
        self._streaks[key] = streak
        return streak == self.over

    def sentence(self, step: int, row: Mapping[str, Any]) -> str:
        """Returns the message of the rule for `row`."""
        conditions = ", ".join(f"{condition} ({row[condition.name]:.4g})" for condition in self.conditions)
        times = f" in {self.over} samples" if self.over > 1 else ""
        return f"step {step}: {row['operand']} of {row['layer']} {row['gemm']}: {conditions}{times}"


def words_of(option: str, allowed: Value, value: Any) -> tuple[Any, ...]:
    """Returns the words of `value`, a word or a list. Raises `OptionError` for words not `allowed`."""
    try:
        words: tuple[Any, ...] = allowed.read(list(value) if isinstance(value, tuple) else value)
    except Invalid as error:
        raise OptionError(f"watch: {option}: {error}") from None
    return words
