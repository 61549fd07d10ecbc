"""A sweep of many quick trials on a PostgreSQL that is disconnected, killed and gone."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.long_sweep import SWEEP
from db.store import Store
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.protocol import Device
from orchestrator.sweep.progress import Stop
from tests.faults import forks, small_sweep
from tests.faults.campaign import Outcome
from tests.faults.history import Log, Seen, judge
from tests.faults.postgresql import Server
from tests.faults.witness import WitnessedStore
from tests.sweep.fake_scheduler import FakeScheduler

NAME = "many"
MOST_SECONDS_APART = 0.15  # of two ends of all connections
# With fewer, little could be lost; on a busy machine they outlast the ends.
FEWEST_RESULTS = 101
RESULTS_SECONDS = 120.0


def terminations(
    postgresql: Server, folder: Path, *, seed: int, count: int, away_seconds: float
) -> Outcome:
    """End so many connections; half-way kill the server, which is back after some seconds."""
    log, over, began = Log(folder / "seen.jsonl"), folder / "over", time.monotonic()
    out = Outcome(campaign="outages", seed=seed)
    Store.open(postgresql.url).close()

    def orchestrate() -> None:
        of = SweepSpec.model_validate(
            {**SWEEP, "name": NAME, "search": {"strategy": "exhaustive", "confirm": {"repeats": 0}}}
        )
        scheduler = FakeScheduler(
            lambda request: 0.001 * request.trial_id, slots=4, device=Device.CUDA
        )
        with WitnessedStore.seen_by(log, postgresql.url) as store:
            stop = lambda: Stop.DRAIN if over.exists() else Stop.GO_ON  # noqa: E731
            small_sweep.run(
                store, of=of, open_scheduler=lambda: scheduler, run_root=folder.joinpath, stop=stop
            )

    before = postgresql.num_ended
    with forks.running(orchestrate) as orchestrator:
        _await_results(log, orchestrator, fewest=1)  # else a sweep would never begin
        with postgresql.ending_connections(most_seconds=MOST_SECONDS_APART, seed=seed):
            _wait_for(postgresql, before + count // 2, orchestrator)
            postgresql.kill()
            time.sleep(away_seconds)
            postgresql.start()
            _wait_for(postgresql, before + count, orchestrator)
            _await_results(log, orchestrator, fewest=FEWEST_RESULTS)
            over.touch()
            if (code := forks.wait(orchestrator)) != 0:
                out.complaints.append(f"the orchestrator ended with {code}")
    with Store.open(postgresql.url) as store:
        verdict = judge(store, NAME, log.entries())
    out.victims = {"connection": postgresql.num_ended - before, "server": 1}
    out.acknowledged, out.max_attempts = verdict.acknowledged, verdict.max_attempts
    for kind in ("lost", "duplicated", "stuck", "broken"):
        setattr(out, kind, len(getattr(verdict, kind)))
    out.complaints += verdict.complaints
    out.seconds = round(time.monotonic() - began, 1)
    return out


def _await_results(log: Log, orchestrator: int, *, fewest: int) -> None:
    until = time.monotonic() + RESULTS_SECONDS
    while time.monotonic() < until and not forks.has_ended(orchestrator):
        if sum(entry.seen is not Seen.LAUNCHED for entry in log.entries()) >= fewest:
            return
        time.sleep(0.5)


def _wait_for(postgresql: Server, num_ended: int, orchestrator: int) -> None:
    while postgresql.num_ended < num_ended and not forks.has_ended(orchestrator):
        time.sleep(0.05)
