"""What the newest committed results say (`benchmarks/results/`), as the rows of the documents' tables of figures."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.chaos import PARTS, missing
from tests.faults.campaign import KILLED

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


def measured_rows() -> list[tuple[str, str, str]]:
    """What the newest committed result of each benchmark says; a benchmark without one is left out."""
    rows: list[tuple[str, str, str]] = []

    def row(name: str, what: str, said: Callable[[Any], str]) -> None:
        if (found := newest(name)) is not None:
            file, result = found
            rows.append((what, said(result), f"`{file}`"))

    row(
        "orchestration",
        "trials of two fresh ranks that do nothing: ask, store, launch, collect, tell",
        _said_of_trials,
    )
    row(
        "orchestration",
        "the same with torch, gloo and four steps of llama-tiny",
        lambda r: f"{_rate(r, 'sweep_torch')}/s",
    )
    row(
        "long-sweep",
        "ask + tell + store at 5,000 trials; memory gained over them",
        _said_of_a_long_sweep,
    )
    row(
        "long-sweep-scripted",
        "the same at 10,000 trials",
        lambda r: f"{_digits(r['ask_tell_store_ms_per_trial_at']['10000'])} ms a trial",
    )
    row(
        "packing",
        "GPU-seconds used of 512 GPUs by the study of `sweeps/playbook.yaml`, until its tail; its time over the shortest possible",
        _said_of_packing,
    )
    row(
        "ray-scale-undisturbed",
        "the same study on real Ray, 512 declared GPUs on two cores: gangs from order to stored result",
        _said_of_ray,
    )
    row(
        "simulated-scale",
        "the control plane on a virtual clock, 16,384 GPUs",
        _said_of_a_simulation,
    )
    row("enumerate", "enumerate and rank the layouts of a large cell", _said_of_layouts)
    for database in ("", "-postgresql"):
        where = "PostgreSQL" if database else "SQLite"
        row(
            f"store-scale{database}",
            f"`best`, `status` on 100,000 trials, {where}",
            _said_of_a_store,
        )
    return rows


def summary_rows() -> list[tuple[str, str, str]]:
    """The few figures that the README shows, each with a link to its file."""
    rows: list[tuple[str, str, str]] = []

    def row(name: str, what: str, said: Callable[[Any], str]) -> None:
        if (found := newest(name)) is not None:
            file, result = found
            rows.append((what, said(result), f"[{name}](benchmarks/results/{file})"))

    row(
        "orchestration",
        "trials per second, each in fresh processes that do nothing",
        _said_of_trials,
    )
    row(
        "search-efficiency-cold",
        "launches until a layout within 5 % of the best was measured (tables of published runs)",
        _said_of_launches,
    )
    row(
        "drift",
        "sweeps on machines that drift: a winner more than 3 % below the true best",
        _said_of_wrong_winners,
    )
    row(
        "chaos",
        "results lost in kills of every process",
        lambda r: f"{r['lost']} of {r['acknowledged']:,}, in {r['kills']:,} kills",
    )
    row(
        "chaos",
        "processes left 5 s after such a kill",
        lambda r: f"{r['leaked_processes']} in {r['looks']:,} looks",
    )
    row("simulated-scale", "a simulated sweep on 16,384 GPUs", _said_of_a_simulation)
    row(
        "store-scale", "`sweep best` on 100,000 trials", lambda r: f"{_digits(r['best_seconds'])} s"
    )
    return rows


def _said_of_launches(result: Any) -> str:
    ours, tpe = (
        _digits(result["summary"][method]["launches_to_5_percent"]["median"])
        for method in ("auto", "tpe")
    )
    return f"{ours}. Optuna's TPE in the same run: {tpe}"


def _said_of_wrong_winners(result: Any) -> str:
    now = [rules["now"] for rules in result["drifts"].values()]
    return f"{sum(one['wrong'] for one in now)} of {sum(one['runs'] for one in now):,}"


def _said_of_packing(result: Any) -> str:
    ours, in_line = result["median"]["packing"], result["median"]["first_come"]
    return (
        f"{ours['used_share_until_tail']:.0%}; {ours['makespan_over_bound']:.2f}."
        f" First come, first served in the same run: {in_line['used_share_until_tail']:.0%}; {in_line['makespan_over_bound']:.2f}"
    )


def _said_of_ray(result: Any) -> str:
    return f"{_digits(result['trials_per_second'])} trials/s; {result['num_trials']:,} trials in {result['seconds'] / 60:.1f} minutes"


def _said_of_a_simulation(result: Any) -> str:
    return f"{result['num_attempts']:,} launches in {result['wall_seconds']:.0f} s, with {result['peak_memory_bytes'] / 1e6:.0f} MB"


def score_rows() -> list[tuple[str, str, str, str, str]]:
    """In how many trials slow nodes are found, of the newest committed result."""
    found = newest("node-score")
    assert found is not None, "it is committed"
    _, result = found
    return [
        (
            name,
            f"{case['trials_median']:.0f}",
            f"{case['trials_nine_in_ten']:.0f}",
            f"{result['seeds'] - case['not_found']} of {result['seeds']}",
            f"{case['false_alarms']} of {result['healthy_sweeps']}",
        )
        for name, case in result["cases"].items()
    ]


def drift_rows() -> list[tuple[str, ...]]:
    """Rows of the newest committed drift benchmark: winners by today's rule and by the one before."""
    found = newest("drift")
    assert found is not None, "it is committed"
    return [
        (
            drift.replace("_", " "),
            *_said_of_winners(rules["now"]),
            *_said_of_winners(rules.get("earlier")),
        )
        for drift, rules in found[1]["drifts"].items()
    ]


