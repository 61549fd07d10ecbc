"""Memory in a step of workload llama beyond states and activations, moment by moment.

Its weights are sharded by torch's fully_shard, unit by unit: the embedding, each layer, the head.
Gradients come and go. Sizes are numbers of weights, or bytes where the name says so. Knows nothing
of layers' activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from orchestrator.core.problem.arrays import Floats, Mask


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerMoments:
    """Bytes at the moments of one layer's backward pass."""

    # Layers behind it, whose backward pass is over.
    done: Floats
    # Its feed-forward is at its fullest; its first gradient is made.
    early: Floats
    # All of its gradients are made.
    late: Floats
    # They are reduced.
    reduced: Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class Moments:
    """Bytes at the moments of a step that may be the fullest."""

    # Logits, or the gradient of the head's weights, are alive.
    head: Floats
    # The head's gradients are reduced; its logits are gone.
    head_reduced: Floats
    # The last layer, the second one and the first one, in the order of the backward pass.
    layers: tuple[LayerMoments, ...]
    # All layers are done, and the embedding's gradients are reduced.
    end: Floats
    # The optimizer steps.
    step: Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class Units:
    """The units of a rank's part of the model, and how they are sharded and gathered."""

    num_layers: Floats
    layer: Floats
    embedding: Floats  # 0 on stages without it
    head: Floats
    # One product of a layer's feed-forward.
    product: Floats
    element_bytes: Floats
    # Bytes of a gradient that the backward pass makes, and of one that is reduced.
    gradient_bytes: Floats
    reduced_bytes: Floats
    # What the communication library copies of a gradient in a reduction.
    copied_bytes: Floats
    # The weights in one bucket, if an all-reduce widens its buckets; else 0.
    bucket: Floats
    shards: Floats
    is_sharded: Mask
    # ZeRO 3: gathered for each use.
    gathers_again: Mask
    # Another micro-batch follows: weights stay gathered through the backward pass.
    is_followed: Mask
    # Gradients are made in the backward pass, and are no states.
    makes_gradients: Mask
    # Gradients stay whole until the last micro-batch.
    holds_whole_gradients: Mask
    # Gradients of shards are summed up over replicas after the last micro-batch.
    holds_sums: Mask
    # The loss's backward pass is part of the forward pass.
    chunks_loss: bool

    def moments(self) -> Moments:
        """Return the bytes at each moment, one entry per row."""
        last, second = np.zeros(len(self.layer)), np.maximum(self.num_layers - 2.0, 0.0)
        first = self.num_layers - 1.0

        def of(sharded: Floats, whole: Floats) -> Floats:
            found: Floats = np.where(self.is_sharded, sharded, whole)
            return found

        def layer(done: Floats) -> LayerMoments:
            whole, sharded = self._whole_layer(done), self._sharded_layer(done)
            parts = ("early", "late", "reduced")
            return LayerMoments(
                done=done,
                **{part: of(getattr(sharded, part), getattr(whole, part)) for part in parts},
            )

        everything = self.head + self.num_layers * self.layer
        head, head_reduced = self._sharded_head()
        return Moments(
            head=of(head, np.zeros(len(head))),
            head_reduced=of(head_reduced, self._made_whole * self.head),
            layers=tuple(map(layer, (last, second, first))),
            end=of(
                self._sharded_end(),
                self._made_whole * everything
                + 4.0 * self.bucket * (self.bucket > 0)
                + np.where(self.bucket > 0, self.element_bytes * self.embedding, 0.0),
            ),
            step=of(
                self._sums + self._made_shards * (everything + self.embedding),
                self._made_whole * (everything + self.embedding),
            ),
        )

    @cached_property
    def _made_whole(self) -> Floats:
        """Bytes of a gradient that this rank alone makes."""
        found: Floats = np.where(self.makes_gradients, self.gradient_bytes, 0.0)
        return found

    @cached_property
    def _made_shards(self) -> Floats:
        """Bytes of a gradient of which this rank keeps its shard."""
        found: Floats = np.where(self.makes_gradients, 4.0 / self.shards, 0.0)
        return found

    @cached_property
    def _all(self) -> Floats:
        return self.num_layers * self.layer + self.embedding + self.head

    @cached_property
    def _whole_gradients(self) -> Floats:
        found: Floats = np.where(self.holds_whole_gradients, self.reduced_bytes * self._all, 0.0)
        return found

    @cached_property
    def _sums(self) -> Floats:
        """Bytes of the shards that replicas have not summed up yet."""
        found: Floats = np.where(self.holds_sums, 4.0 / self.shards * self._all, 0.0)
        return found

    @cached_property
    def _held(self) -> Floats:
        """Bytes of a gradient that a reduction holds until the next one: its input."""
        found: Floats = np.where(self.holds_whole_gradients, 0.0, self.reduced_bytes)
        return found

    def _whole_layer(self, done: Floats) -> LayerMoments:
        made = self._made_whole
        before = made * (self.head + done * self.layer)
        return LayerMoments(
            done=done,
            early=before + made * self.product,
            late=before + made * self.layer,
            reduced=before,
        )

    def _gathered(self, done: Floats, unit: Floats, following: Floats) -> Floats:
        """All weights but those of units that are done; under ZeRO 3 the unit in use, and the next.

        The next one is gathered while one is in use.
        """
        several = self.element_bytes * self._all - self._freed_bytes * done
        again = self.element_bytes * (unit + following)
        found: Floats = np.where(self.gathers_again, again, several)
        return found

    @cached_property
    def _freed_bytes(self) -> Floats:
        found: Floats = np.where(self.is_followed, 0.0, self.element_bytes)
        return found

    def _reduced(self, done: Floats, following: Floats) -> Floats:
        """The same when the last of the units that are done is reduced, with whole gradients.

        These are reduced after the last micro-batch only, when weights are freed as well.
        """
        found = self._gathered(done, np.zeros(len(done)), following)
        if not self._some_hold:
            return found
        freed = np.where(
            self.holds_whole_gradients & self.is_followed, self.element_bytes * done, 0.0
        )
        return found - freed + self._whole_gradients

    @cached_property
    def _some_hold(self) -> bool:
        return bool(self.holds_whole_gradients.any())

    def _reducing(self, unit: Floats, last_weight: Floats) -> Floats:
        """A unit's gradients while they are reduced: their input, its copy, and the result.

        Before, both the gradients and the input; torch keeps the last gradient a little longer.
        """
        element, reduced = self.element_bytes, self.reduced_bytes
        sent = self._sent_bytes * unit + element * last_weight
        if not self._some_hold:
            return np.maximum((element + reduced) * unit, sent)
        whole = self.holds_whole_gradients
        taken = np.where(whole, reduced, element + reduced) * unit
        found: Floats = np.maximum(taken, sent) - np.where(whole, reduced * unit, 0.0)
        return found

    @cached_property
    def _sent_bytes(self) -> Floats:
        """Bytes of a gradient on its way: the input, its copy, the result."""
        return self.reduced_bytes + self.copied_bytes + 4.0 / self.shards

    def _sharded_head(self) -> tuple[Floats, Floats]:
        none = np.zeros(len(self.head))
        # In a forward pass the buffer of its last gather is kept; in a backward pass ZeRO 3 gathers
        # the last layer.
        more = np.where(self.gathers_again, self.element_bytes * self.layer, 0.0)
        if self.chunks_loss:
            more = np.where(self.holds_whole_gradients, 0.0, self.element_bytes * self.head)
        head = self._gathered(none, self.head, none) + self._whole_gradients + more
        reduced = self._reduced(self.head, self.layer) + self._reducing(self.head, self.head)
        return self._sums + head, self._sums + reduced

    def _sharded_layer(self, done: Floats) -> LayerMoments:
        layer, element = self.layer, self.element_bytes
        before = self.head + done * layer
        following = np.where(done < self.num_layers - 1, layer, self.embedding)
        held = self._held * np.where(done > 0, layer, self.head)
        base = self._sums + self._made_shards * before
        gathered = self._gathered(before, layer, following) + self._whole_gradients
        reduced = self._reduced(before + layer, following)
        return LayerMoments(
            done=done,
            early=base + gathered + held + element * self.product,
            late=base + gathered + held + element * layer,
            reduced=base + reduced + self._reducing(layer, self.product),
        )

    def _sharded_end(self) -> Floats:
        none = np.zeros(len(self.layer))
        before = self.head + self.num_layers * self.layer
        base = self._sums + self._made_shards * before
        own = self._gathered(before, self.embedding, none) + self._whole_gradients
        own = own + self.element_bytes * self.embedding
        reduced = self._reduced(before + self.embedding, none)
        return base + np.maximum(
            own + self._held * self.layer,
            reduced + self._reducing(self.embedding, self.embedding),
        )
