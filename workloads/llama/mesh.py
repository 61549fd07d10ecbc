"""The place of a rank in the mesh of its layout, and its process group along each dimension.

Ranks are numbered with tensor parallelism fastest, then context, data and pipeline parallelism: the
ranks that exchange the most are neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from orchestrator.core.problem.layout import Layout

_DIMENSIONS = ("pp", "replicas", "shards", "cp", "tp")


@dataclass(frozen=True, kw_only=True)
class Line:
    """The ranks along some dimensions, and this rank's index among them. One rank has no group."""

    ranks: tuple[int, ...] = (0,)
    index: int = 0
    group: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """A rank's line in each dimension of the mesh."""

    pp: Line = Line()
    dp: Line = Line()
    cp: Line = Line()
    tp: Line = Line()
    # Data and context parallelism together: the ranks whose gradients are averaged.
    data: Line = Line()
    # The same ranks as replicas x shards: FSDP shards over some and replicates over the others.
    shards: Line = Line()
    replicas: Line = Line()

    def shard_mesh(self, device: torch.device) -> DeviceMesh:
        """Return the mesh over which FSDP shards; of two dimensions if it also replicates."""
        shards, replicas = self.shards.group, self.replicas.group
        if replicas is None:
            assert shards is not None  # one rank shards nothing
            return DeviceMesh.from_group(shards, device.type, mesh_dim_names=("shards",))
        rows = np.array(self.data.ranks).reshape(self.replicas.size, self.shards.size)
        if shards is None:
            raise AssertionError("replicas of one shard are plain data parallelism")
        return DeviceMesh.from_group(
            [replicas, shards],
            device.type,
            mesh=torch.from_numpy(rows),
            mesh_dim_names=("replicas", "shards"),
        )


@dataclass(kw_only=True)
class Groups:
    """The process groups of a gang by their ranks, each made once."""

    _made: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)

    def place(self, layout: Layout, *, replicas: int = 1) -> RankPlace:
        """Return this rank's place. Every rank of the gang has to call it, in the same order."""
        if layout.world_size == 1:
            return RankPlace()
        sizes = (
            layout.pipeline_parallel_size,
            replicas,
            layout.data_parallel_size // replicas,
            layout.context_parallel_size,
            layout.tensor_parallel_size,
        )
        mesh = np.arange(layout.world_size).reshape(sizes)
        return RankPlace(
            pp=self._line(mesh, "pp"),
            dp=self._line(mesh, "replicas", "shards"),
            cp=self._line(mesh, "cp"),
            tp=self._line(mesh, "tp"),
            data=self._line(mesh, "replicas", "shards", "cp"),
            shards=self._line(mesh, "shards", "cp"),
            replicas=self._line(mesh, "replicas"),
        )

    def _line(self, mesh: np.ndarray, *dimensions: str) -> Line:
        """This rank's line along some dimensions. Makes the groups of all such lines."""
        axes = [_DIMENSIONS.index(name) for name in dimensions]
        size = int(np.prod([mesh.shape[axis] for axis in axes]))
        lines = np.moveaxis(mesh, axes, range(-len(axes), 0)).reshape(-1, size)
        own = Line()
        for ranks in map(tuple, lines.tolist()):
            group = self._group(ranks)
            if dist.get_rank() in ranks:
                own = Line(ranks=ranks, index=ranks.index(dist.get_rank()), group=group)
        return own

    def _group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        if len(ranks) == 1:
            return None
        if len(ranks) == dist.get_world_size():
            return dist.group.WORLD
        if ranks not in self._made:
            self._made[ranks] = dist.new_group(list(ranks))
        return self._made[ranks]
