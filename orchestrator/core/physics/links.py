"""The speed of collectives over the links of a machine or cluster, and what steps take by it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.core.physics.collective_group import ring_seconds
from orchestrator.core.physics.link_sample import (
    PASSES,
    Collective,
    LinkSample,
    Span,
    bus_factor,
)
from orchestrator.core.physics.robust_fit import fit, robust_sd
from orchestrator.core.physics.step_time_constants import PRIORS, StepTimeConstants
from orchestrator.core.problem.arrays import Floats
from orchestrator.core.problem.hardware import Hardware

# In log seconds: how far calls are from a straight line; NCCL changes its algorithm with the size.
LINE_SD = 0.1
# In log seconds: what the formulas of step times miss of a collective.
NETWORK_SD = 0.15
# The spread of a constant's logarithm before the fit, if the measurements show the constant.
FIRST_SD = 1.0
# How far collectives of training differ, at least, from those of a benchmark: buckets, overlap,
# neighbours.
LIMITED_SD = 0.1
# Sizes of messages that a line needs: two fit any.
FEWEST_SIZES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkFit:
    """A collective over a span as a line: a latency, and a bandwidth beyond it."""

    collective: Collective
    span: Span
    latency_seconds: float
    bus_bytes_per_second: float
    residual_sd: float  # of log seconds
    num_sizes: int


def fit_links(samples: Iterable[LinkSample]) -> list[LinkFit]:
    """Return the line of every collective and span that has FEWEST_SIZES sizes.

    Calls that something disturbed count for less.
    """
    groups: dict[tuple[Collective, Span], list[LinkSample]] = {}
    for sample in samples:
        groups.setdefault((sample.collective, sample.span), []).append(sample)
    return [
        _fit_line(group)
        for group in groups.values()
        if len({sample.message_bytes for sample in group}) >= FEWEST_SIZES
    ]


def _fit_line(samples: Sequence[LinkSample]) -> LinkFit:
    first = samples[0]
    factor = bus_factor(first.collective, first.span.num_ranks)
    through = np.array([sample.message_bytes * factor for sample in samples])
    seconds = np.array([sample.seconds for sample in samples])

    def residuals(x: Floats) -> Floats:
        found: Floats = (np.log(np.exp(x[0]) + through * np.exp(x[1])) - np.log(seconds)) / LINE_SD
        return found

    largest = int(np.argmax(through))
    start = np.log([seconds.min(), seconds[largest] / through[largest]])
    found = fit(residuals, mean=start, covariance=np.eye(2) * 3.0**2, weights=np.ones(len(samples)))
    return LinkFit(
        collective=first.collective,
        span=first.span,
        latency_seconds=float(np.exp(found.parameters[0])),
        bus_bytes_per_second=float(np.exp(-found.parameters[1])),
        residual_sd=robust_sd(
            found.residuals * LINE_SD, expected=LINE_SD, prior_count=1.0, count=float(len(samples))
        ),
        num_sizes=len(samples),
    )


# The constants of step times that collectives show: inside a node, and between nodes.
INSIDE = ("intra_node_share", "collective_seconds")
ACROSS = ("inter_node_share", "inter_node_collective_seconds", "node_congestion")


@dataclass(frozen=True, kw_only=True, eq=False)
class Network:
    """Constants of step times by measured collectives; only those that these show."""

    names: tuple[str, ...]
    log_means: Floats
    log_covariance: Floats
    num_samples: int
    residual_sd: float  # of log seconds

    def value(self, name: str) -> float:
        """Return one of `names`, in the unit of `StepTimeConstants`.

        Raises ValueError for a constant that the collectives do not show.
        """
        return float(np.exp(self.log_means[self.names.index(name)]))


def network_of(samples: Sequence[LinkSample], hardware: Hardware) -> Network | None:
    """Return the constants of a device's links, fitted to collectives over them.

    None: no ring of several ranks was measured.
    """
    rings = [
        sample for sample in samples if sample.collective in PASSES and sample.span.num_ranks > 1
    ]
    if not rings:
        return None
    num_nodes = {sample.span.num_nodes for sample in rings}
    names: tuple[str, ...] = INSIDE if 1 in num_nodes else ()
    across = num_nodes - {1}
    if across:
        names += ACROSS if len(across) > 1 else ACROSS[:2]
    passes = np.array([PASSES[sample.collective] for sample in rings])
    ranks = np.array([float(sample.span.num_ranks) for sample in rings])
    nodes = np.array([float(sample.span.num_nodes) for sample in rings])
    num_bytes = np.array([float(sample.message_bytes) for sample in rings])
    measured = np.log([sample.seconds for sample in rings])

    def residuals(x: Floats) -> Floats:
        constants = StepTimeConstants(**dict(zip(names, np.exp(x).tolist(), strict=True)))
        one = ring_seconds(
            num_ranks=ranks,
            num_nodes=nodes,
            num_bytes=num_bytes,
            hardware=hardware,
            constants=constants,
        )
        found: Floats = (np.log(passes * one) - measured) / NETWORK_SD
        return found

    start = _first_guess(names, rings, hardware)
    found = fit(
        residuals,
        mean=start,
        covariance=np.eye(len(names)) * FIRST_SD**2,
        weights=np.ones(len(rings)),
    )
    return Network(
        names=names,
        log_means=found.parameters,
        log_covariance=found.covariance + np.eye(len(names)) * LIMITED_SD**2,
        num_samples=len(rings),
        residual_sd=robust_sd(
            found.residuals * NETWORK_SD,
            expected=NETWORK_SD,
            prior_count=1.0,
            count=float(len(rings)),
        ),
    )


def _first_guess(names: Sequence[str], rings: Sequence[LinkSample], hardware: Hardware) -> Floats:
    """Guess bandwidths and latencies by lines of the smallest spans, congestion by its prior."""
    guesses = {name: PRIORS[name].median for name in names}
    for crosses, share, latency, data_sheet in (
        (False, *INSIDE, hardware.intra_node_bandwidth),
        (True, *ACROSS[:2], hardware.inter_node_bandwidth),
    ):
        lines = [line for line in fit_links(rings) if (line.span.num_nodes > 1) is crosses]
        if lines:
            least = min(lines, key=lambda line: (line.span.num_ranks, -line.num_sizes))
            cards = least.span.num_ranks / least.span.num_nodes if crosses else 1.0
            guesses[share] = least.bus_bytes_per_second / cards / data_sheet
            pass_seconds = least.latency_seconds / PASSES[least.collective]
            guesses[latency] = 3.0 * pass_seconds / np.log2(least.span.num_ranks)
    return np.log([guesses[name] for name in names])