def _said_of_winners(numbers: Any) -> tuple[str, str, str]:
    if numbers is None:
        return "", "", ""
    return (
        f"{numbers['named'] / numbers['runs']:.0%}",
        f"{numbers['wrong']} of {numbers['runs']}",
        f"{numbers['repeats_mean']:.1f}",
    )


def scoreboard_rows() -> list[tuple[str, str, str]]:
    """What the newest committed results say of faults; a result that is not there, or a figure that it does not tell, is left out."""
    rows: list[tuple[str, str, str]] = []
    if (found := newest("chaos")) is not None:
        name, result = found
        rows += [
            (what, said(result), f"`{name}`")
            for what, (tells, said) in _CHAOS.items()
            if tells in result
        ]
    if (found := newest("ray-scale")) is not None:
        name, result = found
        killed = " and ".join(f"{count} {victim}s" for victim, count in result["killed"].items())
        what = f"the playbook's study on real Ray, {result['num_nodes']} simulated nodes of {result['gpus_per_node']} declared GPUs, {killed} killed: lost, twice, processes left"
        said = f"{result['lost']}, {result['duplicated']}, {result['leaked_processes']} of {result['num_trials']:,} trials in {result['seconds'] / 60:.1f} minutes"
        rows.append((what, said, f"`{name}`"))
        what = "the same, on a Ray that was busy with all of it: from the death of an orchestrator to the next one's first launch, at the slowest"
        rows.append((what, f"{_digits(result['slowest_takeover_seconds'])} s", f"`{name}`"))
    if (found := newest("resume")) is not None:
        name, result = found
        what = f"a sweep of {result['num_trials']:,} trials goes on: from the command to its first launch, Ray apart, at the slowest"
        rows.append((what, f"{_digits(result['slowest_resumed_seconds'])} s", f"`{name}`"))
    return rows


def chaos_lacks(result: Any) -> list[str]:
    """Why kills do not show what the scoreboard says: complaints, campaigns that are missing, figures that are not told."""
    return [
        *(f"complaint: {text}" for text in result["complaints"]),
        *(f"missing: {campaign}" for campaign in _missing_of(result)),
        *(f"not told: {tells}" for tells, _ in _CHAOS.values() if tells not in result),
    ]


def _missing_of(result: Any) -> list[str]:
    return missing(list(PARTS), [part["campaign"] for part in result["parts"]])


def _parts(result: Any, beginning: str) -> list[Any]:
    return [part for part in result["parts"] if part["campaign"].startswith(beginning)]


def _said_of_complaints(result: Any) -> str:
    lists = [
        [f'"{text}"' for text in result["complaints"]],
        [f"`{campaign}`" for campaign in _missing_of(result)],
    ]
    return "; ".join(f"{len(found)}: {', '.join(found)}" if found else "0" for found in lists)


def _said_of_crash_points(result: Any) -> str:
    sqlite, postgresql = (part["kills"] for part in _parts(result, "crash-points"))
    return f"all: {sqlite} on SQLite, {postgresql} on PostgreSQL"


