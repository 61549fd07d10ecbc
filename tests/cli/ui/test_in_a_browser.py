"""The live pages as a person sees them, in a headless Chromium: updates, keys, words, colours."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from db.store import Store
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.lifecycle import TrialEvent
from tests.cli.cli_store import HOSTILE, Filled
from tests.cli.ui.served import Visitor, served
from tests.db.builders import Bench, failure, record_failure
from tests.report.pages.chromium import AXE, DESK, PHONE, Browser, chromium

pytestmark = pytest.mark.browser
# The numbers of the trials in their table.
TRIALS = (
    "return [...document.querySelectorAll('[data-table=trials] tbody th')]"
    ".map(t => t.textContent).join()"
)
PAGES = ("/", "/trial/FAILED", "/sql", "/sql?statement=@best", "/cancel", "/retry?trial=FAILED")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(autouse=True)
def _leave_the_last_page(browser: Browser) -> None:
    """The page of another test complains of its server, which has ended."""
    browser.driver.get("about:blank")
    browser.complaints()


def url(visitor: Visitor, page: str, shown: Filled | None = None) -> str:
    failed = str(shown.failed) if shown is not None else ""
    return f"http://{visitor.host}{page.replace('FAILED', failed)}"


def tab_to(browser: Browser, script: str, *, most: int = 60) -> None:
    """Press Tab until a script about `e`, the element with the focus, returns true."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    for _ in range(most):
        ActionChains(browser.driver).send_keys(Keys.TAB).perform()
        if browser.run(f"const e = document.activeElement; return {script}"):
            return
    raise AssertionError(f"Tab never led to {script}")


def press_enter(browser: Browser) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    ActionChains(browser.driver).send_keys(Keys.ENTER).perform()


def test_a_commit_is_on_the_page_within_two_seconds(browser: Browser, sqlite_url: str) -> None:
    with Store.open(sqlite_url) as store:
        bench = Bench.on(store)
        bench.measure(1, 1000.0)
        with served(sqlite_url) as visitor:
            browser.get(url(visitor, "/"))
            browser.wait("return document.querySelector('a[href=\"trial/1\"]')")
            browser.wait("return document.getElementById('live').dataset.version !== '0'")
            bench.measure(2, 2000.0)
            committed = time.monotonic()
            # Its start may be shown first, in the last row: it was written before its numbers.
            browser.wait(f"return (() => {{ {TRIALS} }})() === '2,1'")
            assert time.monotonic() - committed < 2.0
            cell = "return document.querySelector('[data-table=cells] td').textContent"
            assert browser.wait(f"{cell} === '2,000'")
            trial_id, attempt = bench.start(4)
            broken = failure(FailureKind.USER_ERROR)
            record_failure(
                store, trial_id, attempt, epoch=bench.epoch, failure=broken, event=TrialEvent.FAILED
            )
            browser.wait(
                "return document.getElementById('said').textContent.startsWith('Trial 3 failed')"
            )
            assert browser.complaints() == []
            assert all(one.startswith(url(visitor, "/")) for one in browser.requests())


def test_the_focus_stays_on_its_row_when_others_come(browser: Browser, sqlite_url: str) -> None:
    with Store.open(sqlite_url) as store:
        bench = Bench.on(store)
        bench.measure(1, 1000.0)
        with served(sqlite_url) as visitor:
            browser.get(url(visitor, "/"))
            tab_to(browser, "e.closest('[data-table=trials] tbody') && e.href.endsWith('trial/1')")
            bench.measure(2, 2000.0)
            browser.wait("return document.querySelector('[data-key=\"trial 2\"]')")
            assert browser.run("return document.activeElement.getAttribute('href')") == "trial/1"
            press_enter(browser)
            browser.wait("return document.querySelector('h1').textContent === 'Trial 1: measured'")


def test_a_sweep_is_cancelled_by_keyboard_after_its_question(
    browser: Browser, sqlite_url: str
) -> None:
    with Store.open(sqlite_url) as store:
        Bench.on(store)
        with served(sqlite_url) as visitor:
            browser.get(url(visitor, "/"))
            tab_to(browser, "e.textContent === 'Cancel'")
            press_enter(browser)
            browser.wait("return document.querySelector('h1').textContent === 'Cancel the sweep?'")
            assert store.sweep_named("tiny").stop_requested is None
            tab_to(browser, "e.textContent === 'Yes'")
            press_enter(browser)
            browser.wait("return document.querySelector('h1').textContent === 'Asked'")
            assert str(store.sweep_named("tiny").stop_requested) == "cancel"
            assert browser.complaints() == []


