"""`strategy: auto` on planted cells: what it finds with physics and a few trials, what it does
without physics, and what it costs.
"""

from __future__ import annotations

import re
import time
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.searcher_scale import CELL as OF_64_GPUS
from benchmarks.searcher_scale import candidates as fifteen_thousand
from orchestrator.core.physics.trainer import Trainer, llama_trainer
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.dominance import needs_at_least
from orchestrator.core.problem.hardware import DEVICES
from orchestrator.core.problem.layout import Layout
from orchestrator.core.problem.layout_table import LayoutTable
from orchestrator.core.problem.model_shape import PRESETS
from orchestrator.core.search.outcome import Failed, Measured, OutOfMemory
from orchestrator.core.search.planner import Candidates, rank_candidates
from orchestrator.core.sweepfile.search_section import Search, Strategy
from orchestrator.search.axes import lattice_of
from orchestrator.search.layout_state import Known
from orchestrator.search.searcher import Searcher
from tests.search.planted_cell import (
    LIMIT_BYTES,
    TOKENS,
    Planted,
    drive,
    measured,
    planted,
    searcher,
)


def asks_until(share: float, cell: Planted, strategy: Strategy, *, seed: int = 0) -> int:
    search, asks = searcher(cell, strategy, seed=seed), 0
    while (proposal := search.ask()) is not None:
        asks += 1
        search.tell(proposal.layout, cell.outcome(proposal.layout))
        if cell.excess[proposal.layout] <= 0 and cell.value[proposal.layout] >= share * cell.best:
            return asks
    raise AssertionError("the best was never asked for")


def without_times(cell: Planted) -> Planted:
    """The same cell on a device of which nothing is known."""
    nan = np.full(len(cell.candidates), np.nan)
    work = 1.0 / cell.candidates.tokens_per_second_per_gpu
    candidates = replace(
        cell.candidates,
        tokens_per_second_per_gpu=nan,
        step_seconds=nan,
        predict=None,
        relative_work=work,
    )
    return Planted(cell=cell.cell, candidates=candidates, value=cell.value, excess=cell.excess)


def test_auto_comes_near_the_best_in_a_tenth_of_the_asks_of_random() -> None:
    cells = [planted(seed=seed) for seed in range(6)]
    auto = [asks_until(0.9, cell, Strategy.AUTO) for cell in cells]
    random = [asks_until(0.9, cell, Strategy.RANDOM, seed=seed) for seed, cell in enumerate(cells)]
    assert np.mean(auto) <= 0.25 * np.mean(random)


def test_on_an_unknown_device_the_order_of_work_is_a_start() -> None:
    cells = [without_times(planted(seed=seed)) for seed in range(4)]
    auto = [asks_until(0.9, cell, Strategy.AUTO) for cell in cells]
    random = [asks_until(0.9, cell, Strategy.RANDOM, seed=seed) for seed, cell in enumerate(cells)]
    assert np.mean(auto) < 0.6 * np.mean(random)


CELL = Cell(model=PRESETS["llama-3.1-8b"], num_gpus=16, sequence_length=2048, global_batch_size=256)


def with_attention(better: str) -> tuple[Candidates, dict[Layout, float]]:
    """Layouts that differ in an attention kernel too; one of the two is a third faster.

    No formula knows that.
    """
    layouts = [
        Layout(
            data_parallel_size=16 // tp,
            tensor_parallel_size=tp,
            micro_batch_size=mbs,
            grad_accum_steps=16 * tp // mbs,
            zero_stage=1,
            options=(("attention", kernel),),
        )
        for tp in (1, 2, 4, 8)
        for mbs in (1, 2, 4)
        for kernel in ("one", "other")
    ]
    candidates = rank_candidates(
        LayoutTable.of(layouts),
        CELL,
        hardware=DEVICES["h100-sxm"],
        memory_limit_bytes=400e9,
        gpus_per_node=8,
        trainer=Trainer(),
    )
    speeds = candidates.tokens_per_second_per_gpu
    return candidates, {
        layout: float(speed * (1.33 if ("attention", better) in layout.options else 1.0))
        for layout, speed in zip(layouts, speeds, strict=True)
    }


@pytest.mark.parametrize("better", ["one", "other"])
def test_both_words_of_an_option_that_no_formula_knows_are_tried_before_long(better: str) -> None:
    candidates, value = with_attention(better)
    search = Searcher(
        candidates, cell=CELL, search=Search(strategy=Strategy.AUTO), objective=TOKENS
    )
    best = max(value.values())
    asked = []
    while not asked or asked[-1] < 0.98 * best:
        proposal = search.ask()
        assert proposal is not None
        asked.append(value[proposal.layout])
        search.tell(proposal.layout, measured(CELL, asked[-1]))
    assert len(asked) <= 6  # of 24