def _said_of_migrations(result: Any) -> str:
    made, upgraded = (
        " and ".join(str(part["victims"]["migration"]) for part in _parts(result, play))
        for play in ("making", "upgrade")
    )
    return f"all: {made} of its making, {upgraded} of its upgrade, on SQLite and PostgreSQL"


def _said_of_survivors(result: Any) -> str:
    looked = [part for part in result["parts"] if part["looks"]]
    killed = sum((Counter(part["victims"]) for part in looked), Counter[str]())
    return f"{result['leaked_processes']} in {result['looks']:,} looks, after {_list_of({kind: killed[kind] for kind in KILLED})} were killed"


def _said_of_pauses(result: Any) -> str:
    broken = sum(part["broken"] for part in _parts(result, "rivals"))
    return f"{broken}, in {result['paused']:,} forced pauses that replaced {result['replaced']} orchestrators"


def _said_of_outages(result: Any) -> str:
    (outage,) = _parts(result, "outages")
    connections, servers = (outage["victims"][kind] for kind in ("connection", "server"))
    return f"{connections} and {servers}: {outage['lost']} of {outage['acknowledged']} results lost"


# What a campaign of kills shows: the figure, the field without which it is not told, and how it is said.
_CHAOS: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "complaints; campaigns that are missing": ("complaints", _said_of_complaints),
    "campaigns whose time was over before all was done": (
        "cut_short",
        lambda r: ", ".join(f"`{name}`" for name in r["cut_short"]) or "0",
    ),
    "results lost, of those acknowledged": (
        "lost",
        lambda r: f"{r['lost']} of {r['acknowledged']:,}, in {r['kills']:,} kills",
    ),
    "results that count twice; trials stuck": (
        "duplicated",
        lambda r: f"{r['duplicated']}; {r['stuck']}",
    ),
    "statements and commits at which an orchestrator died, of twelve trials": (
        "kills",
        _said_of_crash_points,
    ),
    "statements at which a program died that made or upgraded a store, which the next one used": (
        "migration",
        _said_of_migrations,
    ),
    "processes alive 5 s after the death of their orchestrator, or the end of their sweep": (
        "looks",
        _said_of_survivors,
    ),
    "writes accepted from an orchestrator after its lease had expired and another had the sweep": (
        "replaced",
        _said_of_pauses,
    ),
    "PostgreSQL connections ended, servers killed under load": ("parts", _said_of_outages),
    "from the death of an orchestrator to the next one's first launch, at the slowest": (
        "slowest_takeover_seconds",
        lambda r: f"{_digits(r['slowest_takeover_seconds'])} s",
    ),
}


def newest(benchmark: str) -> tuple[str, Any] | None:
    """The newest committed result of a benchmark, with its file's name."""
    files = sorted(RESULTS.glob(f"{benchmark}_cpu-*.json"), key=lambda file: file.stem[-10:])
    return (files[-1].name, json.loads(files[-1].read_text())) if files else None


def _list_of(counts: Mapping[str, int]) -> str:
    return ", ".join(
        f"{count} {kind.replace('_', ' ')}{'s' if count != 1 else ''}"
        for kind, count in counts.items()
    )


def _said_of_trials(result: Any) -> str:
    fresh, reused = _rate(result, "tune_fresh"), _rate(result, "tune_reuse_actors")
    return f"{_rate(result, 'sweep_tpe')}/s. Ray Tune in the same run: {fresh}/s in fresh processes, {reused}/s in reused ones"


def _said_of_a_long_sweep(result: Any) -> str:
    return f"{_digits(result['ask_tell_store_ms_per_trial_at']['5000'])} ms a trial; {result['resident_growth_bytes_over_5000_trials'] / 1e6:.0f} MB"


def _said_of_layouts(result: Any) -> str:
    counts = result["without_constraints"]
    return f"{counts['enumerated_and_ranked_per_second'] / 1e6:.1f} million/s ({counts['legal']:,} legal of {counts['lattice']:,})"


def _said_of_a_store(result: Any) -> str:
    return f"{_digits(result['best_seconds'])} s, {_digits(result['status_seconds'])} s"


def _rate(result: Any, arm: str) -> str:
    return _digits(result["summary"]["trials_per_second"][arm])


def _digits(number: float) -> str:
    """Two significant digits: what these machines are good for."""
    return f"{float(f'{number:.2g}'):g}"
