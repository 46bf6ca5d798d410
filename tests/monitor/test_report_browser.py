"""A report in a real Chromium: it draws without a network, and nothing in it runs but its own script."""

from __future__ import annotations

from pathlib import Path

import pytest

from growcache.monitor.report_html import report_page
from tests.browsers import missing, running_browser
from tests.monitor.test_report import hostile_facts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=missing()),
]
CHARTS = "document.querySelectorAll('.chart canvas').length"
REQUESTS = "performance.getEntriesByType('resource').length"


def test_a_hostile_report_draws_its_charts_and_asks_nothing(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(report_page(hostile_facts()))
    with running_browser() as browser:
        browser.resize(1200, 900)
        browser.open(f"file://{file}", f"{CHARTS} > 8")
        assert browser.ask("document.title") == "growcache report"
        assert browser.ask(REQUESTS) == 0
        assert browser.ask("document.querySelectorAll('script').length") == 4
        assert browser.texts(".report h2")[0] == "At a glance"
        browser.prefer("dark")
        browser.resize(360, 800, mobile=True)
        browser.wait_for("document.documentElement.scrollWidth <= innerWidth")
        assert [one for one in browser.complaints() if "ResizeObserver" not in one] == []
