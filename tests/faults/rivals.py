"""Two orchestrators and one sweep: at once, or one is stopped, replaced, and wakes.

Judged like any other run, and by exit codes: 5 without the lease.
"""

from __future__ import annotations

import gc
import math
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from orchestrator.core.errors import SweepInUse
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.protocol import Device, TrialRequest
from orchestrator.sweep import lease
from tests.faults import forks, small_sweep
from tests.faults.fresh_stores import Fresh
from tests.faults.history import Log, judge
from tests.faults.witness import WitnessedStore
from tests.sweep.fake_scheduler import FakeScheduler

HELD = SweepInUse.exit_code
LEASE_SECONDS = 0.15  # instead of 30 s
TRIAL_SECONDS = 0.005
START_SECONDS = 180.0  # for a first launch, when busy
OF = small_sweep.spec(gpus=[1])
NUM_TRIALS = 6


@dataclass(kw_only=True)
class Rivalry:
    """What came of it."""

    rounds: int = 0
    # Orchestrators that launched something, slept past their lease, and ended with 5.
    replaced: int = 0
    acknowledged: int = 0
    complaints: list[str] = field(default_factory=list)
    cut_short: bool = False  # the seconds were over first
    exits: Counter[tuple[int, ...]] = field(default_factory=Counter)


def pauses(
    fresh: Fresh,
    folder: Path,
    *,
    count: int,
    seed: int,
    seconds: float = 600.0,
    worker: int = 0,
    enough: float = math.inf,
) -> Rivalry:
    """Stop an orchestrator past its lease and start another, until `enough` were replaced."""
    chance, found = random.Random(seed), Rivalry()
    log = Log(folder / f"rivals-{worker}.jsonl")
    with WitnessedStore.seen_by(log, fresh(worker)) as store:
        run_seconds, until = _warm(store, fresh, worker), time.monotonic() + seconds
        for number in range(count):
            if time.monotonic() > until or found.replaced >= enough:
                found.cut_short = found.replaced < enough
                break
            fresh(worker)
            log.path.unlink(missing_ok=True)
            with forks.running(partial(_orchestrate, store)) as first:
                if chance.random() < 0.8:  # others may stop before that
                    _await_launch(log, first)
                time.sleep(chance.uniform(0.0, run_seconds / 2))
                os.kill(first, signal.SIGSTOP)
                had_begun = bool(log.entries())  # its own launches and ends
                time.sleep(LEASE_SECONDS * 1.2)
                with forks.running(partial(_orchestrate, store)) as second:
                    time.sleep(chance.uniform(0.0, run_seconds))
                    os.kill(first, signal.SIGCONT)
                    codes = forks.wait(first), forks.wait(second)
            found.replaced += had_begun and codes[0] == HELD
            _close(found, store, codes, f"pause {number}")
    return found


def races(fresh: Fresh, folder: Path, *, count: int, rivals: int = 4, worker: int = 0) -> Rivalry:
    """Have several begin at the same moment: one works, the others end at once."""
    found = Rivalry()
    log = Log(folder / f"rivals-{worker}.jsonl")
    with WitnessedStore.seen_by(log, fresh(worker)) as store:
        _warm(store, fresh, worker)
        for number in range(count):
            fresh(worker)
            log.path.unlink(missing_ok=True)
            at = time.monotonic() + 0.05
            pids = [forks.start(partial(_orchestrate, store, at=at)) for _ in range(rivals)]
            codes = tuple(sorted(forks.wait(pid) for pid in pids))
            _close(found, store, codes, f"race {number}")
    return found


def _warm(store: WitnessedStore, fresh: Fresh, worker: int) -> float:
    """Import and compile everything, and see how long the sweep takes."""
    small_sweep.run(store, of=OF, open_scheduler=_scheduler)
    store._database.close()
    fresh(worker)
    began = time.monotonic()
    small_sweep.run(store, of=OF, open_scheduler=_scheduler)
    seconds = time.monotonic() - began
    store._database.close()
    gc.freeze()
    return seconds


def _orchestrate(store: WitnessedStore, *, at: float = 0.0) -> None:
    lease.LEASE_SECONDS, lease.RENEW_SECONDS = LEASE_SECONDS, LEASE_SECONDS / 3
    time.sleep(max(0.0, at - time.monotonic()))
    small_sweep.run(store.as_another(), of=OF, open_scheduler=_scheduler)


def _await_launch(log: Log, orchestrator: int) -> None:
    """Wait until it has launched a trial, or has ended without."""
    until = time.monotonic() + START_SECONDS
    while not log.path.exists() and not forks.has_ended(orchestrator) and time.monotonic() < until:
        time.sleep(0.002)


def _scheduler() -> FakeScheduler:
    def ending(request: TrialRequest) -> float | FailureKind:
        time.sleep(TRIAL_SECONDS)
        return small_sweep.ending(request)

    return FakeScheduler(ending, slots=3, device=Device.CUDA)


def _close(found: Rivalry, store: WitnessedStore, codes: Sequence[int], name: str) -> None:
    """Judge one round, after somebody has worked on to the end."""
    found.rounds += 1
    found.exits[tuple(codes)] += 1
    complaints = [f"an orchestrator ended with {code}" for code in codes if code not in (0, HELD)]
    if (code := forks.outcome(partial(_orchestrate, store))) != 0:
        complaints.append(f"the last one ended with {code}")
    with suppress(FileNotFoundError):
        verdict = judge(store, OF.name, store.log.entries(), num_trials=NUM_TRIALS)
        found.acknowledged += verdict.acknowledged
        complaints += verdict.complaints
    store._database.close()
    found.complaints += [f"{name}: {text}" for text in complaints]
