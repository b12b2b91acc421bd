"""One rank of a mesh: shards, collectives, memory, pipeline stages and step time."""

from mxcompile.mesh.collectives import Collective as Collective
from mxcompile.mesh.memory import Memory as Memory
from mxcompile.mesh.report import RankReport as RankReport
from mxcompile.mesh.shards import Shard as Shard
