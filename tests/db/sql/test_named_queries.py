"""The queries with a name answer as a plain computation over the same rows does."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import exp, log, sqrt
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import pytest

from db.sql import readonly
from db.sql.named_queries import named_queries, named_query
from db.store import Store
from orchestrator.core.errors import UsageInvalid
from orchestrator.core.problem.layout import LAYOUT_COLUMNS
from orchestrator.core.trial.failure_kinds import SUSPECT_KINDS
from orchestrator.core.trial.peak_memory import taken_peak
from orchestrator.core.trial.run import USUAL_SD
from orchestrator.core.trial.winner import WIDTH
from orchestrator.report.comparison import Speed, change_of, of_fingerprints, speed_of
from orchestrator.report.sweep_rows import read_rows
from tests.db.builders import (
    Bench,
    Runs,
    fingerprint,
    measure_runs,
    measurement,
    record_measurement,
)
from tests.db.sql import made_up_sweep
from tests.db.sql.made_up_sweep import NEW, OLD, PRICE, MadeUpAttempt, MadeUpSweep, MadeUpTrial

Rows = list[dict[str, Any]]


def ask(url: str, name: str, sweep: str, *given: str) -> Rows:
    query = named_query(name)
    answer = readonly.query(url, query.sql, parameters={**query.values(given), "sweep": sweep})
    return [dict(zip(answer.columns, row, strict=True)) for row in answer.rows]


def speed(one: MadeUpAttempt) -> float:
    return float(one.numbers["tokens_per_second_per_gpu"])


def peak(one: MadeUpAttempt) -> int | None:
    return taken_peak(SimpleNamespace(**one.numbers))


def with_peak(trials: Sequence[MadeUpTrial]) -> list[tuple[MadeUpTrial, MadeUpAttempt, int]]:
    """The comparable trials whose memory was read."""
    return [
        (trial, one, found) for trial, one in comparable(trials) if (found := peak(one)) is not None
    ]


def comparable(trials: Sequence[MadeUpTrial]) -> list[tuple[MadeUpTrial, MadeUpAttempt]]:
    """The trials with numbers that may be compared, the fastest first."""
    found = [(trial, one) for trial in trials if (one := trial.counting) is not None]
    return sorted(found, key=lambda pair: (-speed(pair[1]), pair[0].id))


def by_key(sweep: MadeUpSweep) -> list[Any]:
    return sorted(sweep.cells, key=lambda cell: cell.key)


def best(sweep: MadeUpSweep) -> Rows:
    return [
        {
            "cell": cell.key,
            "trial_id": trial.id,
            "tokens_per_second_per_gpu": speed(one),
            "relative_confidence": one.numbers["relative_confidence"],
            "num_measurements": sum(run.pooled for run in trial.attempts),
            "peak_memory_bytes": peak(one),
        }
        for cell in by_key(sweep)
        for trial, one in comparable(sweep.of(cell))[:1]
    ]


def cheapest(sweep: MadeUpSweep) -> Rows:
    rows = []
    for cell in by_key(sweep):
        found = comparable(sweep.of(cell))
        fastest = speed(found[0][1])
        near = [it for it in with_peak(sweep.of(cell)) if speed(it[1]) >= 0.95 * fastest]
        if not near:
            continue
        trial, one, _ = min(near, key=lambda it: (it[2], -speed(it[1]), it[0].id))
        rows.append(
            {
                "cell": cell.key,
                "trial_id": trial.id,
                "slower_by": 1 - speed(one) / fastest,
                "peak_memory_bytes": peak(one),
            }
        )
    return rows


def oom_frontier(sweep: MadeUpSweep) -> Rows:
    groups: dict[tuple[str, str, int], dict[str, list[int]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for trial in sweep.trials:
        one = next((each for each in trial.attempts if each.counts), None)
        is_current = one is not None and one.fingerprint is NEW
        if trial.state in ("out_of_memory", "pruned") or (trial.state == "measured" and is_current):
            axes = (trial.cell.key, str(trial.layout.recompute), trial.layout.zero_stage)
            groups[axes][trial.state].append(trial.layout.micro_batch_size)
            if trial.state == "measured" and one is not None and (most := peak(one)) is not None:
                groups[axes]["peaks"].append(most)
    return [
        {
            "cell": cell,
            "recompute": recompute,
            "zero_stage": zero_stage,
            "largest_that_fits": max(sizes["measured"], default=None),
            "smallest_out_of_memory": min(sizes["out_of_memory"], default=None),
            "smallest_condemned": min(sizes["pruned"], default=None),
            "highest_peak_memory_bytes": max(sizes["peaks"], default=None),
        }
        for (cell, recompute, zero_stage), sizes in sorted(groups.items())
    ]


def scaling(sweep: MadeUpSweep) -> Rows:
    rows = []
    for sequence_length in (128, 256):
        same = [cell for cell in sweep.cells if cell.sequence_length == sequence_length]
        fastest = {
            cell: comparable(sweep.of(cell))[0]
            for cell in sorted(same, key=lambda cell: cell.num_gpus)
        }
        smallest = speed(next(iter(fastest.values()))[1])
        rows += [
            {
                "num_gpus": cell.num_gpus,
                "trial_id": trial.id,
                "speed_up": speed(one) * cell.num_gpus / (smallest * 2),
                "efficiency": speed(one) / smallest,
            }
            for cell, (trial, one) in fastest.items()
        ]
    return rows


def cost(sweep: MadeUpSweep) -> Rows:
    rows = []
    for cell in by_key(sweep):
        trial, one = comparable(sweep.of(cell))[0]
        gpu_hours = 1e9 / speed(one) / 3600
        joules = one.numbers["joules_per_token"]
        rows.append(
            {
                "trial_id": trial.id,
                "hours": gpu_hours / cell.num_gpus,
                "gpu_hours": gpu_hours,
                "dollars": PRICE * gpu_hours,
                "kilowatt_hours": None if joules is None else joules * 1e9 / 3.6e6,
            }
        )
    return rows


def worst_predictions(sweep: MadeUpSweep) -> Rows:
    rows = []
    for trial in sweep.trials:
        one = next((each for each in trial.attempts if each.counts), None)
        if trial.state != "measured" or one is None or trial.predicted_speed is None:
            continue
        if one.numbers["implausible"] or one.numbers["step_seconds_bound"]:
            continue
        assert trial.predicted_memory is not None
        allocated = one.numbers["peak_memory_allocated_bytes"]
        ratios = (
            trial.predicted_speed / speed(one),
            trial.predicted_memory / allocated if allocated else None,
        )
        off = [ratio and max(ratio, 1 / ratio) for ratio in ratios]
        rows.append({"trial_id": trial.id, "speed_off_by": off[0], "memory_off_by": off[1]})
    rows.sort(
        key=lambda row: (-max(row["speed_off_by"], row["memory_off_by"] or 0.0), row["trial_id"])
    )
    return rows[:20]


def flaky_nodes(sweep: MadeUpSweep) -> Rows:
    failures, innocent, attempts = Counter[str](), Counter[str](), Counter[str]()
    for trial in sweep.trials:
        for one in trial.attempts:
            attempts.update(one.nodes)
            if one.failure_kind in SUSPECT_KINDS:
                failures[one.nodes[0]] += 1
                innocent[one.nodes[0]] += trial.state == "measured"
    return [
        {
            "node": node,
            "failures": number,
            "attempts": attempts[node],
            "failing": number / attempts[node],
            "measured_elsewhere": innocent[node],
        }
        for node, number in sorted(failures.items(), key=lambda item: (-item[1], item[0]))
    ]


def time_lost(sweep: MadeUpSweep) -> Rows:
    causes = Counter[str]({"idle": sweep.idle_seconds})
    for trial in sweep.trials:
        for one in trial.attempts:
            if one.state == "measured" and (one.pooled or not one.superseded):
                assert one.timed_seconds is not None and one.warmup_seconds is not None
                timed, warmup = (
                    trial.cell.num_gpus * seconds
                    for seconds in (one.timed_seconds, one.warmup_seconds)
                )
                causes["useful"] += timed
                causes["warmup"] += warmup
                causes["startup"] += one.gpu_seconds - timed - warmup
            else:
                causes[one.failure_kind or "superseded"] += one.gpu_seconds
    total = sum(causes.values())
    return [
        {"cause": cause, "gpu_hours": seconds / 3600, "fraction": seconds / total}
        for cause, seconds in sorted(causes.items(), key=lambda item: (-item[1], item[0]))
    ]


def noise_floors(sweep: MadeUpSweep) -> dict[str, list[float]]:
    """The relative changes of the repeats of each cell."""
    changes: dict[str, list[float]] = {cell.key: [] for cell in sweep.cells}
    for trial in sweep.trials:
        runs = [one.numbers["step_seconds_median"] for one in trial.attempts if one.pooled]
        changes[trial.cell.key] += [abs(run / runs[0] - 1) for run in runs[1:]]
    return changes


def of_runs(trial: MadeUpTrial, runs: Sequence[MadeUpAttempt]) -> Speed:
    return speed_of(trial.id, [(speed(one), one.numbers["relative_confidence"]) for one in runs])


def changed(sweep: MadeUpSweep) -> Rows:
    rows = []
    for trial in sweep.trials:
        runs: dict[Any, list[MadeUpAttempt]] = {OLD: [], NEW: []}
        for one in trial.attempts:
            if (
                one.state == "measured"
                and not one.numbers["implausible"]
                and not one.numbers["step_seconds_bound"]
                and (one.pooled or not one.superseded or one.fingerprint is OLD)
            ):
                runs[one.fingerprint].append(one)
        if not runs[OLD] or not runs[NEW]:
            continue
        before, after = (of_runs(trial, runs[which]) for which in (OLD, NEW))
        rows.append(
            {
                "before_digest": OLD.digest,
                "after_digest": NEW.digest,
                "differences": "git 0123abcd -> 89abcdef; torch 2.12.0 -> 2.13.0",
                "cell": trial.cell.key,
                "trial_id": trial.id,
                "before_low": before.low,
                "after_high": after.high,
                "change": after.value / before.value - 1,
                "verdict": change_of(before, after),
            }
        )
    return sorted(rows, key=lambda row: (row["cell"], row["change"], row["trial_id"]))


def run_sd(sweep: MadeUpSweep, cell: Any) -> float | None:
    """The spread of runs of one layout, pooled over the cell; None: fewer than five repeats."""
    squares, degrees = 0.0, 0
    for trial in sweep.of(cell):
        logs = [log(one.numbers["step_seconds_median"]) for one in trial.attempts if one.pooled]
        squares += sum((one - fmean(logs)) ** 2 for one in logs)
        degrees += max(len(logs) - 1, 0)
    return sqrt(squares / degrees) if degrees >= 5 else None


def with_run_sd(found: Speed, runs: Sequence[MadeUpAttempt], sd: float | None) -> Speed:
    """The interval of a speed, if runs of one layout are known to vary so."""
    if sd is None:
        return found
    logs = [log(speed(one)) for one in runs]
    own = max((one.numbers["relative_confidence"] or 0.0) / WIDTH for one in runs)
    spread = stdev(logs) if len(logs) > 1 else 0.0
    width = WIDTH * max(own, spread, sd) / sqrt(len(logs))
    return replace(found, low=found.value * exp(-width), high=found.value * exp(width))


def noise_floor(sweep: MadeUpSweep) -> Rows:
    rows = []
    for cell in by_key(sweep):
        sd = run_sd(sweep, cell)
        some = noise_floors(sweep)[cell.key]
        (first, of_first), (second, of_second) = comparable(sweep.of(cell))[:2]
        told = [
            [
                one
                for one in trial.attempts
                if one.pooled
                and not one.numbers["implausible"]
                and not one.numbers["step_seconds_bound"]
            ]
            for trial in (first, second)
        ]
        best, runner_up = (
            with_run_sd(of_runs(trial, runs), runs, sd)
            for trial, runs in zip((first, second), told, strict=True)
        )
        verdict = change_of(runner_up, best)
        rows.append(
            {
                "cell": cell.key,
                "num_repeats": len(some),
                "noise_floor": fmean(some) if some else None,
                "largest_change": max(some, default=None),
                "run_sd": USUAL_SD if sd is None else sd,
                "run_sd_is": "usual" if sd is None else "measured",
                "lead": speed(of_first) / speed(of_second) - 1,
                "verdict": "noise" if verdict == "slower" else verdict,
            }
        )
    return rows


def pareto(sweep: MadeUpSweep) -> Rows:
    return [
        {"cell": cell.key, "trial_id": trial.id, "peak_memory_bytes": most}
        for cell in by_key(sweep)
        for trial, one, most in with_peak(sweep.of(cell))
        if not any(
            speed(other) >= speed(one)
            and less <= most
            and (speed(other) > speed(one) or less < most)
            for _, other, less in with_peak(sweep.of(cell))
        )
    ]


def one_more_trial(sweep: MadeUpSweep) -> Rows:
    rows = []
    for cell in by_key(sweep):
        attempts = [(trial, one) for trial in sweep.of(cell) for one in trial.attempts]
        attempts.sort(key=lambda pair: (pair[1].ended_at, pair[1].id))
        of_all = speed(comparable(sweep.of(cell))[0][1])
        best_so_far, seconds, found = None, 0.0, []
        for launches, (trial, one) in enumerate(attempts, start=1):
            seconds += one.gpu_seconds
            counting = trial.counting
            firsts = [each for each in trial.attempts if each.pooled]
            if counting is None or one is not firsts[0]:
                continue
            if best_so_far is None or speed(counting) > best_so_far:
                found.append(
                    {
                        "cell": cell.key,
                        "launches": launches,
                        "gpu_hours": seconds / 3600,
                        "trial_id": trial.id,
                        "gain": best_so_far and speed(counting) / best_so_far - 1,
                        "of_best": speed(counting) / of_all,
                        "launches_since": len(attempts) - launches,
                    }
                )
                best_so_far = speed(counting)
        following = [row["launches"] for row in found[1:]] + [None]
        for row, next_gain in zip(found, following, strict=True):
            row["until_next"] = next_gain and next_gain - row["launches"]
        rows += found
    return rows


BY_HAND: dict[str, Callable[[MadeUpSweep], Rows]] = {
    "best": best,
    "changed": changed,
    "cheapest": cheapest,
    "cost": cost,
    "flaky_nodes": flaky_nodes,
    "noise_floor": noise_floor,
    "one_more_trial": one_more_trial,
    "oom_frontier": oom_frontier,
    "pareto": pareto,
    "scaling": scaling,
    "time_lost": time_lost,
    "worst_predictions": worst_predictions,
}


def test_every_query_answers_as_plain_python_does(store: Store, store_url: str) -> None:
    assert set(BY_HAND) == set(named_queries())
    sweeps = [made_up_sweep.write(store, f"drawn-{seed}", seed=seed) for seed in (1, 2, 3)]
    for name, by_hand in BY_HAND.items():
        for sweep in sweeps:
            wanted, rows = by_hand(sweep), ask(store_url, name, sweep.name)
            shown = [{column: row[column] for column in wanted[0]} for row in rows]
            assert shown == [pytest.approx(row) for row in wanted], (name, sweep.name)


def test_the_query_and_the_report_call_the_same_changes_noise(store: Store, store_url: str) -> None:
    for seed in (1, 2, 3, 4, 5):
        drawn = made_up_sweep.write(store, f"drawn-{seed}", seed=seed)
        found = of_fingerprints(read_rows(store, store.sweep_named(drawn.name)))
        assert found is not None
        told = {
            (one.cell, one.layout): (one.change, one.before.value, one.after.value)
            for one in found.layouts
        }
        rows = ask(store_url, "changed", drawn.name)
        assert len(rows) == len(told) > 0
        for row in rows:
            change, before, after = told[row["cell"], row["layout"]]
            assert row["verdict"] == change
            assert (row["before_speed"], row["after_speed"]) == pytest.approx((before, after))


def test_the_noise_floor_says_what_runs_vary_by_and_whether_that_was_measured(
    store: Store, store_url: str
) -> None:
    """Repeats that agree within 0.1 % tell layouts apart that usual ones would not."""
    near: Runs = {
        1: [(1.0, 0), (1.001, 2), (1.0, 3), (1.001, 5)],
        2: [(1.02, 1), (1.021, 4), (1.02, 6), (1.021, 7)],
    }
    measure_runs(store, near)
    (row,) = ask(store_url, "noise_floor", "tiny")
    assert (row["num_repeats"], row["run_sd_is"], row["verdict"]) == (6, "measured", "faster")
    assert row["run_sd"] == pytest.approx(0.00058, rel=0.05)


@pytest.mark.parametrize(
    ("sha", "told"), [(None, "the program's files"), ("0123abcd", "uncommitted changes")]
)
def test_changes_are_uncommitted_only_where_there_are_commits(
    store: Store, store_url: str, sha: str | None, told: str
) -> None:
    bench = Bench.on(store)
    for size, digest in ((1, "files:1"), (2, "files:2")):
        trial_id, attempt = bench.start(size)
        code = fingerprint().model_copy(update={"git_sha": sha, "dirty_diff_digest": digest})
        record_measurement(
            store,
            trial_id,
            attempt,
            epoch=bench.epoch,
            measurement=measurement(1000.0),
            fingerprint=code,
        )
    (row,) = ask(store_url, "changed", "tiny")
    assert row["differences"] == told


def test_few_repeats_leave_what_is_usual(store: Store, store_url: str) -> None:
    measure_runs(store, {1: [(1.0, 0), (1.001, 2)], 2: [(1.02, 1), (1.021, 4)]})
    (row,) = ask(store_url, "noise_floor", "tiny")
    assert (row["run_sd"], row["run_sd_is"], row["verdict"]) == (USUAL_SD, "usual", "noise")


def test_the_queries_have_the_spread_and_the_width_of_the_rule() -> None:
    for name in ("changed", "noise_floor"):
        sql = named_query(name).sql
        assert f"own_sd > {USUAL_SD} THEN own_sd * own_sd ELSE {USUAL_SD**2:.4g} END" in sql
        assert f"{WIDTH} * sqrt(" in sql and f" / {WIDTH}" in sql


def test_the_trials_that_rows_rank_are_those_that_the_queries_rank(store: Store) -> None:
    for seed in (1, 2, 3):
        drawn = made_up_sweep.write(store, f"drawn-{seed}", seed=seed)
        ranked = {one.id for one in store.trials(drawn.sweep_id) if one.is_ranked}
        assert ranked == {one.id for one in drawn.trials if one.counting is not None} != set()


def test_a_query_takes_its_parameters_and_nothing_else(store: Store, store_url: str) -> None:
    sweep = made_up_sweep.write(store, "drawn", seed=1)
    (row, *_) = ask(store_url, "cost", "drawn", "price=10")
    assert row["dollars"] == pytest.approx(10 * row["gpu_hours"])
    assert len(ask(store_url, "worst_predictions", "drawn", "top=3")) == 3
    # Everything is at most 100 % slower: the one with the least memory.
    least = min(most for _, _, most in with_peak(sweep.of(by_key(sweep)[0])))
    assert ask(store_url, "cheapest", "drawn", "within=1")[0]["peak_memory_bytes"] == least
    backwards = (f"before={NEW.digest[:6]}", f"after={OLD.digest[:6]}")
    changes = [row["change"] for row in ask(store_url, "changed", "drawn", *backwards)]
    assert sorted(1 / (1 + change) - 1 for change in changes) == pytest.approx(
        [row["change"] for row in sorted(changed(sweep), key=lambda row: row["change"])]
    )
    # Bound, so a text ends no statement; and no fingerprint begins so.
    assert ask(store_url, "changed", "drawn", "before=' OR 1=1 --") == []
    assert ask(store_url, "best", "x' OR 'a'='a") == []


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("bst", "", "did you mean @best"),
        ("oom-frontier", "", "did you mean @oom_frontier"),
        ("xyz", "", "there are best, "),
        ("cheapest", "wihtin=0.1", "did you mean within=VALUE"),
        ("cheapest", "within=ten", "within=ten is not a number of 0 or more"),
        ("cheapest", "within=-1", "is not a number of 0 or more"),
        ("cheapest", "within=nan", "is not a number of 0 or more"),
        ("best", "top=3", "has no parameters"),
        ("cheapest", "sweep=mine", "--sweep NAME"),
    ],
)
def test_a_wrong_name_or_value_is_answered_with_the_right_one(
    name: str, given: str, message: str
) -> None:
    with pytest.raises(UsageInvalid, match=message):
        named_query(name).values([given] if given else [])


def test_every_query_begins_with_its_question() -> None:
    assert len(named_queries()) == 12
    for query in named_queries().values():
        assert query.question.endswith("?") and query.sql.startswith(f"-- {query.question}\n")
        assert query.takes_sweep


def test_the_query_of_nodes_names_the_kinds_that_the_machine_may_have_caused() -> None:
    kinds = ", ".join(f"'{kind}'" for kind in sorted(SUSPECT_KINDS))
    assert f"IN ({kinds})" in named_query("flaky_nodes").sql


def test_the_query_of_memory_groups_by_every_column_of_a_layout_but_its_micro_batch() -> None:
    sql = named_query("oom_frontier").sql
    # Accumulation follows from the micro-batch.
    varied = {"micro_batch_size", "grad_accum_steps"}
    wanted = ["cell", *(one.name for one in LAYOUT_COLUMNS if one.name not in varied)]
    selected = re.findall(r"^    (?:\w+\.|.* AS )(\w+),$", sql, re.MULTILINE)
    assert selected[: len(wanted)] == wanted
    places = ", ".join(map(str, range(1, len(wanted) + 1)))
    assert f"GROUP BY {places}\nORDER BY {places}\n" in sql
