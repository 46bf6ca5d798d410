"""The page in a real Chromium: what it shows, its keys, and that nothing in a hostile cache can run a script."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from growcache import Snapshot
from growcache.cache.status import write_status
from growcache.cache.status_model import JobStatus, Status, WaitsStatus
from tests.browsers import Browser, missing, running_browser
from tests.filled import Filled
from tests.monitor.hostile import (
    ALL,
    ATTEMPTS,
    RAN,
    fill_hostile,
    hostile_status,
    write_history,
)
from tests.monitor.serving import serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=missing()),
]
WHOLE = "performance.getEntriesByName('growcache:whole').length"
STATUS_SHOWN = "document.querySelector('#figures .figure')"
WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => window.violations.push(event.violatedDirective));
"""
EVENTS_SECONDS = 3.0
SIZES = {"phone": (360, 800, True), "laptop": (1280, 900, False), "4K": (3840, 2160, False)}


def plain_status(root: Path, now: float) -> Status:
    jobs = [JobStatus("resnet", 900, 3.0, 2, 7, WaitsStatus(3, 1.0), True)]
    return replace(
        hostile_status(root, running=True), state="running", waiting_for=None, jobs=jobs,
        samples=30, drawn=int(now * 10) % 10**6, updated_at=now,
    )  # fmt: skip


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    """A hostile cache, an ordinary one and one that is not there yet; services write their status."""
    folder = tmp_path_factory.mktemp("caches")
    hostile, plain, later = (folder / name for name in ("hostile", "plain", "later"))
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.5):
            write_status(hostile, hostile_status(hostile, running=True))
            write_status(plain, plain_status(plain, time.time()))

    with fill_hostile(hostile), Filled(plain) as filled:
        filled.add(0, 1, 2)
        write_history(filled)
        thread = threading.Thread(target=beat)
        thread.start()
        try:
            with Snapshot.take(hostile, job=ATTEMPTS[2]):
                yield [hostile, plain, later]
        finally:
            ended.set()
            thread.join()


@pytest.fixture(scope="module")
def url(caches: list[Path]) -> Iterator[str]:
    with serving(caches) as url:
        yield url


@pytest.fixture(scope="module")
def shared_browser() -> Iterator[Browser]:
    with running_browser() as browser:
        browser.run_at_start(WATCH)
        yield browser


@pytest.fixture
def browser(shared_browser: Browser) -> Iterator[Browser]:
    """The browser, which must have nothing to complain of after each test."""
    shared_browser.resize(1280, 900)
    shared_browser.prefer("light")
    yield shared_browser
    assert shared_browser.complaints() == []
    assert shared_browser.ask("window.violations") == []
    assert shared_browser.ask("window.ran") is None


def open_cache(browser: Browser, url: str, name: str) -> None:
    browser.open(f"{url}?cache={name}", f"{WHOLE} && {STATUS_SHOWN}")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["hostile", "plain"])
def test_it_fits_and_asks_no_other_host(
    browser: Browser, url: str, size: str, name: str
) -> None:
    width, height, mobile = SIZES[size]
    browser.resize(width, height, mobile=mobile)
    open_cache(browser, url, name)
    assert browser.ask("document.documentElement.scrollWidth") == width
    assert len(browser.texts("figure.chart .u-legend")) == 13
    hosts = browser.ask(
        "performance.getEntriesByType('resource').map((one) => new URL(one.name).origin)"
    )
    assert {*hosts} == {url.rstrip("/")}


def test_a_hostile_cache_is_text(browser: Browser, url: str) -> None:
    open_cache(browser, url, "hostile")
    words = " ".join(browser.texts(".words"))
    assert f"<script>{RAN}=1</script>" in words
    for selector in (
        "#errors",
        "#holes",
        "#samples",
        "[data-table='jobs']",
        "[data-table='leases']",
        "[data-table='ranks']",
        "[data-table='stages']",
        "[data-table='samplers']",
        "[data-table='sources']",
    ):
        assert f"{RAN}=1" in browser.texts(selector)[0], selector
    browser.click("#holes summary")
    browser.click("#gallery-next")
    assert browser.ask("document.querySelectorAll('script').length") == 4
    assert (
        browser.ask(
            "document.querySelectorAll('main script, main svg, main iframe, main b').length"
        )
        == 0
    )
    assert browser.ask(
        "[...document.querySelectorAll('*')].every((one) => [...one.attributes].every("
        "({name, value}) => !name.startsWith('on') && !(/href|src|action/.test(name) && /^\\s*javascript:/i.test(value))))"
    )
    pictures = "[...document.querySelectorAll('main img')]"
    assert browser.ask(f"{pictures}.length") >= 8
    assert browser.ask(
        f"{pictures}.every((one) => one.src.startsWith('data:image/png;base64,'))"
    )
    browser.wait_for(f"{pictures}.every((one) => one.naturalWidth > 0)")


