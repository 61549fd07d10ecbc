"""Kills random processes of orchestrators with real launchers and ranks, and judges the end.

`python -m tests.faults.campaign URL FOLDER SEED KILLS SECONDS`: a program, to keep forks small.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from layout_sweep.child_processes import children
from orchestrator.cluster.contract import Scheduler
from orchestrator.core.errors import ClusterUnavailable
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.protocol import Device
from orchestrator.node.processes import kill, start_time
from orchestrator.sweep.progress import Stop
from tests.faults import forks, small_sweep
from tests.faults.agents import AgentScheduler
from tests.faults.history import Log, Seen, judge
from tests.faults.witness import WitnessedStore
from tests.sweep.fake_scheduler import FakeScheduler

# Promised: by then nothing is left of a killed orchestrator.
SURVIVOR_SECONDS = 5.0
# From a launch to a kill: a trial takes 0.05 s and more.
LONGEST_WAIT_SECONDS = 0.1
# For a launch between two kills, without which there would be no progress.
PATIENCE_SECONDS = 3.0
# From the fork of an orchestrator without processes to its death.
LONGEST_SCRIPTED_SECONDS = 0.4
START_SECONDS = 180.0  # for a first launch, when busy
# How often each is the victim; by how far it is below the orchestrator.
VICTIMS = {
    "orchestrator": 3,
    "agent": 2,
    "warden": 1,
    "inner_warden": 1,
    "rank_server": 1,
    "rank": 6,
}
LEVELS = ("orchestrator", "agent", "warden", "inner_warden", "rank_server", "rank")
KILLED = (
    *LEVELS,
    "raylet",
    "head",
)  # victims that are killed processes
LEAKS = {"fault": "leak_children", "at": "init", "probability": 0.2}


@dataclass(kw_only=True)
class Outcome:
    """What a campaign came to: one line of JSON."""

    campaign: str
    seed: int
    victims: dict[str, int] = field(default_factory=dict)  # how many of each kind
    acknowledged: int = 0
    lost: int = 0
    duplicated: int = 0
    stuck: int = 0
    broken: int = 0
    leaked_processes: int = 0
    looks: int = 0  # searches for leftover processes
    # Orchestrators that slept past their lease, and woke after their successor's start.
    replaced: int = 0
    cut_short: bool = False  # its time was too short
    max_attempts: int = 0
    # From an orchestrator's death to the first launch of the next.
    slowest_takeover_seconds: float = 0.0
    seconds: float = 0.0
    complaints: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        return sum(self.victims.get(kind, 0) for kind in KILLED)

    @property
    def is_clean(self) -> bool:
        return not self.complaints and not self.leaked_processes

    def strike(self, kind: str) -> None:
        """Count one victim more."""
        self.victims[kind] = self.victims.get(kind, 0) + 1

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"kills": self.kills, "complaints": self.complaints[:20]}


def outcome_of(told: Mapping[str, Any]) -> Outcome:
    """What another process told as JSON."""
    return Outcome(**{name: value for name, value in told.items() if name != "kills"})


def spec(name: str, *, num_recomputations: int) -> SweepSpec:
    """Ten micro-batch sizes, four ZeRO stages, and as many recomputations."""
    recomputations = ["none", *(f"full:{k}" for k in range(1, num_recomputations))]
    return SweepSpec.model_validate(
        {
            "name": name,
            "model": {"preset": "llama-tiny", "num_layers": 40, "name": "tiny-40"},
            "gpus": 2,
            "device": "cpu",
            "sequence_length": 64,
            "global_batch_size": 1024,
            "axes": {
                "data_parallel_size": [2],
                "recompute": recomputations,
                "zero_stage": [0, 1, 2, 3],
            },
            "measurement": {"warmup_steps": 2, "min_steps": 5, "max_steps": 5, "precision": 0.5},
            "workload": {
                "name": "synthetic",
                "options": {"device_memory_bytes": 1 << 50, "faults": [LEAKS]},
            },
            "search": {
                "strategy": "exhaustive",
                "max_parallel_trials": 2,
                "confirm": {"repeats": 0},
            },
        }
    )


class Campaign:
    """Kills until it has enough, or the time is over. `scripted`: orchestrators alone."""

    VICTIMS: Mapping[str, int] = VICTIMS

    def __init__(
        self, url: str, folder: Path, *, seed: int, name: str = "processes", scripted: bool = False
    ) -> None:
        self._chance, self._folder, self._url, self._name = random.Random(seed), folder, url, name
        self._scripted = scripted
        self._num_recomputations = 2 if scripted else 40  # few, to begin and end soon
        self._num_sweeps = 0
        self._over = folder / "over"
        self._seen: dict[
            int, int
            # Process below an orchestrator -> start time.
        ] = {}
        self._out = Outcome(campaign=name, seed=seed)

    def run(self, *, kills: int, seconds: float) -> Outcome:
        began = time.monotonic()
        with WitnessedStore.seen_by(Log(self._folder / "none.jsonl"), self._url) as self._store:
            gc.freeze()
            self._begin_sweep()
            while (
                self._out.kills < kills
                and time.monotonic() - began < seconds
                and not self._out.complaints
            ):
                self._kill_repeatedly(kills, until=began + seconds)
            self._out.cut_short = self._out.kills < kills and not self._out.complaints
            self._over.touch()
            self._end_sweep()
        self._out.seconds = round(time.monotonic() - began, 1)
        return self._out

    def _begin_sweep(self) -> None:
        self._num_sweeps += 1
        self._sweep = f"{self._name}-{self._num_sweeps}"
        self._store.log = self._log = Log(self._folder / f"{self._sweep}.jsonl")

    def _end_sweep(self) -> None:
        """Have it worked on to the end that it is to have, and judge it."""
        if (code := forks.outcome(self._orchestrate)) != 0:
            self._out.complaints.append(f"{self._sweep}: the last orchestrator ended with {code}")
        self._out.leaked_processes += len(self._survivors(SURVIVOR_SECONDS))
        verdict, out = judge(self._store, self._sweep, self._log.entries()), self._out
        out.acknowledged += verdict.acknowledged
        out.max_attempts = max(out.max_attempts, verdict.max_attempts)
        out.lost, out.duplicated = (
            out.lost + len(verdict.lost),
            out.duplicated + len(verdict.duplicated),
        )
        out.stuck, out.broken = out.stuck + len(verdict.stuck), out.broken + len(verdict.broken)
        out.complaints += [f"{self._sweep}: {text}" for text in verdict.complaints]

    def _orchestrate(self) -> None:
        def stop() -> Stop:
            return Stop.DRAIN if self._over.exists() else Stop.GO_ON

        scheduler: Callable[[], Scheduler] = partial(AgentScheduler, self._folder / "runs")
        if self._scripted:
            scheduler = partial(
                FakeScheduler,
                lambda request: 1e-4 * request.trial_id,
                nodes={"a": 2, "b": 2},
                device=Device.CUDA,
            )
        small_sweep.run(
            self._store.as_another(),
            of=self._spec(),
            open_scheduler=scheduler,
            stop=stop,
            run_root=self._folder.joinpath,
        )

    def _spec(self) -> SweepSpec:
        return spec(self._sweep, num_recomputations=self._num_recomputations)

    def _kill_repeatedly(self, kills: int, *, until: float) -> None:
        """One orchestrator, from its start to its death."""
        with forks.running(self._orchestrate) as orchestrator:
            if self._scripted:
                time.sleep(self._chance.uniform(0.0, LONGEST_SCRIPTED_SECONDS))
                if forks.has_ended(orchestrator):
                    self._note_end(forks.wait(orchestrator))
                else:
                    self._strike(orchestrator, "orchestrator")
                return
            if self._chance.random() < 0.7:  # others may die before that
                began = time.monotonic()
                if not self._await_launch(orchestrator, START_SECONDS):
                    self._out.complaints.append(
                        f"an orchestrator launched nothing within {START_SECONDS:.0f} s"
                    )
                    return
                self._out.slowest_takeover_seconds = max(
                    self._out.slowest_takeover_seconds, round(time.monotonic() - began, 2)
                )
            while self._out.kills < kills and time.monotonic() < until:
                if self._chance.random() < 0.8:
                    self._await_launch(orchestrator, PATIENCE_SECONDS)
                time.sleep(self._chance.uniform(0.0, LONGEST_WAIT_SECONDS))
                if forks.has_ended(orchestrator):
                    self._note_end(forks.wait(orchestrator))
                    return
                victim = self._choose_victim(kills)
                if self._strike(orchestrator, victim) and victim == "orchestrator":
                    forks.wait(orchestrator)
                    self._out.leaked_processes += len(self._survivors(SURVIVOR_SECONDS))
                    return

    def _await_launch(self, orchestrator: int, patience_seconds: float) -> bool:
        """Wait for the next launch. True: there was one, or the orchestrator has ended."""
        before, until = self._num_launches(), time.monotonic() + patience_seconds
        while self._num_launches() == before and not forks.has_ended(orchestrator):
            if time.monotonic() > until:
                return False
            time.sleep(0.005)
        return True

    def _choose_victim(self, kills: int) -> str:
        """Choose by how often each is wanted. The last kills are of those that had none yet."""
        missing = self.VICTIMS.keys() - self._out.victims.keys()
        if kills - self._out.kills <= len(missing):
            return self._chance.choice(sorted(missing))
        (victim,) = self._chance.choices(list(self.VICTIMS), list(self.VICTIMS.values()))
        return victim

    def _strike(self, orchestrator: int, victim: str) -> bool:
        """Kill one of a kind, if there is one now."""
        level, levels = LEVELS.index(victim), self._levels(orchestrator)
        if level >= len(levels):
            return False
        kill(
            self._chance.choice(
                [pid for below in levels[level:] for pid in below]
                if victim == "rank"
                else levels[level]
            )
        )
        self._out.strike(victim)
        return True

    def _levels(self, orchestrator: int) -> list[list[int]]:
        """Return the processes by their level below it; all of them are remembered."""
        levels, found = [], [orchestrator]
        while found:
            levels.append(found)
            found = [child for pid in found for child in children(pid)]
        for pid in (pid for below in levels[1:] for pid in below):
            started = start_time(pid)
            if started is not None:
                self._seen[pid] = started
        return levels

    def _survivors(self, patience_seconds: float) -> list[int]:
        """The processes, of all ever seen, that are alive after so many seconds."""
        self._out.looks += bool(self._seen)
        deadline = time.monotonic() + patience_seconds
        while alive := [pid for pid, started in self._seen.items() if start_time(pid) == started]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        self._seen = {pid: self._seen[pid] for pid in alive}
        return alive

    def _note_end(self, code: int) -> None:
        """It ended by itself, perhaps since the kills made five attempts in a row fail."""
        if code == 0:
            self._end_sweep()
            self._begin_sweep()
        elif code != ClusterUnavailable.exit_code:
            self._out.complaints.append(f"an orchestrator ended with {code}")

    def _num_launches(self) -> int:
        return (
            self._log.path.read_bytes().count(f'["{Seen.LAUNCHED}"'.encode())
            if self._log.path.exists()
            else 0
        )


def total(outcomes: Sequence[Outcome]) -> Counter[str]:
    """The sums over campaigns."""
    names = (
        "kills",
        "acknowledged",
        "lost",
        "duplicated",
        "stuck",
        "broken",
        "leaked_processes",
        "looks",
        "replaced",
    )
    return Counter({name: sum(getattr(outcome, name) for outcome in outcomes) for name in names})


if __name__ == "__main__":
    _, url, folder, seed, kills, seconds = sys.argv
    print(
        "OUT "
        + json.dumps(
            Campaign(url, Path(folder), seed=int(seed))
            .run(kills=int(kills), seconds=float(seconds))
            .as_json()
        )
    )
