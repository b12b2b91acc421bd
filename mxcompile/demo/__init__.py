"""The demonstration: a small Llama trained on text in BF16, MXFP8 and too few bits; models served."""

from mxcompile.demo.compare import CONTROL, Comparison, quick_settings
from mxcompile.demo.plot import plot
from mxcompile.demo.serving import Quality, Speed, Way, Wide, quality, speed, trained, wide
from mxcompile.demo.training import Run, Settings, Text, Trainee, standard_library, train

__all__ = [
    "CONTROL",
    "Comparison",
    "Quality",
    "Run",
    "Settings",
    "Speed",
    "Text",
    "Trainee",
    "Way",
    "Wide",
    "plot",
    "quality",
    "quick_settings",
    "speed",
    "standard_library",
    "train",
    "trained",
    "wide",
]