def test_what_crashes_with_one_word_is_put_off_until_the_other_is_known() -> None:
    candidates, value = with_attention("one")
    search = Searcher(
        candidates, cell=CELL, search=Search(strategy=Strategy.AUTO), objective=TOKENS
    )
    runs = {
        layout: speed for layout, speed in value.items() if ("attention", "other") in layout.options
    }
    asked: list[float] = []
    while not asked or asked[-1] < max(runs.values()):
        proposal = search.ask()
        assert proposal is not None
        speed = runs.get(proposal.layout)
        asked.append(speed or 0.0)
        search.tell(proposal.layout, Failed() if speed is None else measured(CELL, speed))
    assert asked.count(0.0) <= 3


@pytest.mark.long
def test_nothing_that_dominance_does_not_prove_is_ruled_out() -> None:
    for seed in range(3):
        cell = planted(seed=seed, zero_stages=(0, 1))
        search = searcher(cell, Strategy.AUTO, seed=seed)
        asked, condemned = drive(search, cell, 10_000)
        proofs = [layout for layout in asked if cell.excess[layout] > 0]
        for layout in condemned:
            table = LayoutTable.of([layout])
            num_layers = cell.cell.model.num_layers
            assert any(needs_at_least(table, proof, num_layers=num_layers)[0] for proof in proofs)
        assert set(asked) | condemned == set(cell.value)


def test_a_lone_bad_run_is_asked_for_once_more_and_only_once() -> None:
    cell = planted(zero_stages=(1,))
    table, speeds = cell.candidates.table, cell.candidates.tokens_per_second_per_gpu
    smooth = replace(
        cell, value={table.layout(row): float(speeds[row]) for row in range(len(table))}
    )
    search = searcher(smooth, Strategy.AUTO)
    asked, _ = drive(search, smooth, 12)
    best = max(
        (layout for layout in asked if smooth.excess[layout] <= 0), key=smooth.value.__getitem__
    )
    assert search.doubtful() is None
    search.tell(best, measured(smooth.cell, smooth.value[best] / 4))
    again = search.doubtful()
    assert again is not None
    assert again.layout == best
    assert "its neighbours say" in again.why
    assert search.doubtful() is None
    search.tell(best, measured(smooth.cell, smooth.value[best]))
    assert search.doubtful() is None