def test_the_first_screen_has_the_answers(browser: Browser, url: str) -> None:
    open_cache(browser, url, "plain")
    bottoms = browser.ask(
        "[...document.querySelectorAll('.answer')].map((one) => one.getBoundingClientRect().bottom)"
    )
    assert len(bottoms) == 3
    assert max(bottoms) < 400
    assert browser.texts(".answer h2")[0] == "Is training fed?"
    assert all(len(words) > 3 for words in browser.texts(".answer .words"))
    levels = browser.ask(
        "[...document.querySelectorAll('.answer')].map((one) => one.dataset.level)"
    )
    assert {*levels} <= {"ok", "warn", "bad"}


def test_themes(browser: Browser, url: str) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    open_cache(browser, url, "plain")
    light = browser.ask(background)
    browser.prefer("dark")
    dark = browser.wait_for(f"{background} !== arguments[0] && {background}", light)
    browser.click("#theme")
    assert browser.ask(background) == light
    browser.open(f"{url}?cache=plain", WHOLE)  # the choice is kept
    assert browser.ask(background) == light
    browser.press("t")
    assert (browser.ask(background), browser.ask("document.documentElement.dataset.theme")) == (
        dark,
        "dark",
    )
    browser.press("t")
    assert browser.ask("document.documentElement.dataset.theme") is None


