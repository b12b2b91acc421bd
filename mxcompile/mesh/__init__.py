"""Shards, collectives, memory, pipeline stages and time of one rank of a mesh."""

from mxcompile.mesh.collectives import Collective as Collective
from mxcompile.mesh.memory import Memory as Memory
from mxcompile.mesh.report import RankReport as RankReport
from mxcompile.mesh.shards import Shard as Shard
