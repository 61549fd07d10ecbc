"""Rows of the table of faults: what was lost and left when processes were killed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.chaos import PARTS, missing
from docs.committed_results import Format, Row, digits, newest, rows_of
from tests.faults.campaign import KILLED


def scoreboard_rows() -> list[Row]:
    """The table of docs/faults.md. A figure that a result does not contain is left out."""
    chaos = newest("chaos")
    known = {} if chaos is None else chaos[1]
    kills = [("chaos", what, text) for what, (field, text) in _CHAOS.items() if field in known]
    return [(what, text, f"`{file}`") for what, text, _, file in rows_of([*kills, *_SURVIVED])]


def chaos_lacks(result: Any) -> list[str]:
    """Reasons why a campaign of kills does not prove what the scoreboard shows."""
    return [
        *(f"complaint: {text}" for text in result["complaints"]),
        *(f"missing: {campaign}" for campaign in _missing_of(result)),
        *(f"missing figure: {field}" for field, _ in _CHAOS.values() if field not in result),
    ]


def _each_once(names: Iterable[str]) -> str:
    """Return names of campaigns; one that ran on both databases has a number behind it."""
    counted = Counter(names).items()
    return ", ".join(
        f"`{name}`" + (f" ({number})" if number > 1 else "") for name, number in counted
    )


def _list_of(counts: Mapping[str, int]) -> str:
    return ", ".join(
        f"{count} {kind.replace('_', ' ')}{'s' if count != 1 else ''}"
        for kind, count in counts.items()
    )


def lost(result: Any) -> str:
    return f"{result['lost']} of {result['acknowledged']:,}, in {result['kills']:,} kills"


def _missing_of(result: Any) -> list[str]:
    return missing(list(PARTS), [part["campaign"] for part in result["parts"]])


def _parts(result: Any, beginning: str) -> list[Any]:
    return [part for part in result["parts"] if part["campaign"].startswith(beginning)]


def _complaints(result: Any) -> str:
    lists = [
        [f'"{text}"' for text in result["complaints"]],
        [f"`{campaign}`" for campaign in _missing_of(result)],
    ]
    return "; ".join(f"{len(found)}: {', '.join(found)}" if found else "0" for found in lists)


def _crash_points(result: Any) -> str:
    sqlite, postgresql = (part["kills"] for part in _parts(result, "crash-points"))
    return f"all: {sqlite} on SQLite, {postgresql} on PostgreSQL"


def _migrations(result: Any) -> str:
    made, upgraded = (
        " and ".join(str(part["victims"]["migration"]) for part in _parts(result, play))
        for play in ("making", "upgrade")
    )
    return f"all: {made} while creating, {upgraded} while upgrading, on SQLite and PostgreSQL"


def _survivors(result: Any) -> str:
    checked = [part for part in result["parts"] if part["looks"]]
    killed = sum((Counter(part["victims"]) for part in checked), Counter[str]())
    victims = _list_of({kind: killed[kind] for kind in KILLED})
    return f"{result['leaked_processes']} in {result['looks']:,} checks, after kills of {victims}"


def _pauses(result: Any) -> str:
    broken = sum(part["broken"] for part in _parts(result, "rivals"))
    return (
        f"{broken}, in {result['paused']:,} forced pauses "
        f"that replaced {result['replaced']} orchestrators"
    )


def _outages(result: Any) -> str:
    (outage,) = _parts(result, "outages")
    connections, servers = (outage["victims"][kind] for kind in ("connection", "server"))
    lost = f"{outage['lost']} of {outage['acknowledged']} results lost"
    return f"{connections} and {servers}: {lost}"


def _takeover(result: Any) -> str:
    return f"{digits(result['slowest_takeover_seconds'])} s"


def _ray_with_kills(result: Any) -> str:
    killed = " and ".join(f"{count} {victim}s" for victim, count in result["killed"].items())
    nodes = f"{result['num_nodes']} simulated nodes of {result['gpus_per_node']} declared GPUs"
    trials = f"{result['num_trials']:,} trials in {result['seconds'] / 60:.1f} minutes"
    counts = f"{result['lost']}, {result['duplicated']}, {result['leaked_processes']}"
    return f"{counts} of {trials}; {nodes}, {killed} killed"


_SURVIVED: Sequence[tuple[str, str, Format]] = (
    (
        "ray-scale",
        "results lost, results counted twice and processes left "
        "in the playbook's study on real Ray with kills",
        _ray_with_kills,
    ),
    (
        "ray-scale",
        "in the same study: slowest time from the death of an orchestrator "
        "to the first launch of the next",
        _takeover,
    ),
    (
        "resume",
        "slowest time from the command to the first launch when a large sweep continues, "
        "without Ray",
        lambda result: (
            f"{digits(result['slowest_resumed_seconds'])} s, with {result['num_trials']:,} trials"
        ),
    ),
)
# Description -> the field without which it cannot be shown, and the text.
_CHAOS: Mapping[str, tuple[str, Format]] = {
    "complaints; missing campaigns": ("complaints", _complaints),
    "campaigns that ran out of time": (
        "cut_short",
        lambda result: _each_once(result["cut_short"]) or "0",
    ),
    "acknowledged results lost": ("lost", lost),
    "results that count twice; trials stuck": (
        "duplicated",
        lambda result: f"{result['duplicated']}; {result['stuck']}",
    ),
    "statements and commits at which an orchestrator was killed, over twelve trials": (
        "kills",
        _crash_points,
    ),
    "statements at which a program was killed while it created or upgraded a store, "
    "which the next program could use": ("migration", _migrations),
    "processes alive 5 s after their orchestrator was killed or their sweep ended": (
        "looks",
        _survivors,
    ),
    "writes accepted from an orchestrator after its lease had expired and another had taken over": (
        "replaced",
        _pauses,
    ),
    "PostgreSQL connections and servers killed under load": ("parts", _outages),
    "slowest time from the death of an orchestrator to the first launch of the next": (
        "slowest_takeover_seconds",
        _takeover,
    ),
}