def test_the_map_by_keys(browser: Browser, url: str) -> None:
    picture = "document.querySelector('#map-cells canvas').toDataURL()"
    open_cache(browser, url, "plain")
    browser.press("m")
    assert browser.ask("document.activeElement.id") == "map-cells"
    assert browser.ask("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    browser.press("\ue012", "\ue014", "\ue014")  # left, right, right
    assert browser.texts("#map-detail")[0].startswith("Shard 2: 10 samples")
    assert browser.ask("document.activeElement.getAttribute('aria-valuetext')").startswith(
        "Shard 2"
    )
    before = browser.ask(picture)
    browser.press("u")
    assert browser.ask(picture) != before
    assert (
        browser.ask("document.querySelector('#map-colours [aria-pressed=true]').textContent")
        == "uses"
    )
    browser.press("\ue007")  # enter
    browser.wait_for(
        "document.getElementById('gallery-note').textContent.includes('of shard 2')"
    )
    assert {place.partition(":")[0] for place in browser.texts(".sample-place")} == {"2"}
    browser.press("u", "u")
    browser.click("#gallery-all")
    browser.wait_for(
        "document.getElementById('gallery-note').textContent.includes('spread over')"
    )


def test_samples_by_key(browser: Browser, url: str) -> None:
    open_cache(browser, url, "hostile")
    before = browser.texts(".sample-place")
    browser.press("n")
    browser.wait_for(
        "document.querySelector('.sample-place').textContent !== arguments[0]", before[0]
    )
    drawn = (
        "[...document.querySelectorAll('canvas.trace')].every((one) => "
        "new Uint32Array(one.getContext('2d').getImageData(0, 0, one.width, one.height).data.buffer).some(Boolean))"
    )
    assert browser.ask(drawn)


def test_keys_are_listed(browser: Browser, url: str) -> None:
    open_cache(browser, url, "plain")
    browser.press("?")
    assert browser.ask("document.getElementById('help').open")
    assert {"?", "t", "c", "m", "u", "n"} <= {*browser.texts("#shortcuts kbd")}
    browser.press("\ue00c")  # escape
    assert not browser.ask("document.getElementById('help').open")
    browser.press("a")
    assert browser.ask("document.activeElement.id") == "answers"


def test_the_focus_goes_through_what_can_be_used(browser: Browser, url: str) -> None:
    open_cache(browser, url, "plain")
    reached = []
    for _ in range(14):
        browser.press("\ue004")  # tab
        reached.append(
            browser.ask("document.activeElement.id || document.activeElement.textContent")
        )
    assert reached[:4] == ["Skip to the answers", "cache", "theme", "help-open"]
    assert {"1 h", "all", "age", "map-cells"} <= {*reached}


def test_the_range_of_time_is_chosen_and_zoomed(browser: Browser, url: str) -> None:
    pressed = "[...document.querySelectorAll('#ranges [aria-pressed=true]')].map((one) => one.textContent)"
    open_cache(browser, url, "plain")
    browser.click("#ranges button")
    assert browser.ask(pressed) == ["1 h"]
    browser.drag("[data-chart=cached] .u-over", -60, 60)
    browser.wait_for(f"{pressed}.length === 0")
    browser.press("z")
    assert browser.ask(pressed) == ["all"]


def test_the_waits_of_ranks_are_of_the_chosen_job(browser: Browser, url: str) -> None:
    select = "document.querySelector('[data-chart=ranks] select')"
    labels = "[...document.querySelectorAll('[data-chart=ranks] .u-label')].map((one) => one.textContent)"
    values = "[...document.querySelectorAll('[data-chart=ranks] .u-value')].map((one) => one.textContent)"
    open_cache(browser, url, "hostile")
    assert browser.ask(f"[...{select}.options].map((one) => one.value)") == list(ATTEMPTS[:3])
    assert browser.ask(f"{select}.value") == ATTEMPTS[2]
    assert browser.ask(labels) == [
        *("at", "rank 0", "rank 1", "rank __proto__", f"rank {ATTEMPTS[0]}")
    ]
    time.sleep(EVENTS_SECONDS)  # events tell no ranks apart, and must not draw them at 0
    assert browser.ask(values)[1:] == ["1.1 %", "20 %", "5.0 %", "0 %"]
    choose = f"{select}.value = arguments[0], {select}.dispatchEvent(new Event('change'))"
    browser.ask(choose, ATTEMPTS[1])
    assert browser.ask(f"{select}.value") == ATTEMPTS[1]
    assert len(browser.ask(labels)) == 5


def test_events_change_what_is_shown(browser: Browser, url: str) -> None:
    drawn = "document.querySelector('#figures .figure:nth-child(2) strong').textContent"
    open_cache(browser, url, "plain")
    before = browser.ask(drawn)
    browser.wait_for(f"{drawn} !== arguments[0]", before)
    assert browser.texts("#link") == ["live"]


def test_another_cache_and_one_that_is_made_meanwhile(
    browser: Browser, url: str, caches: list[Path]
) -> None:
    open_cache(browser, url, "plain")
    assert browser.texts("#cache option") == ["hostile", "plain", "later"]
    browser.press("c")
    assert browser.ask("document.activeElement.id") == "cache"
    browser.press("\ue015")  # down
    browser.wait_for(
        "document.body.dataset.missing != null && document.querySelector('[data-level=warn]')"
    )
    assert "cache=later" in browser.ask("location.search")
    assert "there is no cache at" in browser.texts(".words")[1]
    assert not browser.ask("document.getElementById('map').checkVisibility()")
    with Filled(caches[2]) as filled:
        filled.add(0, 1)
        write_status(caches[2], plain_status(caches[2], time.time()))
        browser.wait_for("document.body.dataset.missing == null")
        browser.wait_for(
            "document.getElementById('map-detail').textContent.startsWith('2 shards')"
        )
        browser.wait_for("document.querySelectorAll('.sample').length === 2")
    browser.complaints()  # what was asked for before the first shard was there


def test_behind_a_prefix(browser: Browser, caches: list[Path]) -> None:
    with serving(caches[:2], prefix="/tools/growcache") as url:
        browser.open(url.rstrip("/"), f"{WHOLE} && {STATUS_SHOWN}")
        assert browser.ask("location.pathname") == "/tools/growcache/"
        assert len(browser.texts("figure.chart .u-legend")) == 13
        assert ALL.split()[0] in browser.texts(".words")[2]
        browser.open("about:blank")


def test_a_token_in_the_address_is_kept_as_a_cookie(
    browser: Browser, caches: list[Path]
) -> None:
    with serving(caches[:2], prefix="/g", token="t" * 20) as url:
        browser.open(f"{url}?token={'t' * 20}&cache=plain", f"{WHOLE} && {STATUS_SHOWN}")
        assert "token" not in browser.ask("location.href")
        assert browser.texts("#link") == ["live"]
        assert browser.ask("document.getElementById('cache').value") == "plain"
        browser.open("about:blank")
