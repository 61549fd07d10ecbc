"""Rows of the documents' tables of what was measured, from the newest committed results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from docs.committed_results import Format, Row, committed, digits, rows_of
from docs.kill_figures import lost


def measured_rows() -> list[Row]:
    """The table of docs/figures.md."""
    return [(what, text, f"`{file}`") for what, text, _, file in rows_of(_MEASURED)]


def summary_rows() -> list[Row]:
    """The table of the README, whose rows link to the files."""
    return [
        (what, text, f"[{name}](benchmarks/results/{file})")
        for what, text, name, file in rows_of(_SUMMARY)
    ]


def score_rows() -> list[tuple[str, ...]]:
    """The table of docs/nodes.md: after how many trials slow nodes are found."""
    result = committed("node-score")
    return [
        (
            name,
            f"{case['trials_median']:.0f}",
            f"{case['trials_nine_in_ten']:.0f}",
            f"{result['seeds'] - case['not_found']} of {result['seeds']}",
            f"{case['healthy_called_slow']} of {result['healthy_sweeps']}",
        )
        for name, case in result["cases"].items()
    ]


def drift_rows() -> list[tuple[str, ...]]:
    """The table of docs/search.md: winners by the rule of sweeps and by plain medians."""
    return [
        (drift.replace("_", " "), *_winners(rules["now"]), *_winners(rules.get("earlier")))
        for drift, rules in committed("drift")["drifts"].items()
    ]


def band_rows() -> list[tuple[str, ...]]:
    """The table of benchmarks/results/prediction.md: rows within the bands that plan shows."""
    result = committed("prediction")
    rows = []
    for way, total in result["all_files"].items():
        scored = [(name, result[file].get(way, {})) for file, name in _TABLES.items()]
        bands = [(name, found["bands"]) for name, found in scored if "bands" in found]
        rows += [
            (name, way.replace("_", " "), *map(_within, _QUANTITIES, map(band.get, _QUANTITIES)))
            for name, band in [*bands, ("**all files**", total)]
        ]
    return rows


def _rate(result: Any, arm: str) -> str:
    return digits(result["summary"]["trials_per_second"][arm])


def _over_torchtitan(result: Any) -> str:
    ratios = result["summary"]["cases"]["compiled full"]["llama_over_torchtitan"]
    speed, memory = ratios["tokens_per_second"], ratios["peak_memory_allocated_bytes"]
    return f"{speed:.2f} times the speed, {memory:.2f} times the memory"


def _spread_of_runs(result: Any) -> str:
    found = result["summary"]["same_layout_in_fresh_processes"]
    return f"{found['spread']:.2%} of the median, in {found['num_runs']} runs"


def _trials(result: Any) -> str:
    fresh, reused = _rate(result, "tune_fresh"), _rate(result, "tune_reuse_actors")
    return (
        f"{_rate(result, 'sweep_tpe')}/s. Ray Tune in the same run: {fresh}/s in fresh processes, "
        f"{reused}/s in reused ones"
    )


def _launches(result: Any) -> str:
    ours, tpe = (
        digits(result["summary"][method]["launches_to_5_percent"]["median"])
        for method in ("auto", "tpe")
    )
    return f"{ours}. Optuna's TPE in the same run: {tpe}"


def _inside_band(result: Any) -> str:
    found = result["all_files"]["uncalibrated"]["step_time"]
    files = [result[name]["uncalibrated"]["bands"]["step_time"] for name in _TABLES]
    shares = [one["share_within"] for one in files if one["rows"] >= 100]
    return (
        f"{found['within'] / found['rows']:.0%} of {found['rows']:,} runs; the aim is 80%."
        f" It is {min(shares):.0%} to {max(shares):.0%} in each source with at least 100 runs"
    )


_TABLES = {
    "pb": "playbook",
    "vt": "vtrain",
    "mpt": "llm_foundry",
    "fms": "fms",
    "bs": "bigscience",
    "misc": "misc",
}
_QUANTITIES = ("step_time", "memory", "fits")


def _within(quantity: str, band: Any) -> str:
    if not band["rows"]:
        return "-"
    if quantity == "fits":
        numbers = f"{band['expected']:.0f} ({band['at_least']} to {band['at_most']})"
        return f"{numbers}, {band['ran']:,} of {band['rows']:,} ran"
    share = band["within"] / band["rows"]
    return f"{share:.0%} of {band['rows']:,} ({band['below']} / {band['above']})"


def _wrong_winners(result: Any) -> str:
    now = [rules["now"] for rules in result["drifts"].values()]
    return f"{sum(one['wrong'] for one in now)} of {sum(one['runs'] for one in now):,}"


def _winners(numbers: Any) -> tuple[str, str, str]:
    if numbers is None:
        return "", "", ""
    return (
        f"{numbers['named'] / numbers['runs']:.0%}",
        f"{numbers['wrong']} of {numbers['runs']}",
        f"{numbers['repeats_mean']:.1f}",
    )


def _long_sweep(result: Any) -> str:
    milliseconds = digits(result["ask_tell_store_ms_per_trial_at"]["5000"])
    growth = result["resident_growth_bytes_over_5000_trials"] / 1e6
    return f"{milliseconds} ms a trial; {growth:.0f} MB"


def _packing(result: Any) -> str:
    ours, in_line = (
        f"{scores['used_share_until_tail']:.0%}; {scores['makespan_over_bound']:.2f}"
        for scores in (result["median"]["packing"], result["median"]["first_come"])
    )
    return f"{ours}. First come, first served in the same run: {in_line}"


def _ray(result: Any) -> str:
    return (
        f"{digits(result['trials_per_second'])} trials/s; "
        f"{result['num_trials']:,} trials in {result['seconds'] / 60:.1f} minutes"
    )


def _simulation(result: Any) -> str:
    return (
        f"{result['num_attempts']:,} launches in {result['wall_seconds']:.0f} s, "
        f"with {result['peak_memory_bytes'] / 1e6:.0f} MB"
    )


def _layouts(result: Any) -> str:
    counts = result["without_constraints"]
    return (
        f"{counts['enumerated_and_ranked_per_second'] / 1e6:.1f} million/s "
        f"({counts['legal']:,} legal of {counts['lattice']:,})"
    )


def _launch(result: Any) -> str:
    one, two = (result["added_seconds_by_ranks"][ranks]["median"] for ranks in ("1", "2"))
    return f"{digits(one)} s with one rank, {digits(two)} s with two"


def _recipes(result: Any) -> str:
    return ", ".join(
        f"{name} {numbers['trial_over_stopwatch']:.3f}"
        for name, numbers in result.items()
        if isinstance(numbers, dict) and "trial_over_stopwatch" in numbers
    )


def _store(result: Any) -> str:
    return f"{digits(result['best_seconds'])} s, {digits(result['status_seconds'])} s"


def _report(result: Any) -> str:
    size = f"{result['report_bytes'] / 1e6:.1f} MB"
    return f"{digits(result['median_report_seconds'])} s, {size}"


# Each row: benchmark, description, text.
_MEASURED: Sequence[tuple[str, str, Format]] = (
    (
        "orchestration",
        "trials per second; each starts two fresh processes that do nothing "
        "(ask, store, launch, collect, tell)",
        _trials,
    ),
    (
        "orchestration",
        "the same with torch, gloo and four steps of llama-tiny",
        lambda result: f"{_rate(result, 'sweep_torch')}/s",
    ),
    (
        "launch-overhead",
        "what a launch of your own program adds to the time that the program needs alone",
        _launch,
    ),
    (
        "recipes",
        "throughput of the recipes' trials over that of a stopwatch around the same steps, "
        "median of 5 runs",
        _recipes,
    ),
    ("long-sweep", "ask + tell + store at 5,000 trials; memory gained over them", _long_sweep),
    (
        "long-sweep-scripted",
        "the same at 10,000 trials",
        lambda result: f"{digits(result['ask_tell_store_ms_per_trial_at']['10000'])} ms a trial",
    ),
    (
        "packing",
        "share of 512 GPUs that the study of `sweeps/playbook.yaml` uses until its last start; "
        "its time over the shortest possible time",
        _packing,
    ),
    (
        "ray-scale-undisturbed",
        "the same study on real Ray, 512 declared GPUs on two cores, "
        "from placing a gang to storing its result",
        _ray,
    ),
    ("simulated-scale", "a simulated sweep on 16,384 GPUs", _simulation),
    ("enumerate", "enumerate and rank the layouts of a large cell", _layouts),
    (
        "store-scale",
        "the queries of `sweep best` and `sweep status` on 100,000 trials, SQLite",
        _store,
    ),
    (
        "store-scale-postgresql",
        "the queries of `sweep best` and `sweep status` on 100,000 trials, PostgreSQL",
        _store,
    ),
    ("report", "`sweep report` of 4,908 simulated trials", _report),
)
_SUMMARY: Sequence[tuple[str, str, Format]] = (
    ("orchestration", "trials per second; each starts fresh processes, which do nothing", _trials),
    (
        "search-efficiency-cold",
        "trainings that the search starts until one is within 5 % of the best (median), on tables "
        "of measurements that others published; the formulas were tuned on the same tables",
        _launches,
    ),
    (
        "prediction",
        "how often a step time that others published lies in the range that `sweep plan` predicts "
        "for it, before anything similar was measured",
        _inside_band,
    ),
    (
        "drift",
        "sweeps on drifting machines that named a winner more than 3 % slower than the best layout",
        _wrong_winners,
    ),
    ("chaos", "results lost when processes of every kind were killed", lost),
    (
        "chaos",
        "processes still alive 5 s after such a kill",
        lambda result: f"{result['leaked_processes']} in {result['looks']:,} checks",
    ),
    ("simulated-scale", "time and memory of a simulated sweep on 16,384 GPUs", _simulation),
    (
        "store-scale",
        "time of the query behind `sweep best`, on 100,000 trials",
        lambda result: f"{digits(result['best_seconds'])} s",
    ),
    (
        "gpu-others",
        "workload llama against torchtitan: an 8B on one H200, compiled, all layers recomputed, "
        "one run each",
        _over_torchtitan,
    ),
    (
        "gpu-noise",
        "difference between the fastest and the slowest run of one layout, each in a fresh process "
        "on one H200",
        _spread_of_runs,
    ),
)
