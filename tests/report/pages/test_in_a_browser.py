"""A report as a person sees it, in a headless Chromium: marks, links, words, colours, time."""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.report.pages.report_folder import Written, write_report
from orchestrator.report.pictures.axis_values import measured_layouts
from orchestrator.report.sweep_rows import SweepRows
from tests.cli.cli_store import HOSTILE
from tests.report.pages.chromium import AXE, DESK, DRAWN_SECONDS, PHONE, Browser, chromium

pytestmark = pytest.mark.browser
MANY = 4_000
# The heading of a trial's page, once its data are there.
HEADING = (
    "const found = document.querySelector('#trial h1')?.textContent;"
    " return found !== 'Trial' && found"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def written(
    tiny: SweepRows, scaling: SweepRows, tmp_path_factory: pytest.TempPathFactory
) -> Written:
    return write_report([tiny, scaling], tmp_path_factory.mktemp("browser") / "report")


@pytest.fixture(scope="module")
def many(scaling: SweepRows, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The report of one sweep with thousands of measured trials."""
    some = [one for one in scaling.trials if one.trial.state is TrialState.MEASURED]
    trials = [
        replace(
            some[number % len(some)],
            trial=replace(some[number % len(some)].trial, id=1000 + number),
            attempts=(),
            events=(),
        )
        for number in range(MANY)
    ]
    leading = {
        trial.trial.cell_id: replace(
            scaling.rankings[trial.trial.cell_id], leading=[trial.trial], tied=()
        )
        for trial in trials
    }
    rows = replace(scaling, trials=trials, rankings=leading)
    return write_report([rows], tmp_path_factory.mktemp("many") / "report")


def url(written: Written, page: str = "index.html") -> str:
    name, hash_sign, trial = page.partition("#")
    return f"{(written.index.parent / name).as_uri()}{hash_sign}{trial}"


def expected_marks(figure: dict[str, Any]) -> int:
    """The points, bars and boxes that plotly draws for a figure."""
    num = 0
    for trace in figure["data"]:
        if trace["type"] == "scatter" and "markers" in trace["mode"]:
            num += sum(value is not None for value in trace["y"])
        elif trace["type"] == "bar":
            num += sum(
                x is not None and y is not None for x, y in zip(trace["x"], trace["y"], strict=True)
            )
        elif trace["type"] == "heatmap":
            num += 1  # one image
        elif trace["type"] == "box":
            num += len(set(trace["x"]))
            num += len(trace["y"]) if trace["boxpoints"] else 0
    return num


def test_every_picture_has_its_marks(browser: Browser, written: Written) -> None:
    browser.get(url(written))
    drawn = {one.name: one for one in written.pictures if one.figure is not None}
    assert browser.pictures() == list(drawn)
    for name, picture in drawn.items():
        browser.draw(name)
        found = browser.run(
            "const e = document.getElementById('picture-' + arguments[0]);"
            "return [e.querySelectorAll('.scatterlayer .point, .barlayer .point > path,"
            " .heatmaplayer image, .boxlayer path.box, .boxlayer path.point').length,"
            " e.querySelectorAll('.scatterlayer .js-line').length]",
            name,
        )
        assert picture.figure is not None
        lines = sum(
            trace["type"] == "scatter" and "lines" in trace["mode"]
            for trace in picture.figure["data"]
        )
        assert found[0] == expected_marks(picture.figure), name
        assert found[1] >= lines, name
    assert browser.complaints() == []
    assert all(address.startswith("file://") for address in browser.requests())


def test_a_click_on_a_point_opens_the_page_of_its_trial(browser: Browser, written: Written) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    browser.get(url(written))
    browser.draw("efficiency")
    point = browser.driver.find_element("css selector", "#picture-efficiency .point")
    trial_id = browser.run(
        "return document.getElementById('picture-efficiency').data[1].customdata[0]"
    )
    ActionChains(browser.driver).move_to_element(point).pause(0.2).click().perform()
    browser.wait("return location.hash === '#' + arguments[0]", trial_id)
    heading = browser.wait(HEADING)
    assert heading == f"Trial {trial_id}: measured"
    assert browser.complaints() == []


def test_a_click_on_a_bar_of_failures_opens_the_trials_behind_it(
    browser: Browser, written: Written
) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    (picture,) = [one for one in written.pictures if one.name == "failures"]
    assert picture.figure is not None
    for number, trace in enumerate(picture.figure["data"]):
        browser.get(url(written))
        browser.draw("failures")
        bar = browser.run(
            "return [...document.querySelectorAll('#picture-failures .trace.bars')]"
            "[arguments[0]].querySelector('.point path')",
            number,
        )
        ActionChains(browser.driver).move_to_element(bar).pause(0.2).perform()
        hover = browser.wait(
            "return document.querySelector('#picture-failures .hovertext')?.textContent"
        )
        assert f"trial {trace['customdata'][0][0]}, attempt " in hover
        ActionChains(browser.driver).click().perform()
        ids = trace["customdata"][0]
        browser.wait(
            "return decodeURIComponent(location.hash) === arguments[0]",
            f"#{ids[0]}" if len(ids) == 1 else f"#ids={','.join(map(str, ids))}",
        )
    assert browser.complaints() == []


def test_every_link_of_the_pages_leads_somewhere(browser: Browser, written: Written) -> None:
    browser.get(url(written))
    links = browser.run("return [...document.querySelectorAll('a[href]')].map(a => a.href)")
    for link in set(links):
        page, _, trial = link.removeprefix("file://").partition("#")
        assert Path(page).is_file()
        if page.endswith("trial.html"):
            browser.get(link)
            shown = browser.wait(HEADING)
            assert shown.startswith(f"Trial {trial}: ")


def test_hostile_text_is_shown_and_does_nothing(
    browser: Browser, written: Written, tiny: SweepRows
) -> None:
    failed = next(one for one in tiny.trials if one.trial.state is TrialState.FAILED)
    browser.get(url(written, f"trial.html#{failed.trial.id}"))
    log = browser.wait("const p = document.querySelector('pre.log'); return p && p.textContent")
    assert HOSTILE.splitlines()[1] in log
    assert "<script>alert(1)</script>" in log
    inside = "return document.querySelectorAll('main script, main img, main iframe').length"
    assert browser.run(inside) == 0
    for page in ("index.html", "trials.html"):
        browser.get(url(written, page))
        assert browser.run(inside) == 0
    assert browser.complaints() == []


def test_a_filter_of_the_parallel_coordinates_leads_to_the_trials_that_are_left(
    browser: Browser, written: Written, scaling: SweepRows, tiny: SweepRows
) -> None:
    browser.get(url(written))
    browser.draw("parallel")
    select = "[aria-label='Only layouts with this mbs']"
    browser.wait(f'return document.querySelector("{select}")')
    browser.driver.find_element("css selector", f"{select} option[value='4']").click()
    link = browser.driver.find_element("css selector", "[aria-labelledby=title-parallel] form a")
    measured = [
        one.trial
        for sweep in (tiny, scaling)
        for one in sweep.trials
        if one.trial.is_current_fingerprint
    ]
    left = [trial.id for trial in measured if trial.layout.micro_batch_size == 4]
    assert link.text == f"{len(left)} of {len(measured)} layouts, in the table"
    drawn = "return document.getElementById('picture-parallel').data.flatMap(t => t.x).length"
    num_axes = browser.run(
        "return document.querySelectorAll('section form.filter select').length - 1"
    )
    assert browser.run(drawn) == len(left) * (num_axes + 2)
    link.click()
    browser.wait("return document.querySelectorAll('#trials tbody tr').length")
    rows = "return [...document.querySelectorAll('#trials tbody th')].map(t => +t.textContent)"
    assert sorted(browser.run(rows)) == sorted(left)
    assert browser.complaints() == []


def test_a_range_of_speed_leaves_the_layouts_that_are_as_fast(
    browser: Browser, written: Written, scaling: SweepRows, tiny: SweepRows
) -> None:
    browser.get(url(written))
    browser.draw("parallel")
    select = "[aria-label='Only layouts of at least this speed']"
    browser.wait(f'return document.querySelector("{select}")')
    browser.driver.find_element("css selector", f"{select} option[value='0.9']").click()
    found = [one for one in measured_layouts([tiny, scaling]) if one.relative_speed >= 0.9]
    assert 0 < len(found) < len(measured_layouts([tiny, scaling]))
    browser.driver.find_element("css selector", "[aria-labelledby=title-parallel] form a").click()
    browser.wait("return document.querySelectorAll('#trials tbody tr').length")
    rows = "return [...document.querySelectorAll('#trials tbody th')].map(t => +t.textContent)"
    assert sorted(browser.run(rows)) == sorted(one.trial_id for one in found)
    assert browser.complaints() == []


def test_the_keyboard_reaches_the_trial_of_every_point(browser: Browser, written: Written) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.get(url(written))
    num = 0
    for picture in written.pictures:
        if picture.figure is None:
            continue
        ids = picture.trial_ids
        here = f"[aria-labelledby=title-{picture.name}] .trials-of"
        if not ids:
            assert not browser.driver.find_elements("css selector", here)
            continue
        browser.wait(f"return document.querySelector('{here}')")
        browser.driver.find_element("css selector", f"{here} summary").send_keys(Keys.ENTER)
        browser.wait(f"return document.querySelectorAll('{here} li a').length")
        links = f"return [...document.querySelectorAll('{here} li a')].map(a => +a.hash.slice(1))"
        assert browser.run(links) == ids
        num += len(ids)
    assert num > 20
    # Enter on the last of them opens its page.
    last = browser.driver.find_elements("css selector", ".trials-of[open] li a")[-1]
    text = last.text
    last.send_keys(Keys.ENTER)
    assert browser.wait(HEADING).lower().startswith(f"{text}:")
    assert browser.complaints() == []


def test_thousands_of_points_are_reached_by_the_table(browser: Browser, many: Written) -> None:
    browser.get(url(many))
    browser.run("document.querySelector('[aria-labelledby=title-scaling] details').open = true")
    address = browser.wait(
        "return document.querySelector('[aria-labelledby=title-scaling] .trials-of p a')?.href"
    )
    browser.get(address)
    browser.wait("return document.getElementById('count').textContent")
    counted = browser.run("return document.getElementById('count').textContent")
    assert counted == f"{MANY:,} of {MANY:,} trials"


def test_the_rows_that_are_shown_are_saved_as_csv(
    browser: Browser, written: Written, tmp_path: Path
) -> None:
    browser.driver.execute_cdp_cmd(
        "Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)}
    )
    browser.get(url(written, "trials.html"))
    browser.wait("return document.querySelectorAll('#trials tbody tr').length")
    browser.driver.find_element("id", "words").send_keys("scaling mbs4")
    browser.driver.find_element("id", "csv").click()
    file = tmp_path / "trials.csv"
    deadline = time.monotonic() + DRAWN_SECONDS
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    saved = list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))
    assert [row["tokens/s/GPU"] for row in saved] == ["1,000", "800"]
    assert all("mbs4" in row["layout"] for row in saved)
    assert browser.complaints() == []


def test_a_profiled_trial_has_its_step_and_its_memory_as_pictures(
    browser: Browser, written: Written, scaling: SweepRows
) -> None:
    [profiled] = [one for one in scaling.trials if one.profiles]
    browser.get(url(written, f"trial.html#{profiled.trial.id}"))
    browser.wait("return document.querySelectorAll('#trial .scatterlayer .js-line').length")
    bars = browser.run("return document.querySelectorAll('#trial .barlayer .point').length")
    # Matrix products, and exposed communication.
    assert bars == 2
    assert browser.complaints() == []


def test_a_node_with_markup_in_its_name_is_shown_as_it_is_called(
    browser: Browser, tiny: SweepRows, tmp_path: Path
) -> None:
    name = "<b>evil</b><img src=x onerror=alert(1)>$x$"
    trials = [
        replace(
            one,
            attempts=tuple(
                replace(it, nodes=(name,), failure=it.failure and replace(it.failure, node=name))
                for it in one.attempts
            ),
        )
        for one in tiny.trials
    ]
    browser.get(url(write_report([replace(tiny, trials=trials)], tmp_path)))
    for picture in ("failures", "gantt"):
        browser.draw(picture)
        ticks = "#picture-" + picture + " .yaxislayer-above .ytick text, .yaxislayer-below text"
        shown = browser.run(
            "return [...document.querySelectorAll(arguments[0])].map(t => t.textContent)", ticks
        )
        assert name in shown
    assert browser.complaints() == []


def test_a_trial_that_is_not_there_is_said_so(browser: Browser, written: Written) -> None:
    browser.get(url(written, "trial.html#999999"))
    assert browser.wait(
        "return document.querySelector('#trial h1').textContent === 'No such trial'"
    )


def test_the_table_of_trials_is_filtered_and_sorted_and_its_address_keeps_it(
    browser: Browser, written: Written, tiny: SweepRows, scaling: SweepRows
) -> None:
    browser.get(url(written, "trials.html"))
    browser.wait("return document.querySelectorAll('#trials tbody tr').length")
    num = len(tiny.trials) + len(scaling.trials)
    assert browser.run("return document.getElementById('count').textContent") == (
        f"{num} of {num} trials"
    )
    browser.driver.find_element("id", "words").send_keys("scaling mbs4")
    rows = (
        "return [...document.querySelectorAll('#trials tbody tr')].map(r => r.cells[2].textContent)"
    )
    assert browser.run(rows) == ["1,000", "800"]
    browser.driver.find_element("id", "words").clear()
    browser.driver.find_element("id", "words").send_keys("scaling")
    button = browser.driver.find_element("css selector", "#trials th:nth-child(3) button")
    button.click()
    found = browser.run(rows)
    assert found == ["1,000", "900", "800", "720", "700", "560", "-", "-"]
    browser.driver.refresh()
    browser.wait("return document.querySelectorAll('#trials tbody tr').length === 8")


def test_thousands_of_points_are_drawn(browser: Browser, many: Written) -> None:
    """How long it takes is measured by `benchmarks.report`."""
    browser.get(url(many))
    browser.draw("scaling")
    points = browser.run(
        "return document.querySelectorAll('#picture-scaling .scatterlayer .point').length"
    )
    assert points == MANY


def test_on_paper_all_cells_are_open_and_pictures_are_dark_on_white(
    browser: Browser, written: Written
) -> None:
    state = (
        "const text = document.querySelector('#picture-scaling .xtick text');"
        "return [getComputedStyle(text).fill, document.querySelectorAll('details.cell').length,"
        " document.querySelectorAll('details.cell[open]').length]"
    )
    browser.window(*DESK, is_dark=True)
    try:
        browser.get(url(written))
        browser.draw("scaling")
        browser.run("document.querySelector('details.cell').open = false")
        shown, num_cells, num_open = browser.run(state)
        assert num_open < num_cells
        browser.run("dispatchEvent(new Event('beforeprint'))")
        assert browser.run(state) == ["rgb(51, 51, 51)", num_cells, num_cells]
        browser.run("dispatchEvent(new Event('afterprint'))")
        assert browser.run(state) == [shown, num_cells, num_open] and shown != "rgb(51, 51, 51)"
    finally:
        browser.window(*DESK)


@pytest.mark.parametrize("page", ["index.html", "trials.html", "trial.html#1"])
def test_nothing_is_wider_than_a_phone(browser: Browser, written: Written, page: str) -> None:
    browser.window(*PHONE)
    try:
        browser.get(url(written, page))
        browser.wait("return document.querySelector('main')?.textContent.length > 100")
        assert browser.run("return document.documentElement.scrollWidth") <= PHONE[0]
    finally:
        browser.window(*DESK)


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("page", ["index.html", "trials.html", "trial.html#1"])
def test_axe_finds_nothing_that_keeps_people_out(
    browser: Browser, written: Written, page: str, is_dark: bool
) -> None:
    if not os.environ.get(AXE):
        pytest.skip(f"{AXE} does not name the file of axe-core, which .ci/run takes from npm")
    browser.window(*DESK, is_dark=is_dark)
    try:
        browser.get(url(written, page))
        browser.wait("return document.querySelector('main')?.textContent.length > 100")
        assert browser.violations() == []
    finally:
        browser.window(*DESK)
