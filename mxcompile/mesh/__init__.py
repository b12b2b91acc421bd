"""One rank of a mesh that need not exist: its shards, and what it sends."""

from mxcompile.mesh.collectives import Collective as Collective
from mxcompile.mesh.memory import Memory as Memory
from mxcompile.mesh.report import RankReport as RankReport
from mxcompile.mesh.shards import Shard as Shard
