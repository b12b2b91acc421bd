"""All animals, by kind."""

from animals.decoders import DECODERS
from animals.diffusion import DIFFUSION
from animals.encoders import ENCODERS
from animals.experts import MIXTURES
from animals.hand import HAND
from animals.lucid import LUCID
from animals.mixers import MIXERS
from animals.seq2seq import SEQ2SEQ
from animals.timms import TIMMS
from animals.vision import VISION

ALL_ANIMALS = (
    *DECODERS, *MIXTURES, *MIXERS, *ENCODERS, *SEQ2SEQ, *VISION, *TIMMS, *DIFFUSION, *LUCID, *HAND,
)  # fmt: skip
