"""The calculator in a headless Chromium: by keyboard, with its marks counted against the data."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from db.store import Store
from orchestrator.core.sweepfile.spec import SweepSpec
from tests.cli.test_calculator import measure
from tests.cli.ui.served import Visitor, served
from tests.report.pages.chromium import AXE, DESK, PHONE, Browser, chromium

pytestmark = pytest.mark.browser
CELL = "llama-3.1-8b_16gpu_s4096_gb1024"
LAYOUT = "return document.getElementById('result').dataset.layout"
SENTENCES = "return document.getElementById('sentences').textContent"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def visitor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Visitor]:
    url = f"sqlite:///{tmp_path_factory.mktemp('browser')}/sweep.sqlite"
    measure(url, "8b.yaml")
    with served(url, "8b") as found:
        yield found


def open_page(browser: Browser, visitor: Visitor, query: str = "") -> str:
    """Open the calculator, and return the key of the layout that it shows."""
    browser.get(f"http://{visitor.host}/calculator{query}")
    return str(browser.wait(LAYOUT))


def data(browser: Browser, visitor: Visitor) -> dict[str, Any]:
    """What the server answers for the address that the page has now."""
    query = browser.wait("return location.search")
    found: dict[str, Any] = json.loads(visitor.get(f"/calculator/result{query}").text)
    return found


def key(browser: Browser, control: str, *keys: str) -> None:
    """Press keys on a control, which gets the focus as by Tab."""
    browser.run("document.getElementById('axis-' + arguments[0]).focus()", control)
    for one in keys:
        browser.driver.switch_to.active_element.send_keys(one)


def shows(browser: Browser, layout: str) -> None:
    browser.wait(f"{LAYOUT} === arguments[0]", layout)


def assert_shown(browser: Browser, found: dict[str, Any]) -> None:
    """Compare bars, tables and sentences with the data."""
    browser.wait(f"{SENTENCES} === arguments[0]", "".join(found["sentences"]))
    for name in ("memory", "step"):
        shown = found[name]
        marks = browser.run(
            "return [...document.querySelectorAll(`#${arguments[0]} rect.part`)].map(r =>"
            " [parseFloat(r.getAttribute('x')), parseFloat(r.getAttribute('width')),"
            " r.textContent])",
            name,
        )
        if shown is None:
            assert not marks or not browser.run(
                "return document.getElementById(arguments[0]).checkVisibility()", name
            )
            continue
        assert len(marks) == len(shown["parts"])
        longest = 1.02 * max(shown["total"], shown.get("limit") or 0, shown["band"][1])
        begin = 0.0
        for (x, width, title), part in zip(marks, shown["parts"], strict=True):
            assert x == pytest.approx(100 * begin / longest, abs=1e-6)
            assert width == pytest.approx(100 * part["value"] / longest, abs=1e-6)
            assert title == f"{part['name']}: {part['text']}"
            begin += part["value"]
        lines = browser.run(
            "return [...document.querySelectorAll(`#${arguments[0]} line.limit`)].map(l =>"
            " parseFloat(l.getAttribute('x1')))",
            name,
        )
        limit = shown.get("limit")
        assert lines == ([] if limit is None else [pytest.approx(100 * limit / longest)])
        low, high = (pytest.approx(100 * value / longest) for value in shown["band"])
        assert browser.run(
            "return [...document.querySelectorAll(`#${arguments[0]} line.band`)].map(l =>"
            " [parseFloat(l.getAttribute('x1')), parseFloat(l.getAttribute('x2'))])",
            name,
        ) == [[low, high]]
        assert table(browser, f"{name}-table") == [
            [part["name"], part["text"], part["share"]] for part in shown["parts"]
        ]
    if found["memory"] is not None:
        assert table(browser, "numbers") == found["numbers"]


def table(browser: Browser, name: str) -> list[list[str]]:
    return list(
        browser.run(
            "return [...document.querySelectorAll(`#${arguments[0]} tbody tr`)].map(r =>"
            " [...r.cells].map(c => c.textContent))",
            name,
        )
    )


def test_a_slider_moved_by_keyboard_changes_bars_and_numbers(
    browser: Browser, visitor: Visitor
) -> None:
    from selenium.webdriver.common.keys import Keys

    open_page(browser, visitor, "?micro_batch_size=2&recompute=full&zero_stage=1")
    before = data(browser, visitor)
    assert_shown(browser, before)
    assert "_mbs2_" in before["layout"]
    key(browser, "micro_batch_size", Keys.ARROW_RIGHT)
    shows(browser, before["layout"].replace("_mbs2_ga", "_mbs4_ga").replace("ga64", "ga32"))
    after = data(browser, visitor)
    assert_shown(browser, after)
    assert after["memory"]["total"] > before["memory"]["total"]
    assert after["numbers"] != before["numbers"]
    value = "return document.getElementById('axis-micro_batch_size').getAttribute('aria-valuetext')"
    assert browser.run(value) == "4"
    key(browser, "micro_batch_size", Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    browser.wait(f"{LAYOUT}.includes('_mbs16_')")
    assert browser.run(value) == "16, not in the sweep file"
    assert_shown(browser, data(browser, visitor))
    assert browser.complaints() == []


def test_a_named_value_is_chosen_by_keyboard(browser: Browser, visitor: Visitor) -> None:
    open_page(browser, visitor, "?recompute=full&zero_stage=1")
    key(browser, "recompute", "n")
    browser.wait(f"{LAYOUT}.includes('_none_')")
    assert_shown(browser, data(browser, visitor))
    assert browser.complaints() == []


def test_a_refusal_is_said_and_the_nearest_layout_is_taken_by_its_button(
    browser: Browser, visitor: Visitor
) -> None:
    from selenium.webdriver.common.keys import Keys

    open_page(browser, visitor, "?tensor_parallel_size=1&zero_stage=1")
    key(browser, "tensor_parallel_size", Keys.END)
    browser.wait(f"{LAYOUT}.includes('_tp8_')")
    key(browser, "pipeline_parallel_size", Keys.END)
    browser.wait(f"{LAYOUT}.includes('_pp8_')")
    refused = data(browser, visitor)
    assert refused["refusal"]
    browser.wait(f"{SENTENCES} === arguments[0]", f"Not legal: {refused['refusal']}.")
    assert browser.run("return document.getElementById('parts').hidden")
    offered = refused["changes"][0]["layouts"]
    button = "[...document.querySelectorAll('#changes button')]"
    assert browser.run(f"return {button}.length") == len(offered)
    browser.run(f"{button}[0].focus()")
    browser.driver.switch_to.active_element.send_keys(Keys.ENTER)
    browser.wait("return !document.getElementById('parts').hidden")
    legal = data(browser, visitor)
    assert legal["fields"] == offered[0]["fields"]
    assert_shown(browser, legal)
    assert browser.complaints() == []


def test_what_does_not_fit_goes_over_the_limit(browser: Browser, visitor: Visitor) -> None:
    query = "?tensor_parallel_size=1&context_parallel_size=1&zero_stage=0&recompute=none"
    open_page(browser, visitor, query)
    found = data(browser, visitor)
    assert found["memory"]["fits"] is False
    assert_shown(browser, found)
    right = browser.run(
        "const r = [...document.querySelectorAll('#memory rect.part')].at(-1);"
        " return parseFloat(r.getAttribute('x')) + parseFloat(r.getAttribute('width'))"
    )
    limit = "document.querySelector('#memory line.limit').getAttribute('x1')"
    assert right > browser.run(f"return parseFloat({limit})")


def test_another_cell_is_chosen_and_its_address_can_be_shared(
    browser: Browser, visitor: Visitor
) -> None:
    open_page(browser, visitor)
    browser.run("document.querySelector(`#cell [value='${arguments[0]}']`).selected = true", CELL)
    browser.run("document.getElementById('cell').dispatchEvent(new Event('change'))")
    browser.wait(f"return document.getElementById('layout')?.dataset.cell === '{CELL}'")
    browser.wait(f"{LAYOUT} !== undefined")
    key(browser, "zero_stage", "2")
    first = data(browser, visitor)
    assert f"cell={CELL}" in browser.run("return location.search")
    browser.driver.refresh()
    shows(browser, first["layout"])
    assert_shown(browser, first)


def test_a_server_that_refuses_or_is_gone_is_said(browser: Browser, visitor: Visitor) -> None:
    open_page(browser, visitor)
    browser.run("const s = document.getElementById('axis-zero_stage'); s.dataset.values = 'a b';")
    browser.run(
        "document.getElementById('axis-zero_stage').dispatchEvent(new Event('input',"
        " {bubbles: true}))"
    )
    browser.wait(f"{SENTENCES}.includes('expected a whole number')")
    assert browser.run("return document.getElementById('parts').hidden")
    # The console says the status itself.
    assert all("400" in line for line in browser.complaints())


def test_values_of_a_sweep_file_with_markup_are_text(browser: Browser, tmp_path: Path) -> None:
    modes = ["<b>x</b><script>alert(1)</script>", "two words & more", "\"q'"]
    spec = SweepSpec.model_validate(
        {
            "name": "hostile",
            "model": "llama-3.1-8b",
            "gpus": 8,
            "device": "h100-sxm",
            "sequence_length": 4096,
            "global_batch_size": 64,
            "workload": {"name": "command", "options": {"argv": ["train", "{mode}"]}},
            "axes": {"micro_batch_size": [1, 2], "options": {"mode": modes}},
        }
    )
    url = f"sqlite:///{tmp_path}/sweep.sqlite"
    with Store.open(url) as store:
        store.ensure_sweep(spec.name, spec.model_dump_json(), spec.conditions())
    with served(url, "hostile") as visitor:
        open_page(browser, visitor)
        shown = "return [...document.getElementById('axis-mode').options].map(o => o.textContent)"
        assert browser.run(shown) == modes
        for place, mode in enumerate(modes):
            browser.run(
                "const mode = document.getElementById('axis-mode');"
                " mode.selectedIndex = arguments[0];"
                " mode.dispatchEvent(new Event('input', {bubbles: true}))",
                place,
            )
            browser.wait(
                "return new URLSearchParams(location.search).get('mode') === arguments[0]", mode
            )
            found = data(browser, visitor)
            assert found["fields"]["mode"] == mode
            assert_shown(browser, found)
        assert browser.run("return document.querySelectorAll('main script, main b').length") == 0
        assert browser.complaints() == []
        # Also in an address that names no layout, which is answered as plain text.
        browser.get(f"http://{visitor.host}/calculator/result?mode=%3Cb%3E")
        assert browser.run("return document.body.textContent").startswith("mode=<b>: expected")
        assert browser.run("return document.querySelectorAll('b').length") == 0
    browser.complaints()


def test_on_a_phone_the_answer_stays_in_view_while_a_slider_is_moved(
    browser: Browser, visitor: Visitor
) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.window(*PHONE)
    try:
        open_page(browser, visitor, "?zero_stage=1&recompute=full")
        key(browser, "zero_stage", Keys.ARROW_RIGHT)
        browser.wait(f"{LAYOUT}.includes('_z2_')")
        box = "document.getElementById(arguments[0]).getBoundingClientRect()"
        slider, summary = (
            browser.run(f"const b = {box}; return [b.top, b.bottom]", name)
            for name in ("axis-zero_stage", "summary")
        )
        assert 0 <= summary[0] < summary[1] <= PHONE[1]
        assert summary[1] <= slider[0]
        assert slider[1] <= PHONE[1]
    finally:
        browser.window(*DESK)


def test_nothing_is_wider_than_a_phone(browser: Browser, visitor: Visitor) -> None:
    browser.window(*PHONE)
    try:
        open_page(browser, visitor)
        assert browser.run("return document.documentElement.scrollWidth") <= PHONE[0]
    finally:
        browser.window(*DESK)


def test_every_request_goes_to_the_server(browser: Browser, visitor: Visitor) -> None:
    open_page(browser, visitor)
    assert all(one.startswith(f"http://{visitor.host}/") for one in browser.requests())


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("query", ["", "?tensor_parallel_size=3", "?zero_stage=0&recompute=none"])
def test_axe_finds_nothing_that_keeps_people_out(
    browser: Browser, visitor: Visitor, query: str, is_dark: bool
) -> None:
    if not os.environ.get(AXE):
        pytest.skip(f"{AXE} does not name the file of axe-core, which .ci/run takes from npm")
    browser.window(*DESK, is_dark=is_dark)
    try:
        open_page(browser, visitor, query)
        browser.wait(f"{SENTENCES} !== ''")
        assert browser.violations() == []
    finally:
        browser.window(*DESK)
