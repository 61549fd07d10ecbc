"""Kills around a program of workload `command` that leaves daemons behind (stubborn.py).

`python -m tests.faults.program_kills agents|ray URL FOLDER SEED KILLS SECONDS`: with launchers
alone, or with calls of `sweep run`, each on a local Ray. None of the processes may be left.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from layout_sweep.child_processes import children
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.node.processes import descendants, kill, start_time
from tests.faults import stubborn
from tests.faults.campaign import SURVIVOR_SECONDS, VICTIMS, Campaign, Outcome
from tests.faults.evidence import EVIDENCE, alive_within, options

START_SECONDS = 180.0
MOST_LATE_SECONDS = 1.0
FOLDERS_SECONDS = 5.0
# The processes that are killed, together where there are several. At least one of the wardens and
# the server is left: see the decision.
ON_RAY: Sequence[Sequence[str]] = (
    ("orchestrator",),
    ("raylet",),
    ("gcs_server",),
    ("agent",),
    ("orchestrator", "raylet"),
    ("orchestrator", "warden"),
    ("orchestrator", "inner_warden"),
    ("orchestrator", "rank_server"),
    ("orchestrator", "rank"),
    ("orchestrator", "warden", "inner_warden"),
    ("orchestrator", "warden", "rank_server"),
    ("orchestrator", "inner_warden", "rank_server"),
    ("orchestrator", "guard"),
    ("agent", "warden", "inner_warden"),
)


class ProgramCampaign(Campaign):
    """The usual campaign, whose trials are programs that end and leave everybody behind."""

    VICTIMS: Mapping[str, int] = VICTIMS | {"agent_and_children": 2}

    def _spec(self) -> SweepSpec:
        usual = super()._spec()
        return usual.model_validate(
            usual.model_dump() | {"workload": {"name": "command", "options": options("end")}}
        )

    def _strike(self, orchestrator: int, victim: str) -> bool:
        if victim != "agent_and_children":
            return super()._strike(orchestrator, victim)
        levels = self._levels(orchestrator)
        if len(levels) < 2:
            return False
        agent = self._chance.choice(levels[1])
        for pid in (*children(agent), agent):  # as Ray without its driver
            kill(pid)
        self._out.strike(victim)
        return True

    def _survivors(self, patience_seconds: float) -> list[int]:
        seen = super()._survivors(patience_seconds)
        files = list(self._folder.glob(f"runs/**/{EVIDENCE}"))
        left = alive_within(0.0 if seen else patience_seconds, files)
        self._out.complaints += [f"alive after {patience_seconds:.0f} s: {who}" for who in left]
        for file in files:
            file.unlink()
        return seen


class RayProgramKills:
    """Calls of `sweep run`, some of whose processes are killed while programs run."""

    def __init__(self, folder: Path, *, seed: int) -> None:
        self._folder, self._chance = folder, random.Random(seed)
        self._out = Outcome(campaign="programs-on-ray", seed=seed)

    def run(self, *, kills: int, seconds: float) -> Outcome:
        began = time.monotonic()
        for number in range(kills):
            if time.monotonic() - began > seconds:
                self._out.cut_short = True
                break
            self.strike(ON_RAY[number % len(ON_RAY)], number)
        self._out.seconds = round(time.monotonic() - began, 1)
        return self._out

    def strike(self, victims: Sequence[str], number: int) -> None:
        """One call, from its start to its end."""
        folder = self._folder / str(number)
        folder.mkdir()
        with (folder / "said.txt").open("wb") as said:
            call = subprocess.Popen(
                [
                    Path(sys.executable).parent / "sweep",
                    "run",
                    _sweep_file(folder, self._chance.choice(["stop", "go on"])),
                ],
                cwd=folder,
                env={
                    name: value
                    for name, value in os.environ.items()
                    if name not in ("SWEEP_HOME", "RAY_ADDRESS")
                }
                | {"SWEEP_DB": f"sqlite:///{folder}/sweep.sqlite"},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
        try:
            evidence = self._await_programs(call, folder)
            if not evidence:
                self._out.complaints.append(
                    f"{folder.name}: no program ran: {(folder / 'said.txt').read_text()[-500:]}"
                )
                return
            time.sleep(self._chance.uniform(0.0, MOST_LATE_SECONDS))
            self._kill(call.pid, victims, evidence)
        finally:
            call.kill()
            call.wait()
        self._look_for_folders(call.pid, victims)

    def _kill(self, call: int, victims: Sequence[str], evidence: Sequence[Path]) -> None:
        below = descendants(call)
        seen = {pid: start_time(pid) for pid in below}
        who = _who(call, below)
        missing = [victim for victim in victims if victim not in who]
        if missing:
            self._out.complaints.append(f"nobody is {', '.join(missing)} of {sorted(who)}")
            return
        for victim in victims:
            kill(who[victim])
            self._out.strike(victim)
        self._out.looks += 1
        until = time.monotonic() + SURVIVOR_SECONDS
        left = alive_within(SURVIVOR_SECONDS, evidence)
        if "orchestrator" in victims:
            left += _named(_left_of(seen, until=until))
        self._out.leaked_processes += len(left)
        self._out.complaints += [
            f"{' and '.join(victims)} killed, alive after {SURVIVOR_SECONDS:.0f} s: {text}"
            for text in left
        ]

    def _await_programs(self, call: subprocess.Popen[bytes], folder: Path) -> list[Path]:
        until = time.monotonic() + START_SECONDS
        while call.poll() is None and time.monotonic() < until:
            files = list(folder.glob(f".sweep/runs/**/{EVIDENCE}"))
            if sum(_num_kinds(file) == 1 + len(stubborn.KINDS) for file in files) == len(files) > 0:
                return files
            time.sleep(0.02)
        return []

    def _look_for_folders(self, call: int, victims: Sequence[str]) -> None:
        """Ray's, of that call. Where its guard was killed with it, the next guard removes it."""
        until = time.monotonic() + FOLDERS_SECONDS
        while (left := _ray_folders(call)) and time.monotonic() < until:
            time.sleep(0.05)
        if left and "guard" not in victims:
            self._out.complaints.append(
                f"{' and '.join(victims)} killed, Ray's folder is left: {left}"
            )


