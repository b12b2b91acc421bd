"""Statistics of the operands of quantized GEMMs during training (docs/watch.md)."""

from mxcompile.watch.callbacks import for_lightning as for_lightning
from mxcompile.watch.callbacks import for_transformers as for_transformers
from mxcompile.watch.dump import Dump as Dump
from mxcompile.watch.watch import Watch as Watch
from mxcompile.watch.watch import resolve as resolve
from mxcompile.watch.writers import read as read
