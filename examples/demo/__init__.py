"""The demonstration: trains a small Llama in BF16, MXFP8 and 4 bits, and compares ways to serve models."""

from demo.compare import CONTROL, MXFP4_POLICY, SeedComparison, quick_settings, why_fp32
from demo.plot import plot
from demo.serving import Quality, Speed, Way, Wide, quality, speed, trained, ways, wide
from demo.training import Settings, Text, Trainee, TrainingRun, standard_library, train

__all__ = [
    "CONTROL",
    "MXFP4_POLICY",
    "Quality",
    "SeedComparison",
    "Settings",
    "Speed",
    "Text",
    "Trainee",
    "TrainingRun",
    "Way",
    "Wide",
    "plot",
    "quality",
    "quick_settings",
    "speed",
    "standard_library",
    "train",
    "trained",
    "ways",
    "why_fp32",
    "wide",
]
