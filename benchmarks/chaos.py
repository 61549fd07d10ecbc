"""Kills everything that may be killed, thousands of times, and counts what that cost.

python -m benchmarks.chaos [--kills 5000] [--pauses 1000] [--seconds 3600] [--seed N]
    [--only NAME ...] [--out FILE.json]

Prints one line of JSON, and ends with 1 if anything was lost. Deaths at every statement and in
every campaign count as kills. Each part gets its share of the remaining seconds, and leaves what
it does not need to the later parts: on two cores all parts are done in an hour.
"""

from __future__ import annotations

import json
import logging
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine, parser_of, write_result
from tests.faults import outage, small_sweep
from tests.faults.campaign import Campaign, Outcome, outcome_of, total
from tests.faults.crash_points import die_everywhere, small_play
from tests.faults.deaths import of_making, of_upgrade
from tests.faults.faulty_nodes import AMONG_FAULTY_NODES
from tests.faults.fresh_stores import Fresh, fresh_postgresql, fresh_sqlite
from tests.faults.postgresql import Server, server
from tests.faults.rivals import pauses, races
from tests.programs import finished

SHOWN_COMPLAINTS = 20
# More than its share, so that the last sweep can end.
PROGRAM_SECONDS = 300.0
# More than its share, so that a cluster can start and end.
RAY_SECONDS = 900.0


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What a part has to do; the seconds are for this part alone."""

    kills: int
    pauses: int
    seconds: float
    seed: int


def crash_points(bounds: Bounds, folder: Path) -> Iterator[Outcome]:
    """Kill an orchestrator at every statement of twelve trials and of records of bad nodes."""
    plays = {
        "crash-points": small_play(small_sweep.spec(), num_trials=small_sweep.NUM_TRIALS),
        "sick-nodes": AMONG_FAULTY_NODES,
    }
    with server() as postgresql:
        for (name, fresh), (campaign, play) in product(_both(folder, postgresql), plays.items()):
            began = time.monotonic()
            deaths = die_everywhere(play, fresh=fresh, folder=folder)
            yield Outcome(
                campaign=f"{campaign}-{name}",
                seed=0,
                victims={"orchestrator": deaths.num_points},
                acknowledged=deaths.num_acknowledged,
                seconds=round(time.monotonic() - began, 1),
                **_counted(deaths.complaints),
            )


def migrations(bounds: Bounds, folder: Path) -> Iterator[Outcome]:
    """Kill a program at every statement while it creates or upgrades a store."""
    with server() as postgresql:
        urls = {"sqlite": f"sqlite:///{folder}/sweep.sqlite", "postgresql": postgresql.url}
        for (name, url), (play, of) in product(
            urls.items(), {"making": of_making, "upgrade": of_upgrade}.items()
        ):
            began = time.monotonic()
            deaths = of(url, folder)
            yield Outcome(
                campaign=f"{play}-{name}",
                seed=0,
                victims={"migration": deaths["num_points"]},
                seconds=round(time.monotonic() - began, 1),
                complaints=deaths["complaints"],
            )


def scripted(bounds: Bounds, folder: Path) -> Iterator[Outcome]:
    """Kill orchestrators alone, on both databases: the cheapest kills, and so most of them."""
    with server() as postgresql:
        for number, url in enumerate((f"sqlite:///{folder}/scripted.sqlite", postgresql.url)):
            campaign = Campaign(
                url,
                _new(folder / f"scripted-{number}"),
                seed=bounds.seed + number,
                name="scripted",
                scripted=True,
            )
            yield campaign.run(kills=int(0.33 * bounds.kills), seconds=bounds.seconds / 2)


def processes(bounds: Bounds, folder: Path) -> Iterator[Outcome]:
    """Kill orchestrators, agents, wardens, rank servers and ranks, on both databases."""
    with server() as postgresql:
        for number, url in enumerate((f"sqlite:///{folder}/processes.sqlite", postgresql.url)):
            campaign = Campaign(
                url, _new(folder / f"processes-{number}"), seed=bounds.seed + 10 + number
            )
            yield campaign.run(kills=int(0.1 * bounds.kills), seconds=bounds.seconds / 2)


def programs(bounds: Bounds, folder: Path) -> Iterator[Outcome]:
    """Kill everything around programs that leave daemons: launchers alone, and on a local Ray."""
    what = {
        "programs": ("agents", max(10, bounds.kills // 25)),
        "programs-on-ray": ("ray", max(4, bounds.kills // 100)),
    }
    for number, (name, (where, kills)) in enumerate(what.items()):
        seconds, seed = bounds.seconds / len(what), bounds.seed + 30 + number
        place = _new(folder / name)
        arguments = [
            where,
            f"sqlite:///{place}/sweep.sqlite",
            str(place),
            str(seed),
            str(kills),
            str(seconds),
        ]
        yield run_program(
            [sys.executable, "-m", "tests.faults.program_kills", *arguments],
            name=name,
            seed=seed,
            patience_seconds=seconds + PROGRAM_SECONDS,
        )


def starts(bounds: Bounds, folder: Path) -> Iterator[Outcome]:
    """End calls while they start, at random moments: kills, signals and closed terminals."""
    count, seed = max(4, bounds.kills // 50), bounds.seed + 40
    arguments = [str(folder), str(seed), str(count), str(bounds.seconds)]
    yield run_program(
        [sys.executable, "-m", "tests.faults.starts", *arguments],
        name="starts",
        seed=seed,
        patience_seconds=bounds.seconds + PROGRAM_SECONDS,
    )


def rivals(bounds: Bounds, folder: Path) -> Iterator[Outcome]:
    """Start orchestrators at once, and let some sleep past their lease. Kill none."""
    with server() as postgresql:
        for name, fresh in _both(folder, postgresql):
            began = time.monotonic()
            slept = pauses(
                fresh,
                folder,
                count=bounds.pauses // 2,
                seed=bounds.seed,
                seconds=bounds.seconds / 2,
            )
            raced = races(fresh, folder, count=max(1, bounds.pauses // 50))
            yield Outcome(
                campaign=f"rivals-{name}",
                seed=bounds.seed,
                victims={"paused": slept.rounds, "raced": raced.rounds},
                replaced=slept.replaced,
                cut_short=slept.cut_short,
                acknowledged=slept.acknowledged + raced.acknowledged,
                seconds=round(time.monotonic() - began, 1),
                **_counted([*slept.complaints, *raced.complaints]),
            )


def outages(bounds: Bounds, folder: Path) -> Iterator[Outcome]:
    """End PostgreSQL's connections under load, kill its server, and keep it down for 20 s once."""
    with server() as postgresql:
        yield outage.terminations(
            postgresql, _new(folder / "outages"), seed=bounds.seed, count=300, away_seconds=20.0
        )


