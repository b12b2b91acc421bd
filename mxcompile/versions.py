"""The versions of torch and Triton with which the numerical tests have run.

Tests bound the generated machine code (instructions per element, spills, barriers) for the Triton version
pinned in `.ci/constraints.txt`. Other versions allocate registers differently.

`pyproject.toml` has the lower bounds. It has no upper bounds: no newer version is known to break, and code
that uses private names falls back with a reason if a name is missing. ``mxcompile env`` and the backend (once
per process) warn about newer versions.
"""

from __future__ import annotations

import functools
import logging
from importlib import metadata

log = logging.getLogger(__name__)

TESTED = {"torch": ("2.11", "2.15"), "triton": ("3.6", "3.9")}
"""Oldest and newest tested minor version by distribution."""


def installed(name: str) -> str | None:
    """Returns the installed version of the distribution `name`, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def newer(name: str, than: str) -> bool:
    """Whether the installed minor version of `name` is newer than `than`; False if it is not installed."""
    return _minor(installed(name) or "0") > _minor(than)


def untested(name: str) -> str:
    """Returns why the installed version of `name` is untested; "" if it is tested or not installed."""
    version = installed(name)
    if version is None or name not in TESTED:
        return ""
    oldest, newest = TESTED[name]
    if _minor(version) > _minor(newest):
        return f"newer than tested: {name} {oldest} to {newest}"
    return f"older than supported: {name} {oldest} to {newest}" if _minor(version) < _minor(oldest) else ""


@functools.cache
def warn_once() -> None:
    """Logs a warning for every distribution whose installed version is untested."""
    for name in TESTED:
        if reason := untested(name):
            log.warning("%s %s is %s", name, installed(name), reason)


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int("".join(filter(str.isdecimal, part)) or 0) for part in version.split(".")[:2])
