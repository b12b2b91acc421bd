"""Parses and checks the options of ``torch.compile(..., options=…)``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from mxcompile.errors import OptionError, check_word, nearest, not_allowed, shown
from mxcompile.lowering.targets import AUTO, check
from mxcompile.policy import Policy
from mxcompile.report import Ledger, Report
from mxcompile.report.files import RANK, check_writable
from mxcompile.watch import Watch, resolve

NEEDED = {
    "use_joint_graph_passes": True,
    "use_post_grad_passes": True,
    "selective_decompose": False,
    "fallback_by_default": False,
}
"""Inductor settings without which the hooks or their kernels would not run.

The mode "lite" has the opposite of each.
"""

_PLACEHOLDER = re.compile(r"\{[A-Za-z_]\w*\}")
KEYS = ("policy", "report", "target", "strict", "inductor", "watch")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The checked options of a `Backend`.

    policy: policy with the watch's changes. user_policy: the user's policy for the step, before the watch
    changed it.
    """

    policy: Policy = field(default_factory=Policy)
    report: Path | None = None
    target: str = AUTO
    strict: bool = False
    mode: str | None = None
    inductor: tuple[tuple[str, Any], ...] = ()
    watch: Watch | None = None
    user_policy: Policy | None = None

    def __deepcopy__(self, memo: object) -> Options:
        """Returns itself, so that copies of a compiled model share the `watch`."""
        return self

    @classmethod
    def parse(cls, mode: str | None = None, options: Mapping[str, Any] | Options | None = None) -> Options:
        """Returns the options from the arguments of torch.compile. Later changes of a dict have no effect.

        Raises `OptionError`, `PolicyError` or `TargetError`.
        """
        if isinstance(options, Options):
            return options if mode is None else replace(options, mode=_mode(mode))
        if not isinstance(options, Mapping | None):
            raise OptionError(f"options must be a dict with {', '.join(KEYS)}, found {options!r}")
        raw = dict(options or {})
        for key in raw:
            check_word("option", key, KEYS)
        strict = raw.get("strict", False)
        if not isinstance(strict, bool):
            raise OptionError(f"option 'strict' must be True or False, found {strict!r}")
        target = raw.get("target", AUTO)
        if not isinstance(target, str):
            raise OptionError(f"option 'target' must be a name, found {target!r}")
        policy, watch = Policy.resolve(raw.get("policy")), resolve(raw.get("watch"))
        if watch is None and policy.has_steps:
            watch = Watch(every=None)  # counts the steps
        return cls(
            policy=policy,
            report=_report(raw.get("report")),
            target=check(target),
            strict=strict,
            mode=_mode(mode),
            inductor=_inductor(raw.get("inductor")),
            watch=watch,
        )

    def fingerprint(self) -> str:
        """Returns all options that can change the compiled code, as text."""
        return repr((self.policy.fingerprint(), self.target, self.strict, self.mode, self.inductor))

    @property
    def group(self) -> str:
        """Key of a report: the fingerprint with the user's policy, before the watch changed it."""
        return replace(self, policy=self.user_policy or self.policy).fingerprint()

    def ledger(self, target: str, model: nn.Module | None) -> Ledger:
        """Returns an empty ledger for the report of `model`, compiled with these options for `target`."""
        policy = self.policy
        about = {"policy": policy.title, "phase": policy.phase, "group": self.group}
        return Ledger(target=target, path=self.report, model=model, **about)

    def now(self) -> Options:
        """Returns these options with the policy for the next step, as the watch's rules have changed it."""
        if self.watch is None:
            return self
        policy = self.policy.at(self.watch.next_step)
        return replace(self, policy=self.watch.fallbacks.over(policy), user_policy=policy)


def _report(value: Any) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, str | Path):
        raise OptionError(f"option 'report' must be a file path, found {value!r}")
    Report.form_of(value)
    for word in _PLACEHOLDER.findall(str(value)):
        if word != RANK:
            raise OptionError(f"report {str(value)!r}: {not_allowed('placeholder', word, (RANK,))}")
    path = Path(value).absolute()
    check_writable(path)
    return path


def _mode(mode: Any) -> str | None:
    from torch._inductor import list_mode_options

    if mode is None or mode == "default":
        return None
    check_word("mode", mode, [*list_mode_options()])
    return str(mode)


def _inductor(value: Any) -> tuple[tuple[str, Any], ...]:
    """Returns overrides of Inductor's configuration after a check of their keys."""
    from torch._inductor import config

    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise OptionError(f"option 'inductor' must be a dict of Inductor settings, found {value!r}")
    settings = config.get_config_copy()
    for key in value:
        if key not in settings:
            near = nearest(str(key), settings)
            raise OptionError(f"unknown Inductor setting {shown(key)}{near}; torch._inductor.config has them")
        if value[key] != NEEDED.get(key, value[key]):
            raise OptionError(f"mxcompile needs Inductor's {key}={NEEDED[key]}: leave the setting out")
    return tuple((key, _copied(value[key])) for key in sorted(value))


def _copied(value: Any) -> Any:
    """Returns a copy of a setting, so that later changes by the user have no effect."""
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple, set) else value