def test_a_table_is_filtered_and_stays_so_while_the_sweep_goes_on(
    browser: Browser, sqlite_url: str
) -> None:
    with Store.open(sqlite_url) as store:
        bench = Bench.on(store)
        bench.measure(1, 1000.0)
        bench.measure(2, 2000.0)
        with served(sqlite_url) as visitor:
            browser.get(url(visitor, "/"))
            browser.wait(f"{TRIALS} === '2,1'")
            browser.driver.find_element("id", "matching-trials").send_keys("mbs1")
            browser.wait(f"{TRIALS} === '1'")
            bench.measure(4, 3000.0)
            bench.measure(16, 500.0)
            browser.wait(
                "return document.querySelector('[data-table=cells] td').textContent === '3,000'"
            )
            browser.wait(f"{TRIALS} === '1,4'")
            assert browser.complaints() == []


def test_hostile_text_is_shown_and_does_nothing(
    browser: Browser, visitor: Visitor, shown: Filled
) -> None:
    browser.get(url(visitor, "/"))
    browser.wait("return document.getElementById('live').dataset.version !== '0'")
    # As the server wrote it, and as the script writes it.
    for _ in range(2):
        message = browser.wait(
            "return [...document.querySelectorAll('[data-table=failures] td:last-child')]"
            ".map(t => t.textContent).find(t => t.includes('<script>alert(1)</script>'))"
        )
        assert message.startswith("[/bold] [link=x]y ") and HOSTILE not in message
        browser.run(
            "document.getElementById('sort-failures').selectedIndex = 2;"
            "document.getElementById('sort-failures').dispatchEvent(new Event('change'))"
        )
    inside = "return document.querySelectorAll('main script, main img, main iframe').length"
    for page in PAGES:
        browser.get(url(visitor, page, shown))
        assert browser.run(inside) == 0
    assert browser.complaints() == []


def test_a_question_in_sql_is_answered_by_keyboard(
    browser: Browser, visitor: Visitor, shown: Filled
) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    browser.get(url(visitor, "/sql"))
    tab_to(browser, "e.id === 'statement'")
    statement = "select failure_message from v_failure"
    ActionChains(browser.driver).send_keys(statement).perform()
    tab_to(browser, "e.textContent === 'Run'")
    press_enter(browser)
    cells = "[...document.querySelectorAll('#answer td')]"
    found = browser.wait(f"const c = {cells}; return c.length && c.map(t => t.textContent)")
    assert any("<script>alert(1)</script>" in text for text in found)
    assert browser.run("return document.documentElement.scrollWidth") <= DESK[0]
    assert browser.violations() == []
    assert browser.complaints() == []


def test_the_pictures_of_the_server_are_drawn(
    browser: Browser, visitor: Visitor, shown: Filled
) -> None:
    browser.get(url(visitor, "/"))
    tab_to(browser, "e.textContent === 'Pictures'")
    press_enter(browser)
    browser.wait("return document.querySelector('[data-picture]')")
    for name in browser.pictures()[:3]:
        browser.draw(name)
    browser.get(url(visitor, "/pictures/trial.html#FAILED", shown))
    browser.wait(
        f"return document.querySelector('h1').textContent === 'Trial {shown.failed}: failed'"
    )
    assert browser.complaints() == []
    assert all(one.startswith(url(visitor, "/")) for one in browser.requests())


def test_a_server_that_is_gone_is_said(browser: Browser, sqlite_url: str) -> None:
    with Store.open(sqlite_url) as store:
        Bench.on(store).measure(1, 1000.0)
    with served(sqlite_url) as visitor:
        browser.get(url(visitor, "/"))
        browser.wait("return performance.getEntriesByType('resource').length")
        assert browser.run("return document.getElementById('cut-off').hidden")
    browser.wait("return !document.getElementById('cut-off').hidden")
    browser.complaints()


@pytest.mark.parametrize("page", PAGES)
def test_nothing_is_wider_than_a_phone(
    browser: Browser, visitor: Visitor, shown: Filled, page: str
) -> None:
    browser.window(*PHONE)
    try:
        browser.get(url(visitor, page, shown))
        assert browser.run("return document.documentElement.scrollWidth") <= PHONE[0]
    finally:
        browser.window(*DESK)


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("page", PAGES)
def test_axe_finds_nothing_that_keeps_people_out(
    browser: Browser, visitor: Visitor, shown: Filled, page: str, is_dark: bool
) -> None:
    if not os.environ.get(AXE):
        pytest.skip(f"{AXE} does not name the file of axe-core, which .ci/run takes from npm")
    browser.window(*DESK, is_dark=is_dark)
    try:
        browser.get(url(visitor, page, shown))
        assert browser.violations() == []
    finally:
        browser.window(*DESK)
