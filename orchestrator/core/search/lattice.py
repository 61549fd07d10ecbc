"""The candidates of one cell as points: named axes with places, and a prior belief in each point.

It knows nothing of layouts: an axis may be a parallel size, an attention kernel or any word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from orchestrator.core.physics.trainer import USABLE_SHARE
from orchestrator.core.problem.arrays import Floats, Ints, Mask

UNKNOWN_LEVEL_SD = 3.0  # of a logarithm: a factor 20


@dataclass(frozen=True, kw_only=True, eq=False)
class LatticeAxis:
    """One dimension: its distinct values as steps 0..k-1, each with a place on a scale."""

    name: str
    ordered: bool
    steps: Ints  # of each row
    places: Floats  # of each step

    def __len__(self) -> int:
        return len(self.places)

    @classmethod
    def of(cls, name: str, values: Sequence[float], *, doublings: bool = False) -> LatticeAxis:
        """Return an ordered axis of numbers, on a linear scale or in doublings."""
        distinct, steps = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True)
        return cls(
            name=name,
            ordered=True,
            steps=steps.astype(np.int64),
            places=np.log2(distinct) if doublings else distinct,
        )

    @classmethod
    def of_words(cls, name: str, words: Sequence[str]) -> LatticeAxis:
        """Return an axis of words, without order: two are equal or not."""
        distinct, steps = np.unique(np.asarray(words, dtype=np.str_), return_inverse=True)
        return cls(
            name=name,
            ordered=False,
            steps=steps.astype(np.int64),
            places=np.arange(len(distinct), dtype=np.float64),
        )

    def take(self, rows: Ints) -> LatticeAxis:
        """Return the same axis for some of the rows."""
        return replace(self, steps=self.steps[rows])


@dataclass(frozen=True, kw_only=True, eq=False)
class Belief:
    """A Gaussian belief in a logarithm, per row: `mean + basis @ w + residual`.

    w ~ N(0, covariance) are the uncertain constants of a prediction, and the basis is its Jacobian:
    a value of one row informs all rows that depend on the same constant. The axes explain the
    residual.
    """

    mean: Floats  # n
    basis: Floats  # n x k
    covariance: Floats  # k x k
    residual_sd: float | None = None  # None: not known, to be learned

    @classmethod
    def nothing(cls, num_rows: int) -> Belief:
        """Return a belief in one unknown level for all rows."""
        return cls(
            mean=np.zeros(num_rows),
            basis=np.ones((num_rows, 1)),
            covariance=np.array([[UNKNOWN_LEVEL_SD**2]]),
        )

    @property
    def loadings(self) -> Floats:
        """The matrix F with F F^T = basis covariance basis^T: n x k for n rows and k constants."""
        values, vectors = np.linalg.eigh(self.covariance)
        factor: Floats = vectors * np.sqrt(np.maximum(values, 0.0))
        return self.basis @ factor

    def take(self, rows: Ints) -> Belief:
        """Return the same belief in some of the rows."""
        return replace(self, mean=self.mean[rows], basis=self.basis[rows])

    def __len__(self) -> int:
        return len(self.mean)


@dataclass(frozen=True, kw_only=True, eq=False)
class Lattice:
    """The rows of a search: axes, beliefs and the limit that memory must keep to."""

    axes: tuple[LatticeAxis, ...]
    seconds: Belief | None = None  # natural logarithm; None: not predicted
    memory: Belief | None = None  # natural logarithm of peak bytes
    memory_limit_bytes: float | None = None
    # The share of that limit that a peak may fill.
    usable_share: float = USABLE_SHARE
    in_seconds: bool = True  # False: another unit of time
    # n: probability that a row fails by a fault of its layout or the code, from other sweeps.
    fails: Floats | None = None
    # Names of axes whose values no formula knows: each value, in their order, is one of the last
    # constants of both beliefs.
    options: tuple[str, ...] = ()

    def __len__(self) -> int:
        if self.axes:
            return len(self.axes[0].steps)
        return len(self.seconds) if self.seconds is not None else 1

    def take(self, rows: Ints) -> Lattice:
        """Return some of the rows."""
        return replace(
            self,
            axes=tuple(axis.take(rows) for axis in self.axes),
            seconds=None if self.seconds is None else self.seconds.take(rows),
            memory=None if self.memory is None else self.memory.take(rows),
            fails=None if self.fails is None else self.fails[rows],
        )

    @property
    def places(self) -> Floats:
        """The places of the rows: rows x axes."""
        if not self.axes:
            return np.zeros((len(self), 0))
        return np.stack([axis.places[axis.steps] for axis in self.axes], axis=1)

    @property
    def ordered(self) -> Mask:
        """True for each axis whose values have an order."""
        return np.array([axis.ordered for axis in self.axes], dtype=np.bool_)
