"""The calculators of a sweep: read from its store, read again for a page that is opened later."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from db.store import Store
from orchestrator.cli.ui.calculators import FRESH_SECONDS, MOST_CELLS, Calculators
from orchestrator.core.errors import UsageInvalid
from tests.cli.test_calculator import SLOWDOWN, known, measure


class Clock:
    """A clock that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A store with a sweep of which nothing is measured yet."""
    found = f"sqlite:///{tmp_path}/sweep.sqlite"
    for file in ("8b.yaml", "playbook.yaml"):
        spec = known(file, found).spec
        with Store.open(found) as store:
            store.ensure_sweep(spec.name, spec.model_dump_json(), spec.conditions())
    return found


def test_a_page_that_is_opened_later_knows_what_was_measured_since(url: str) -> None:
    clock = Clock()
    calculators = Calculators(db=url, sweep="8b", clock=clock)
    found, axes = calculators.page(None, {})
    assert found.known.based_on.startswith("uncalibrated")
    given = {axis["name"]: axis["values"][axis["place"]] for axis in axes}
    given = {name: text for name, text in given.items() if text}
    _, before = calculators.explain(None, given)
    num = measure(url, "8b.yaml")
    clock.now += FRESH_SECONDS / 2
    # Somebody else's page does not change what an open page is answered.
    assert calculators.page(None, {})[0].known.based_on.startswith("uncalibrated")
    clock.now += FRESH_SECONDS
    assert calculators.explain(None, given)[1] == before
    again, _ = calculators.page(None, {})
    assert again.known.based_on == f"calibrated by {num} trials of 8b ({num})"
    _, after = calculators.explain(None, given)
    assert before.step_seconds is not None
    assert after.step_seconds == pytest.approx(SLOWDOWN * before.step_seconds, rel=0.05)


def test_the_first_answer_reads_the_store_if_no_page_did(url: str) -> None:
    calculators = Calculators(db=url, sweep="8b")
    planned, found = calculators.explain(None, {"micro_batch_size": "2"})
    assert found.layout.micro_batch_size == 2
    assert planned.spec.name == "8b"


def test_a_renamed_sweep_keeps_its_trials_as_its_own(url: str) -> None:
    measure(url, "8b.yaml")
    with Store.open(url) as store:
        sweep_id = store.sweep_named("8b").id
        store.release(sweep_id, 1)
        store.rename(sweep_id, "first")
    found, _ = Calculators(db=url, sweep="first").page(None, {})
    assert found.known.spec.name == "first"
    assert "of first (" in found.known.based_on


def test_few_cells_are_kept_at_once(url: str) -> None:
    calculators = Calculators(db=url, sweep="playbook")
    keys = calculators.page(None, {})[0].keys
    assert len(keys) > MOST_CELLS
    first = calculators.page(keys[0], {})[0].calculator
    assert calculators.page(keys[0], {})[0].calculator is first
    for key in keys[1 : MOST_CELLS + 1]:
        assert calculators.page(key, {})[0].calculator.cell.key == key
    assert len(calculators._cells) == MOST_CELLS
    assert calculators.page(keys[0], {})[0].calculator is not first


def test_a_cell_that_there_is_not_is_refused(url: str) -> None:
    with pytest.raises(UsageInvalid, match="has no cell"):
        Calculators(db=url, sweep="8b").page("nothing", {})


def test_threads_that_ask_at_once_get_what_one_gets(url: str) -> None:
    calculators = Calculators(db=url, sweep="playbook")
    keys = Calculators(db=url, sweep="playbook").page(None, {})[0].keys[:4]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda key: calculators.explain(key, {})[1], keys * 4))
    alone = [Calculators(db=url, sweep="playbook").explain(key, {})[1] for key in keys]
    assert found == alone * 4
