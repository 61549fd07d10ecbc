"""A headless Chromium that opens a report, and says what went wrong in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

DRAWN_SECONDS = 20
# The file of axe-core, which CI takes from npm; it is not part of the project.
AXE = "AXE_CORE"
PHONE, DESK = (390, 844), (1280, 900)
# Its sandbox does not start for root, and GPUs are not for it.
ALONE = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
# Pages follow one another: a process for each, made in advance too, costs the live pages a quarter.
ONE_PROCESS = (
    "--renderer-process-limit=1",
    "--disable-site-isolation-trials",
    "--disable-features=SpareRendererForSitePerProcess,BackForwardCache",
    "--in-process-gpu",
)


class Browser:
    """A window of Chromium, driven by selenium."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.run = driver.execute_script

    def get(self, url: str) -> None:
        """Open a page anew, also if its address differs in what follows # alone."""
        self.driver.get("about:blank")
        self.driver.get(url)
        self.wait("return document.readyState === 'complete'")

    def wait(self, script: str, *arguments: Any) -> Any:
        """Wait until a script returns something true, and return it."""
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, DRAWN_SECONDS, 0.05).until(
            lambda driver: driver.execute_script(script, *arguments)
        )

    def window(self, width: int, height: int, *, is_dark: bool = False) -> None:
        """Set the size of the window, and the colours that the page should have."""
        send = self.driver.execute_cdp_cmd
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 700}
        send("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        send("Emulation.setEmulatedMedia", {"features": [scheme]})

    def pictures(self) -> list[str]:
        """The names of the pictures of the page that have a figure."""
        found = "[...document.querySelectorAll('[data-picture]')]"
        return list(self.run(f"return {found}.map(element => element.dataset.picture)"))

    def draw(self, name: str) -> float:
        """Bring a picture into view; return the milliseconds that drawing it took."""
        self.run("document.getElementById('picture-' + arguments[0]).scrollIntoView()", name)
        taken = self.wait(
            "return document.getElementById('picture-' + arguments[0]).dataset.milliseconds", name
        )
        return float(taken)

    def violations(self) -> list[str]:
        """What axe-core finds on the page; nothing if its file is not there.

        It need not make selectors, nor list the elements that are in order.
        """
        file = os.environ.get(AXE)
        if not file:
            return []
        self.run(Path(file).read_text(encoding="utf-8"))
        found: list[str] = self.driver.execute_async_script(
            "axe.run({resultTypes: ['violations'], selectors: false})"
            ".then(r => arguments[0](r.violations.map(v => v.id + ': ' +"
            " v.nodes.map(n => n.html).slice(0, 3).join(' | '))))"
        )
        return found

    def complaints(self) -> list[str]:
        """The errors and warnings of the page's console since the last call."""
        return [f"{one['level']}: {one['message']}" for one in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """The addresses that the page has asked for."""
        entries = "return performance.getEntriesByType('resource').map(e => e.name)"
        return list(self.run(entries))


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser as large as a desk's. Without Chromium tests are skipped, and fail in CI."""
    program, server = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or server is None:
        reason = "no chromium and chromium-driver (Debian's packages) are installed"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in (*ALONE, *ONE_PROCESS):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(server))
    try:
        browser = Browser(driver)
        browser.window(*DESK)
        yield browser
    finally:
        driver.quit()
