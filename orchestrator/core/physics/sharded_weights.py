"""The collectives of fully sharded weights, and what computing does not hide of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from orchestrator.core.physics.collective_group import CollectiveGroup, LinkRates
from orchestrator.core.physics.columns import joined
from orchestrator.core.physics.step_time_constants import StepTimeConstants
from orchestrator.core.physics.trainer import Trainer
from orchestrator.core.problem.arrays import Floats, Mask
from orchestrator.core.problem.layout_table import LayoutTable


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardedWeights:
    """Weights that are fully sharded: gathers and scatters that computing may hide.

    At ZeRO 1 and 2 weights are gathered in the first forward pass of a step, at 3 in each forward
    and each backward pass.
    """

    rows: Mask  # that shard
    shards: Floats
    # Collectives of a pass: of each layer, and of the head.
    units: Floats
    # The bytes of one ring pass.
    gather_bytes: Floats
    scatter_bytes: Floats
    # Ranks with the same shards sum up theirs: the bytes of a ring pass.
    replica_bytes: Floats
    # Passes of a step.
    forward_gathers: Floats
    backward_gathers: Floats
    scatters: Floats
    shard_group: CollectiveGroup
    replica_group: CollectiveGroup

    @classmethod
    def of(
        cls,
        table: LayoutTable,
        trainer: Trainer,
        *,
        weights: Floats,
        element: Floats,
        layers: Floats,
        per_node: int,
    ) -> ShardedWeights | None:
        """Return the shards of the rows that shard; None: no row does."""
        ranks = table.data_parallel_size * table.context_parallel_size
        rows = (table.zero_stage >= 1) & (ranks > 1)
        if not trainer.fully_shards or not rows.any():
            return None
        tp, ga = table.tensor_parallel_size, table.grad_accum_steps.astype(np.float64)
        replicas = np.minimum(trainer.replicas, ranks)
        shards = ranks // replicas
        gathers_again = table.zero_stage == 3
        reduced = np.maximum(element, trainer.reduce_bytes)
        return cls(
            rows=rows,
            shards=shards.astype(np.float64),
            units=layers + 1.0,
            gather_bytes=(shards - 1) / shards * weights * element,
            scatter_bytes=(shards - 1) / shards * weights * reduced,
            replica_bytes=(replicas - 1) / replicas * weights / shards * reduced,
            forward_gathers=np.where(gathers_again, ga, 1.0),
            backward_gathers=np.where(gathers_again, ga, 0.0),
            scatters=ga if trainer.scatters_each else np.ones_like(ga),
            shard_group=CollectiveGroup.of(shards, tp, per_node),
            replica_group=CollectiveGroup.of(replicas, tp * shards, per_node),
        )

    @classmethod
    def joined(
        cls, parts: Sequence[ShardedWeights | None], lengths: Sequence[int]
    ) -> ShardedWeights | None:
        """Return the rows of several; None: nothing is sharded. `lengths`: rows of each."""
        if all(part is None for part in parts):
            return None
        return joined([part or cls._none(n) for part, n in zip(parts, lengths, strict=True)])

    @classmethod
    def _none(cls, length: int) -> ShardedWeights:
        ones = np.ones(length)
        group = CollectiveGroup(
            size=ones, members_per_node=ones, crosses=np.zeros(length, dtype=np.bool_)
        )
        columns: dict[str, Any] = {f.name: ones for f in fields(cls)}
        columns |= {"rows": group.crosses, "shard_group": group, "replica_group": group}
        return cls(**columns)

    def exposed_seconds(
        self,
        c: StepTimeConstants,
        links: LinkRates,
        *,
        forward: Floats,
        backward: Floats,
        spread: Callable[[Floats], Floats],
    ) -> Floats:
        """Seconds of a step in which nothing is computed.

        A pass hides behind the forward or backward pass of one micro-batch; `backward` and the
        result are of every layout.
        """
        bandwidth = self.shard_group.bandwidth(links)
        latency = self.units * self.shard_group.latency(c)
        gather = self.gather_bytes / bandwidth + latency
        replicas = self.replica_bytes / self.replica_group.bandwidth(links)
        scatter = self.scatter_bytes / bandwidth + latency
        scatter += 2.0 * (replicas + self.units * self.replica_group.latency(c))
        again = np.where(self.backward_gathers > 0, gather, 0.0)
        without_scatter = np.maximum(self.backward_gathers - self.scatters, 0.0)
        exposed = spread(self.forward_gathers * np.maximum(gather - forward, 0.0)) + spread(
            self.scatters
        ) * np.maximum(spread(scatter + again) - backward, 0.0)
        if without_scatter.any():
            exposed += spread(without_scatter) * np.maximum(spread(gather) - backward, 0.0)
        return exposed
