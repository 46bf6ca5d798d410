"""A real Chromium without a window, driven by WebDriver: the system's own browser and driver."""

from __future__ import annotations

import base64
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless=new",
    "--no-sandbox",  # of the browser; as root there is none
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
PROGRAMS = {"browser": ("chromium", "chromium-browser"), "driver": ("chromedriver",)}
WAIT_SECONDS = 20.0


def _program(kind: str) -> str | None:
    return next(filter(None, map(shutil.which, PROGRAMS[kind])), None)


def missing() -> str:
    """Return what is not installed; empty where a browser can be driven."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed"
    absent = [" or ".join(names) for kind, names in PROGRAMS.items() if not _program(kind)]
    return f"no {', no '.join(absent)} on PATH" if absent else ""


class Browser:
    """One browser with an empty profile."""

    def __init__(self, profile: Path) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = str(_program("browser"))
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(_program("driver")))

    def resize(
        self, width: int, height: int, *, mobile: bool = False, scale: float = 1.0
    ) -> None:
        metrics = {
            "width": width,
            "height": height,
            "deviceScaleFactor": scale,
            "mobile": mobile,
        }
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, scheme: str) -> None:
        """Let the system prefer ``light`` or ``dark``."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def run_at_start(self, script: str) -> None:
        """Run a script before those of every page that is opened from now on."""
        self.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": script})

    def open(self, url: str, ready: str = "true") -> None:
        self.driver.get(url)
        self.wait_for(ready)

    def ask(self, expression: str, *arguments: object) -> Any:
        return self.driver.execute_script(f"return ({expression})", *arguments)

    def wait_for(self, expression: str, *arguments: object) -> Any:
        """Return the first value of an expression that is true."""
        from selenium.webdriver.support.ui import WebDriverWait

        waiting = WebDriverWait(self.driver, WAIT_SECONDS, poll_frequency=0.02)
        return waiting.until(lambda _: self.ask(expression, *arguments), expression)

    def texts(self, selector: str) -> list[str]:
        found: list[str] = self.ask(
            "[...document.querySelectorAll(arguments[0])].map((one) => one.textContent)",
            selector,
        )
        return found

    def click(self, selector: str) -> None:
        self.ask(
            "document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", selector
        )
        self.driver.find_element("css selector", selector).click()

    def drag(self, selector: str, start: int, stop: int) -> None:
        """Drag the mouse over an element, from ``start`` to ``stop`` pixels from its middle."""
        from selenium.webdriver import ActionChains

        target = self.driver.find_element("css selector", selector)
        actions = ActionChains(self.driver).move_to_element_with_offset(target, start, 0)
        actions.click_and_hold().move_by_offset(stop - start, 0).release().perform()

    def press(self, *keys: str) -> None:
        """Press keys where the focus is."""
        for key in keys:
            self.driver.switch_to.active_element.send_keys(key)

    def complaints(self) -> list[str]:
        """Return what the console got since the last call."""
        return [
            f"{entry['level']}: {entry['message']}" for entry in self.driver.get_log("browser")
        ]

    def save_screenshot(self, path: Path, *, quality: int = 80) -> None:
        """Save the window as a picture; WebP, because a page of text is a third of a PNG in it."""
        options = {"format": "webp", "quality": quality}
        shot = self.driver.execute_cdp_cmd("Page.captureScreenshot", options)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def running_browser() -> Iterator[Browser]:
    with tempfile.TemporaryDirectory(
        prefix="growcache-browser-", ignore_cleanup_errors=True
    ) as profile:
        browser = Browser(Path(profile))
        try:
            yield browser
        finally:
            browser.driver.quit()
