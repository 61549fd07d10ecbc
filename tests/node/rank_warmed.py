"""A rank program that tells which process has warmed it up, and in which it was forked."""

from __future__ import annotations

import os

from orchestrator.core.trial.protocol import RankResult
from workloads import rank as ranks

_warmed_in: list[int] = []


def warm_up() -> None:
    _warmed_in.append(os.getpid())
    raise SystemExit("forks ranks nevertheless")


def main() -> int:
    return ranks.run(lambda _: RankResult(step_seconds=[0.1] * 6, extra=_facts()))


def _facts() -> dict[str, object]:
    return {"warmed_in": _warmed_in, "forked_by": os.getppid()}