def _ray_folders(call: int) -> list[str]:
    return [path.name for path in Path("/tmp").glob(f"sweep-{call}-*")]


def _left_of(seen: Mapping[int, int | None], *, until: float) -> list[int]:
    while alive := [
        pid for pid, started in seen.items() if started is not None and start_time(pid) == started
    ]:
        if time.monotonic() > until:
            break
        time.sleep(0.02)
    return alive


def _named(pids: Iterable[int]) -> list[str]:
    return [f"{_command(pid)[:60]} {pid}" for pid in pids]


def _num_kinds(file: Path) -> int:
    return len({line.split()[0] for line in file.read_text().splitlines()})


def _who(call: int, below: Sequence[int]) -> dict[str, int]:
    """The processes of one call by what they are."""
    commands = {pid: _command(pid) for pid in below}
    chain = [pid for pid in below if "orchestrator.node.rank_server" in commands[pid]]
    found = {"orchestrator": call} | dict(
        zip(("warden", "inner_warden", "rank_server", "rank"), chain, strict=False)
    )
    for pid, command in commands.items():
        for name, sign in {
            "raylet": "/raylet/raylet",
            "gcs_server": "gcs_server",
            "agent": "ray::NodeAgent",
            "guard": "cluster.ray.guard",
        }.items():
            if sign in command.partition(" --")[0]:
                found.setdefault(name, pid)
    return found


def _command(pid: int) -> str:
    with suppress(OSError):
        return (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    return ""


def _sweep_file(folder: Path, then: str) -> Path:
    content = {
        "name": "t",
        "model": "llama-tiny",
        "gpus": 2,
        "device": "cpu",
        "sequence_length": 64,
        "global_batch_size": 64,
        "axes": {"micro_batch_size": [1]},
        "measurement": {"warmup_steps": 2, "min_steps": 5, "max_steps": 6, "precision": 0.5},
        "workload": {"name": "command", "options": options(then)},
    }
    path = folder / "t.yaml"
    path.write_text(json.dumps(content))  # JSON is YAML
    return path


def main() -> int:
    what, url, folder, seed, kills, seconds = sys.argv[1:]
    if what == "agents":
        out = ProgramCampaign(url, Path(folder), seed=int(seed), name="programs").run(
            kills=int(kills), seconds=float(seconds)
        )
    else:
        out = RayProgramKills(Path(folder), seed=int(seed)).run(
            kills=int(kills), seconds=float(seconds)
        )
    print("OUT " + json.dumps(out.as_json()))
    return 0 if out.is_clean else 1


if __name__ == "__main__":
    raise SystemExit(main())
