"""How a framework writes one number of a job: as settings, in the user's program, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from orchestrator.core.frameworks.job import Job
from orchestrator.core.problem.layout import NAMED_AXES

# Names of the numbers of a job: the axes of its layout, the sizes of its cell, its processes.
JOB_NUMBERS = (*NAMED_AXES, "sequence_length", "global_batch_size", "processes")


@dataclass(frozen=True, kw_only=True, slots=True)
class Expression:
    """A number of a job in the words of a framework.

    An expression without any field needs no word: the framework derives the number from others,
    or does nothing else by default.
    """

    # Names with dots for the sections of a file: {"parallelism.tp": 2}.
    settings: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    # What the user's own program has to do, as an instruction: "set ... to 2".
    program: str | None = None
    # Why the framework cannot do it.
    impossible: str | None = None


Rule = Callable[[Job], Expression]
DERIVED = Expression()


def settings(**values: Any) -> Expression:
    """Settings whose names have no dots."""
    return Expression(settings=MappingProxyType(values))


def named(values: Mapping[str, Any]) -> Expression:
    """Settings by their full names."""
    return Expression(settings=MappingProxyType(dict(values)))


def program(instruction: str) -> Expression:
    return Expression(program=instruction)


def impossible(reason: str) -> Expression:
    return Expression(impossible=reason)


def derived(job: Job) -> Expression:
    """The rule for a number that the framework derives from the others."""
    del job
    return DERIVED


def written(number: str, setting: str) -> Rule:
    """The rule for a number that is one setting."""

    def rule(job: Job) -> Expression:
        return named({setting: job.number(number)})

    return rule


def only_one(axis: str, reason: str) -> Rule:
    """The rule for an axis that is always 1."""

    def rule(job: Job) -> Expression:
        return DERIVED if job.number(axis) == 1 else impossible(reason)

    return rule


def sequence_length_of_dataset(job: Job) -> Expression:
    """The rule for a sequence length that only the dataset knows."""
    length = job.cell.sequence_length
    return program(f"have your dataset return sequences of {length} tokens")
