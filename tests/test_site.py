"""The site that `make docs` builds: without a warning, and it asks no other host for anything."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browsers import Browser, missing, running_browser
from tests.tables import DOCS

pytestmark = pytest.mark.slow
SPHINX = ("-m", "sphinx", "--fresh-env", "--fail-on-warning", "--keep-going", "--quiet")
# What a browser fetches by itself; links that a reader may follow are none of these.
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc="(https?:)?//|<link\b[^>]*\brel="(?!canonical)[^>]*\bhref="(https?:)?//"""
    r"""|@import\s+(?:url\()?["']?(https?:)?//|url\(["']?(https?:)?//"""
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sphinx")
    pytest.importorskip("pydata_sphinx_theme")
    out = tmp_path_factory.mktemp("site")
    words = [*SPHINX, "-d", str(out / "doctrees"), "-b", "html", str(DOCS), str(out / "html")]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return out / "html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if lacks := missing():
        pytest.skip(lacks)
    with running_browser() as found:
        found.driver.execute_cdp_cmd("Network.enable", {})
        limits = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        found.driver.execute_cdp_cmd("Network.emulateNetworkConditions", limits)
        yield found


def test_every_page_is_built(site: Path) -> None:
    sources = [page for suffix in ("md", "ipynb") for page in DOCS.rglob(f"*.{suffix}")]
    for source in sources:
        assert (site / source.relative_to(DOCS)).with_suffix(".html").exists()


def test_no_file_asks_another_host_for_anything(site: Path) -> None:
    files = [path for path in site.rglob("*") if path.suffix in (".html", ".css")]
    assert len(files) > 30
    for path in files:
        assert FETCHED.search(path.read_text(encoding="utf-8")) is None, path


@pytest.mark.parametrize("page", ["index.html", "reference/python.html"])
@pytest.mark.parametrize(("width", "scheme"), [(1360, "light"), (1360, "dark"), (390, "light")])
def test_a_page_opens_without_a_network(
    site: Path, browser: Browser, page: str, width: int, scheme: str
) -> None:
    browser.resize(width, 850, mobile=width < 500)
    browser.prefer(scheme)
    browser.complaints()  # of pages that other tests opened
    browser.open((site / page).as_uri(), "document.readyState == 'complete'")
    assert browser.ask("document.documentElement.scrollWidth") <= width
    assert browser.ask("document.documentElement.dataset.theme") == scheme
    # A request to any host would fail, and the console would say so.
    assert [line for line in browser.complaints() if line.startswith("SEVERE")] == []


def test_no_page_is_wider_than_a_phone(site: Path, browser: Browser) -> None:
    browser.resize(390, 850, mobile=True)
    wide = {}
    for page in sorted(site.rglob("*.html")):
        if "_static" in page.parts:
            continue
        browser.open(page.as_uri(), "document.readyState == 'complete'")
        # The theme's container scrolls sideways by itself, so the document never gets wider.
        width = browser.ask(
            "Math.max(...[...document.querySelectorAll('html, .bd-article-container')]"
            ".map((one) => one.scrollWidth))"
        )
        if width > 390:
            wide[str(page.relative_to(site))] = width
    assert wide == {}


def test_the_search_works_without_a_network(site: Path, browser: Browser) -> None:
    browser.resize(1360, 850)
    browser.open(f"{(site / 'search.html').as_uri()}?q=max_bytes")
    browser.wait_for("document.querySelectorAll('#search-results li a').length > 2")
    assert any("Configuration" in text for text in browser.texts("#search-results li a"))
