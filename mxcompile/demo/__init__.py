"""The demonstration: a small Llama trained on text in BF16, in MXFP8 and in too few bits, and compared."""

from mxcompile.demo.compare import CONTROL, Comparison, Variant, quick_settings
from mxcompile.demo.plot import plot
from mxcompile.demo.training import Run, Settings, Text, Trainee, standard_library, train

__all__ = [
    "CONTROL",
    "Comparison",
    "Run",
    "Settings",
    "Text",
    "Trainee",
    "Variant",
    "plot",
    "quick_settings",
    "standard_library",
    "train",
]
