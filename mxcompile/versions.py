"""The versions that the tests of values have run with, in one place.

Tests hold the machine code of kernels to figures (instructions an element, spills, barriers) of the Triton
that `.ci/constraints.txt` pins; another one allocates registers otherwise.

`pyproject.toml` has the lower bounds. There is no upper one: nothing newer is known to break, and code
that uses private names falls back with a reason where one is missing. ``mxcompile env`` and, once, the
backend say that newer versions are untested.
"""

from __future__ import annotations

import functools
import logging
from importlib import metadata

log = logging.getLogger(__name__)

TESTED = {"torch": ("2.11", "2.15"), "triton": ("3.6", "3.9")}
"""Oldest and newest minor version, by distribution."""


def installed(name: str) -> str | None:
    """The installed version of the distribution `name`, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def untested(name: str) -> str:
    """Why the installed version of `name` is not one of those tested; "" if it is, or is not installed."""
    version = installed(name)
    if version is None or name not in TESTED:
        return ""
    oldest, newest = TESTED[name]
    if _minor(version) > _minor(newest):
        return f"newer than tested: {name} {oldest} to {newest}"
    return f"older than supported: {name} {oldest} to {newest}" if _minor(version) < _minor(oldest) else ""


@functools.cache
def warn_once() -> None:
    """Log a warning for every distribution whose version is not among those tested."""
    for name in TESTED:
        if reason := untested(name):
            log.warning("%s %s is %s", name, installed(name), reason)


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int("".join(filter(str.isdecimal, part)) or 0) for part in version.split(".")[:2])
