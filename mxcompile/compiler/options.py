"""The options of the backend: what ``torch.compile(..., options=…)`` may hold."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mxcompile.compiler.hooks.inductor import NEEDED
from mxcompile.errors import OptionError, nearest, not_allowed, shown
from mxcompile.lowering.targets import AUTO, check
from mxcompile.policy import Policy
from mxcompile.report import form_of
from mxcompile.report.files import RANK, check_place
from mxcompile.watch import Watch, resolve

_PLACEHOLDER = re.compile(r"\{[A-Za-z_]\w*\}")
KEYS = ("policy", "report", "target", "strict", "inductor", "watch")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Checked options.

    policy: what decides. report: file to keep the report in. target: "auto" or a name of
    `lowering.targets.TARGETS`. strict: raise instead of falling back, and for rules that do nothing. mode: as
    for Inductor. inductor: overrides of ``torch._inductor.config``. watch: what is measured of a run. given:
    the policy as its user gave it, where the watch has changed it since.
    """

    policy: Policy = field(default_factory=Policy)
    report: Path | None = None
    target: str = AUTO
    strict: bool = False
    mode: str | None = None
    inductor: tuple[tuple[str, Any], ...] = ()
    watch: Watch | None = None
    given: Policy | None = None

    def __deepcopy__(self, memo: object) -> Options:
        """Itself, with its own `watch`: they are copied with a model that ``torch.compile`` has returned."""
        return self

    @classmethod
    def parse(cls, mode: str | None = None, options: Mapping[str, Any] | Options | None = None) -> Options:
        """Options from what torch.compile passes on. Nothing in them follows what is changed later.

        Raises `OptionError`, `PolicyError` or `TargetError`.
        """
        if isinstance(options, Options):
            return options if mode is None else replace(options, mode=_mode(mode))
        if not isinstance(options, Mapping | None):
            raise OptionError(f"options are a dict with {', '.join(KEYS)}, found {options!r}")
        raw = dict(options or {})
        for key in raw:
            if key not in KEYS:
                raise OptionError(not_allowed("option", key, KEYS))
        strict = raw.get("strict", False)
        if not isinstance(strict, bool):
            raise OptionError(f"option 'strict' is True or False, found {strict!r}")
        target = raw.get("target", AUTO)
        if not isinstance(target, str):
            raise OptionError(f"option 'target' is a name, found {target!r}")
        return cls(
            policy=Policy.resolve(raw.get("policy")),
            report=_report(raw.get("report")),
            target=check(target),
            strict=strict,
            mode=_mode(mode),
            inductor=_inductor(raw.get("inductor")),
            watch=resolve(raw.get("watch")),
        )

    def fingerprint(self) -> str:
        """Everything that can change what is compiled, as one string."""
        return self._fingerprint(self.policy)

    @property
    def group(self) -> str:
        """Equal for all that is in one report: the fingerprint before a watch changed the policy."""
        return self._fingerprint(self.given or self.policy)

    def _fingerprint(self, policy: Policy) -> str:
        return repr((policy.fingerprint(), self.target, self.strict, self.mode, self.inductor))

    def now(self) -> Options:
        """These options with the policy as rules of the watch have changed it until now."""
        if self.watch is None:
            return self
        return replace(self, policy=self.watch.over(self.policy), given=self.policy)


def _report(value: Any) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, str | Path):
        raise OptionError(f"option 'report' is a file path, found {value!r}")
    form_of(value)
    for word in _PLACEHOLDER.findall(str(value)):
        if word != RANK:
            raise OptionError(f"report {str(value)!r}: {not_allowed('placeholder', word, (RANK,))}")
    path = Path(value).absolute()
    check_place(path)
    return path


def _mode(mode: Any) -> str | None:
    from torch._inductor import list_mode_options

    if mode is None or mode == "default":
        return None
    known = [*list_mode_options()]
    if mode not in known:
        raise OptionError(not_allowed("mode", mode, known))
    return str(mode)


def _inductor(value: Any) -> tuple[tuple[str, Any], ...]:
    """Overrides of Inductor's configuration, every key known to it."""
    from torch._inductor import config

    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise OptionError(f"option 'inductor' is a dict of Inductor settings, found {value!r}")
    known = config.get_config_copy()
    for key in value:
        if key not in known:
            near = nearest(str(key), known)
            raise OptionError(f"unknown Inductor setting {shown(key)}{near}; torch._inductor.config has them")
        if value[key] != NEEDED.get(key, value[key]):
            raise OptionError(f"mxcompile needs Inductor's {key}={NEEDED[key]}: leave the setting out")
    return tuple((key, _own(value[key])) for key in sorted(value))


def _own(value: Any) -> Any:
    """`value`, a setting, in containers that its user does not have."""
    if isinstance(value, dict):
        return {key: _own(inner) for key, inner in value.items()}
    return type(value)(map(_own, value)) if type(value) in (list, tuple, set) else value