def on_ray(bounds: Bounds, folder: Path) -> Iterator[Outcome]:
    """On real Ray: kill processes of every kind, run a trial that kills its node, lose messages."""
    what = {"ray": str(max(4, bounds.kills // 200)), "ray-poison": "poison", "ray-rpc": "rpc"}
    for number, (name, kills) in enumerate(what.items()):
        seconds, seed = bounds.seconds / len(what), bounds.seed + 20 + number
        place = _new(folder / name)
        arguments = [f"sqlite:///{place}/sweep.sqlite", str(place), str(seed), kills, str(seconds)]
        yield run_program(
            [sys.executable, "-m", "tests.faults.ray_kills", *arguments],
            name=name,
            seed=seed,
            patience_seconds=seconds + RAY_SECONDS,
        )


def run_program(
    command: Sequence[str], *, name: str, seed: int, patience_seconds: float
) -> Outcome:
    """Run a program until none of its processes is left. A missing outcome is a complaint."""
    try:
        done = finished(command, seconds=patience_seconds)
    except subprocess.TimeoutExpired:
        return Outcome(
            campaign=name,
            seed=seed,
            complaints=[f"it had not ended after {patience_seconds:.0f} s"],
        )
    output = done.stdout.partition("OUT ")[2]
    if output:
        return outcome_of(json.loads(output))
    return Outcome(
        campaign=name,
        seed=seed,
        complaints=[f"it ended with {done.returncode}: {done.stderr[-500:]}"],
    )


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the benchmark, the campaigns that it reports, and its share of the time."""

    run: Callable[[Bounds, Path], Iterator[Outcome]]
    campaigns: Sequence[str]
    # How long the whole part took on 2026-11-22, on two cores that others used at times.
    seconds: float


PARTS: Mapping[str, Part] = {
    "crash-points": Part(
        run=crash_points,
        campaigns=(
            "crash-points-sqlite",
            "sick-nodes-sqlite",
            "crash-points-postgresql",
            "sick-nodes-postgresql",
        ),
        seconds=180.0,
    ),
    "migrations": Part(
        run=migrations,
        campaigns=("making-sqlite", "upgrade-sqlite", "making-postgresql", "upgrade-postgresql"),
        seconds=60.0,
    ),
    "scripted": Part(run=scripted, campaigns=("scripted", "scripted"), seconds=800.0),
    "processes": Part(run=processes, campaigns=("processes", "processes"), seconds=500.0),
    "programs": Part(run=programs, campaigns=("programs", "programs-on-ray"), seconds=600.0),
    "starts": Part(run=starts, campaigns=("starts",), seconds=400.0),
    "rivals": Part(run=rivals, campaigns=("rivals-sqlite", "rivals-postgresql"), seconds=600.0),
    "outages": Part(run=outages, campaigns=("outages",), seconds=60.0),
    "ray": Part(run=on_ray, campaigns=("ray", "ray-poison", "ray-rpc"), seconds=310.0),
}


def missing(names: Sequence[str], campaigns: Sequence[str]) -> list[str]:
    """The campaigns of these parts that are not among those reported."""
    wanted = Counter(campaign for name in names for campaign in PARTS[name].campaigns)
    return sorted((wanted - Counter(campaigns)).elements())


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--kills", type=int, default=5000)
    parser.add_argument("--pauses", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS))
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 30) if arguments.seed is None else arguments.seed
    bounds = Bounds(
        kills=arguments.kills, pauses=arguments.pauses, seconds=arguments.seconds, seed=seed
    )
    machine, began = describe_machine(), time.monotonic()
    # Each orchestrator warns of what is done to it: keep that off the terminal.
    logging.getLogger().addHandler(logging.NullHandler())
    outcomes = list(_all(bounds, arguments.only))
    result = _summed(outcomes, names=arguments.only, seed=seed, seconds=time.monotonic() - began)
    write_result(
        arguments.out,
        benchmark="chaos",
        machine=machine,
        result=result | {"parts": [o.as_json() for o in outcomes]},
    )
    print(json.dumps(result))
    return 0 if all(outcome.is_clean for outcome in outcomes) and not result["missing"] else 1


def _all(bounds: Bounds, names: Sequence[str]) -> Iterator[Outcome]:
    until = time.monotonic() + bounds.seconds
    for number, name in enumerate(names):
        share = PARTS[name].seconds / sum(PARTS[later].seconds for later in names[number:])
        own_bounds = replace(bounds, seconds=share * max(0.0, until - time.monotonic()))
        with _folder() as folder:
            for outcome in PARTS[name].run(own_bounds, folder):
                print(json.dumps(outcome.as_json()), file=sys.stderr, flush=True)
                yield outcome


def _summed(
    outcomes: Sequence[Outcome], *, names: Sequence[str], seed: int, seconds: float
) -> dict[str, Any]:
    """The result as one line of JSON."""
    sums = total(outcomes)
    others = {
        kind: sum(o.victims.get(kind, 0) for o in outcomes)
        for kind in ("migration", "start", "paused", "raced")
    }
    return {
        **{
            name: sums[name]
            for name in ("kills", "acknowledged", "lost", "duplicated", "stuck", "broken")
        },
        **others,
        "replaced": sums["replaced"],
        "max_attempts": max((outcome.max_attempts for outcome in outcomes), default=0),
        "leaked_processes": sums["leaked_processes"],
        "looks": sums["looks"],
        "slowest_takeover_seconds": max(
            (outcome.slowest_takeover_seconds for outcome in outcomes), default=0.0
        ),
        "seed": seed,
        "seconds": round(seconds, 1),
        "missing": missing(names, [outcome.campaign for outcome in outcomes]),
        "cut_short": [outcome.campaign for outcome in outcomes if outcome.cut_short],
        "complaints": [text for outcome in outcomes for text in outcome.complaints][
            :SHOWN_COMPLAINTS
        ],
    }


def _both(folder: Path, postgresql: Server) -> Iterator[tuple[str, Fresh]]:
    """For each database a function that makes an empty store."""
    yield "sqlite", fresh_sqlite(folder)
    yield "postgresql", fresh_postgresql(postgresql.url)


def _counted(complaints: Sequence[str]) -> dict[str, Any]:
    """The complaints, and their number by kind."""
    kinds = ("lost", "duplicated", "stuck", "broken")
    return {kind: sum(f"{kind}: " in text for text in complaints) for kind in kinds} | {
        "complaints": list(complaints)
    }


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sweep-chaos-") as folder:
        yield Path(folder)


if __name__ == "__main__":
    raise SystemExit(main())
