"""All animals, by kind."""

from animals.decoders import DECODERS
from animals.encoders import ENCODERS
from animals.experts import MIXTURES
from animals.seq2seq import SEQ2SEQ

ALL_ANIMALS = (*DECODERS, *MIXTURES, *ENCODERS, *SEQ2SEQ)
