"""A run in sight: statistics of the operands of quantized products while training goes on (docs/watch.md)."""

from mxcompile.watch.watch import Watch as Watch
from mxcompile.watch.watch import resolve as resolve
from mxcompile.watch.writers import read as read
