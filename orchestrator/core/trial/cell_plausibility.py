"""Finds the layouts of a cell whose numbers contradict those of the others."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from orchestrator.core.problem.layout import Layout
from orchestrator.core.trial.digits import is_fine

# Fewer layouts than these may agree, or grow with the micro-batch, by accident.
FEWEST_ALIKE = 3
ALIKE_SHARE = 1e-9
LEAST_SPREAD = 4.0  # of the micro-batch sizes
# The slope of log step time over log micro-batch size. In 187 groups of published runs of the same
# work with three sizes or more, the least slope is -0.05 at most; a micro-batch that takes
# `a + b * size` has 0.2 up to `a = 5.7 b`.
LEAST_SLOPE = 0.2


@dataclass(frozen=True, kw_only=True)
class ToldLayout:
    """The numbers that a program reported for a layout."""

    layout: Layout
    seconds: float  # of a step


def judge_cell(told: Mapping[int, ToldLayout]) -> dict[int, str]:
    """Return the trials of a cell whose numbers contradict those of the others, and why.

    Several layouts do not take the same time to the last digit. Nor does a step take longer with
    each larger micro-batch, since every global batch is the same work.
    """
    return _identical(told) | _growing(told)


def _identical(told: Mapping[int, ToldLayout]) -> dict[int, str]:
    """Find groups of layouts with the same step time."""
    found: dict[int, str] = {}
    groups: list[list[int]] = []
    for key in sorted(told, key=lambda key: told[key].seconds):
        is_new = not groups or (told[key].seconds > told[groups[-1][0]].seconds * (1 + ALIKE_SHARE))
        if is_new:
            groups.append([])
        groups[-1].append(key)
    for group in groups:
        first = told[group[0]]
        if len(group) >= FEWEST_ALIKE and is_fine(first.seconds, first.layout.global_batch_size):
            text = (
                f"{len(group)} layouts report exactly {first.seconds:.12g} s a step: does"
                " the program use its arguments, and write its file anew?"
            )
            found |= dict.fromkeys(group, text)
    return found


def _growing(told: Mapping[int, ToldLayout]) -> dict[int, str]:
    """Find layouts that differ in their micro-batch, with step times that grow with it."""
    groups: dict[Layout, list[int]] = defaultdict(list)
    for key, one in told.items():
        if one.layout.pipeline_parallel_size == 1:  # a pipeline needs many micro-batches
            sequences = one.layout.micro_batch_size * one.layout.grad_accum_steps
            alike = replace(one.layout, micro_batch_size=1, grad_accum_steps=sequences)
            groups[alike].append(key)
    found: dict[int, str] = {}
    for group in groups.values():
        group.sort(key=lambda key: told[key].layout.micro_batch_size)
        sizes = [told[key].layout.micro_batch_size for key in group]
        if len(set(sizes)) < FEWEST_ALIKE or sizes[-1] < LEAST_SPREAD * sizes[0]:
            continue
        slopes = [
            math.log(told[two].seconds / told[one].seconds) / math.log(larger / smaller)
            for (one, smaller), (two, larger) in pairwise(zip(group, sizes, strict=True))
            if larger > smaller
        ]
        if min(slopes) >= LEAST_SLOPE:
            text = (
                "step times grow with the micro-batch, though every step has the same global "
                "batch: the time of one micro-batch? One number for all "
                "of a step's micro-batches and its update is wanted"
            )
            found |= dict.fromkeys(group, text)
    return found
