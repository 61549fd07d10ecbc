"""The calculators of a sweep: read from its store, read again for a page that is opened later."""

from __future__ import annotations

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
    page = calculators.page(None, {})
    assert page["based_on"].startswith("uncalibrated")
    given = {axis["name"]: axis["values"][axis["place"]] for axis in page["axes"]}
    given = {name: text for name, text in given.items() if text}
    before = calculators.result(None, given)
    num = measure(url, "8b.yaml")
    clock.now += FRESH_SECONDS / 2
    assert calculators.page(None, {})["based_on"].startswith("uncalibrated")
    clock.now += FRESH_SECONDS
    # What an open page is answered does not change by itself.
    assert calculators.result(None, given) == before
    assert calculators.page(None, {})["based_on"] == f"calibrated by {num} trials of 8b ({num})"
    after = calculators.result(None, given)
    assert after["layout"] == before["layout"]
    slower = after["step"]["total"] / before["step"]["total"]
    assert slower == pytest.approx(SLOWDOWN, rel=0.05)


def test_the_first_answer_reads_the_store_if_no_page_did(url: str) -> None:
    found = Calculators(db=url, sweep="8b").result(None, {"micro_batch_size": "2"})
    assert found["fields"]["micro_batch_size"] == "2"


def test_a_renamed_sweep_keeps_its_trials_as_its_own(url: str) -> None:
    measure(url, "8b.yaml")
    with Store.open(url) as store:
        sweep_id = store.sweep_named("8b").id
        store.release(sweep_id, 1)
        store.rename(sweep_id, "first")
    calculators = Calculators(db=url, sweep="first")
    assert "of first (" in calculators.page(None, {})["based_on"]
    assert calculators._known is not None
    assert calculators._known.knowledge._own.keys() == {calculators._known.spec.cells()[0]}


def test_few_cells_are_kept_at_once(url: str) -> None:
    calculators = Calculators(db=url, sweep="playbook")
    keys = calculators.page(None, {})["cells"]
    assert len(keys) > MOST_CELLS
    before = calculators.result(keys[0], {})
    for key in keys[: MOST_CELLS + 1]:
        assert calculators.page(key, {})["cell"] == key
    assert [cell.key for cell in calculators._cells] == keys[1 : MOST_CELLS + 1]
    assert calculators.result(keys[0], {}) == before


def test_a_cell_that_there_is_not_is_refused(url: str) -> None:
    with pytest.raises(UsageInvalid, match="has no cell"):
        Calculators(db=url, sweep="8b").page("nothing", {})