def test_a_model_of_some_mib_surely_fits_on_a_large_gpu() -> None:
    """An unknown reserve is 2 GiB more or less, a multiple of the model and little of the GPU."""
    device = DEVICES["h200"]
    cell = Cell(model=PRESETS["llama-tiny"], num_gpus=1, sequence_length=64, global_batch_size=8)
    tiny = rank_candidates(
        LayoutTable.of([Layout(micro_batch_size=mbs, grad_accum_steps=8 // mbs) for mbs in (1, 8)]),
        cell,
        hardware=device,
        memory_limit_bytes=float(device.memory_bytes),
        gpus_per_node=8,
        trainer=Trainer(),
    )
    assert tiny.memory_bytes.max() < 2**26
    search = Searcher(tiny, cell=cell, search=Search(strategy=Strategy.AUTO), objective=TOKENS)
    chances = search.probability_of_fitting()
    assert chances is not None
    assert chances.min() > 0.98
    proposal = search.ask()
    assert proposal is not None
    assert re.search(r", 0\.0[1-9]\d of 139\.7 GiB, (99|100)% likely to fit$", proposal.why)


@pytest.mark.parametrize(
    ("trainer", "share"), [(Trainer(), 0.955), (llama_trainer({}, on_gpu=True), 0.98)]
)
def test_a_search_believes_in_the_usable_memory_of_its_trainer(
    trainer: Trainer, share: float
) -> None:
    device = DEVICES["h200"]
    found = rank_candidates(
        LayoutTable.of([Layout()]),
        Cell(model=PRESETS["llama-tiny"], num_gpus=1, sequence_length=64, global_batch_size=1),
        hardware=device,
        memory_limit_bytes=float(device.memory_bytes),
        gpus_per_node=8,
        trainer=trainer,
    )
    assert lattice_of(found, np.arange(1), num_layers=2).usable_share == share


def test_a_cell_in_which_nothing_fits_is_given_up_with_evidence() -> None:
    cell = planted(gpus=8)
    few = rank_candidates(
        cell.candidates.table,
        cell.cell,
        hardware=DEVICES["h100-sxm"],
        memory_limit_bytes=4 * 2**30,
        gpus_per_node=8,
        trainer=Trainer(),
    )
    search = Searcher(few, cell=cell.cell, search=Search(strategy=Strategy.AUTO), objective=TOKENS)
    while (evidence := search.nothing_fits()) is None:
        proposal = search.ask()
        assert proposal is not None
        search.tell(proposal.layout, OutOfMemory())
    assert search.told <= 8
    assert "predicted to need least, ran out of memory of 4.0 GiB" in evidence
    num_others = search.told - 1
    assert (f"and so did {num_others} other" in evidence) == (num_others > 0)


def test_the_evidence_of_a_lone_layout_that_does_not_fit_names_no_others() -> None:
    whole = planted()
    rows = np.array([0])
    one = replace(
        whole.candidates,
        table=whole.candidates.table.take(rows),
        tokens_per_second_per_gpu=whole.candidates.tokens_per_second_per_gpu[rows],
        step_seconds=whole.candidates.step_seconds[rows],
        memory_bytes=whole.candidates.memory_bytes[rows],
        fits=whole.candidates.fits[rows],
        order=np.array([0]),
    )
    search = Searcher(one, cell=whole.cell, search=Search(strategy=Strategy.AUTO), objective=TOKENS)
    search.tell(one.table.layout(0), OutOfMemory())
    evidence = search.nothing_fits()
    assert evidence is not None
    assert "other" not in evidence


def test_a_layout_that_is_bad_indeed_does_not_stand_before_the_next_bad_run() -> None:
    cell = planted(zero_stages=(1,))
    table, speeds = cell.candidates.table, cell.candidates.tokens_per_second_per_gpu
    smooth = replace(
        cell, value={table.layout(row): float(speeds[row]) for row in range(len(table))}
    )
    search = searcher(smooth, Strategy.AUTO)
    asked, _ = drive(search, smooth, 25)
    ran = sorted(
        (layout for layout in asked if smooth.excess[layout] <= 0), key=smooth.value.__getitem__
    )
    worse, lone = ran[-1], ran[-2]
    for layout, factor in ((worse, 6), (lone, 3)):
        search.tell(layout, measured(smooth.cell, smooth.value[layout] / factor))
    found = []
    while (again := search.doubtful()) is not None:
        found.append(again.layout)
        if again.layout == worse:
            search.tell(worse, measured(smooth.cell, smooth.value[worse] / 6))
    assert found[:2] == [worse, lone]


def test_what_a_launch_costs_here_is_what_the_search_weighs() -> None:
    cell = planted()

    def first_asked(launch_seconds: float) -> list[Layout]:
        search = Searcher(
            cell.candidates,
            cell=cell.cell,
            search=Search(strategy=Strategy.AUTO),
            objective=TOKENS,
            launch_seconds=launch_seconds,
            steps_per_trial=20.0,
        )
        asked, _ = drive(search, cell, 12)
        return asked

    assert first_asked(1.0) != first_asked(10_000.0)


def test_a_cell_of_which_something_ran_is_not_given_up() -> None:
    cell = planted()
    search = searcher(cell, Strategy.AUTO)
    drive(search, cell, 30)
    assert search.nothing_fits() is None


def test_an_ask_stays_quick_after_ten_thousand_trials() -> None:
    ranked = fifteen_thousand()
    layouts = [ranked.table.layout(row) for row in range(len(ranked))]
    rows = np.random.default_rng(0).permutation(len(ranked))[:10_000]
    known: list[tuple[Layout, Known]] = [
        (
            layouts[row],
            Measured.of_step(float(ranked.step_seconds[row]), peak_memory_bytes=0.5 * LIMIT_BYTES),
        )
        for row in rows
    ]
    search = Searcher(
        ranked, cell=OF_64_GPUS, search=Search(strategy=Strategy.AUTO), objective=TOKENS
    )
    search.restore(known)
    assert search.ask() is not None
    began = time.process_time()
    for _ in range(40):
        proposal = search.ask()
        assert proposal is not None
        search.tell(proposal.layout, measured(OF_64_GPUS, 1000.0))
    # 50 ms amortised are promised, and 24 measured on a quiet core (benchmarks/searcher_scale.py);
    # here four times as much.
    assert (time.process_time() - began) / 40 < 0.2


def test_what_is_stored_as_predicted_is_what_the_words_say_also_on_an_unknown_device() -> None:
    cell = without_times(planted())
    search = searcher(cell, Strategy.AUTO)
    proposals = []
    while len(proposals) < 8 and (proposal := search.ask()) is not None:
        proposals.append(proposal)
        search.tell(proposal.layout, cell.outcome(proposal.layout))
    told = [proposal for proposal in proposals if proposal.why.startswith("predicted ")]
    assert told
    for proposal in proposals:
        said = proposal.predicted_tokens_per_second_per_gpu
        assert (said is not None) == (proposal in told)
        assert said is None or f"predicted {said:,.0f} tokens/s/GPU" in proposal.why
