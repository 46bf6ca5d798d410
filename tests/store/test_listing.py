"""Several pages of a listing at once: all of it, nothing twice, in one order for any timing."""

from __future__ import annotations

import logging
import random
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from growcache.config_source import SourceConfig
from growcache.errors import AccessError, StoreError, TransientStoreError
from growcache.store import listing as store_listing
from growcache.store.contract import Entry, Page
from growcache.store.left_out import left_out_by
from growcache.store.listing import MOST_RANGES, spread_evenly
from growcache.store.retries import RenewableBackend, RetryPolicy
from growcache.store.store import RemoteStore
from growcache.store.urls import Location, parse_url
from growcache.threads import ConcurrentCalls

SOURCE = SourceConfig(url=("s3://b/",), storage_options={"anon": True})


class Sorted:
    """A store in memory that lists as S3 does; it counts, and may fail or take its time."""

    identity = "b"
    sorted = True

    def __init__(
        self, keys: Sequence[str], page: int = 10, seconds: float = 0, failures: int = 0
    ) -> None:
        self.keys, self.page, self.seconds = sorted(set(keys)), page, seconds
        self.requests = 0
        self.at_once = self.most_at_once = 0
        self._failures = failures
        self._lock = threading.Lock()

    def listing(self, location: Location, after: str | None) -> Iterator[Page]:
        prefix = location.prefix
        at = self.place(after, prefix)
        while True:
            self.ask()
            page = [key for key in self.keys[at : at + self.page] if key.startswith(prefix)]
            at += self.page
            last = len(page) < self.page or at >= len(self.keys)
            yield Page((Entry(key, 1, None, None) for key in page), last=last)
            if last:
                return

    def place(self, after: str | None, prefix: str) -> int:
        return max(bisect_left(self.keys, prefix), bisect_right(self.keys, after or ""))

    def ask(self) -> None:
        with self._lock:
            self.requests += 1
            self.at_once += 1
            self.most_at_once = max(self.at_once, self.most_at_once)
            fails, self._failures = self._failures > 0, self._failures - 1
        if self.seconds:
            time.sleep(random.random() * self.seconds)
        with self._lock:
            self.at_once -= 1
        if fails:
            raise TransientStoreError("503")


def opened(backend: Any, urls: Sequence[str], patience: RetryPolicy, most: int) -> RemoteStore:
    client = RenewableBackend(lambda: backend)
    pairs = [(parse_url(url), client) for url in urls]
    return RemoteStore(SOURCE, pairs, patience, most)


def listed(backend: Any, *urls: str, most: int = 16, seconds: float = 5) -> list[str]:
    store = opened(backend, urls or ("s3://b/",), RetryPolicy(seconds), most)
    return [entry.key for page in store.pages() for entry in page]


class Impatient(RetryPolicy):
    """Tries again at once."""

    def __init__(self) -> None:
        super().__init__(1)

    def run(self, attempt: Any) -> Any:
        for _ in range(100):
            try:
                return attempt()
            except TransientStoreError:
                continue
        raise AssertionError("it never answers")


def names(count: int) -> dict[str, list[str]]:
    rng = random.Random(0)
    words = [f"n{rng.randrange(10**8):08d}" for _ in range(count // 100)]
    return {
        "numbers": [f"rec/{n:07}.npy" for n in range(count)],
        "folders": [f"images/class{n // 50:04}/img_{n:06}.jpg" for n in range(count)],
        "words": [f"train/{w}/{w}_{n}.JPEG" for w in words for n in range(100)],
        "random": [f"data/{rng.getrandbits(128):032x}.bin" for _ in range(count)],
        "small folders": [f"sub-{n // 3:05}/run-{n % 3}.npy" for n in range(count)],
        "dates": [f"2024/{n % 12:02}/{n % 28:02}/{n:05}.gz" for n in range(count)],
        "one of ten": [f"d/{'train' if n % 10 else 'test'}/{n}" for n in range(count)],
        "no ASCII": [f"数据/类别{n // 50}/图片{n}.jpg" for n in range(count)],
    }


@pytest.mark.parametrize("kind", names(100))
def test_pages_come_by_the_dozen(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Counted(ConcurrentCalls[Any]):
        def __init__(self, calls: Sequence[Any], most: int) -> None:
            asked.append(len(calls))
            super().__init__(calls, most)

    monkeypatch.setattr(store_listing, "ConcurrentCalls", Counted)
    backend = Sorted(names(12_000)[kind], page=50)
    assert sorted(listed(backend)) == backend.keys
    pages = 12_000 // 50
    assert backend.requests == sum(asked) < 1.7 * pages
    assert len(asked) < pages / 6
    assert max(asked) <= MOST_RANGES


@pytest.mark.parametrize("kind", names(100))
def test_a_short_listing_starts_at_few_places(kind: str) -> None:
    """Some servers list everything to begin anywhere."""
    starts: list[str | None] = []

    class Counted(Sorted):
        def listing(self, location: Location, after: str | None) -> Iterator[Page]:
            starts.append(after)
            return super().listing(location, after)

    backend = Counted(names(600)[kind], page=100)
    assert sorted(listed(backend)) == backend.keys
    assert len(starts) <= 16  # of six pages; sixteen requests at once would make up to 36


CHARACTERS = st.sampled_from("ab01-._/~é中")
KEYS = st.lists(st.text(CHARACTERS, min_size=1, max_size=6), max_size=60).map(
    lambda keys: [key for key in keys if not {"", ".", ".."} & {*key.split("/")}]
)
PATTERNS = st.sampled_from(
    ["", "a/", "*", "a*", "a/*", "*/b*", "**/a*", "a/**", "?/[ab]*", "*/0/*", "a0*", "b/*/?"]
)


@given(KEYS, PATTERNS, st.integers(1, 7), st.integers(1, MOST_RANGES))
@settings(max_examples=300)
def test_all_that_matches_is_listed_once(
    keys: list[str], pattern: str, page: int, most: int
) -> None:
    location = parse_url(f"s3://b/{pattern}")
    found = listed(Sorted(keys, page), location.url, most=most)
    assert len(found) == len({*found})
    name_of = left_out_by(location, SOURCE.format)
    meant = {key for key in keys if location.matches(key) and name_of(key, 1) is None}
    assert sorted(found) == sorted(meant)


@given(KEYS, PATTERNS, st.integers(1, 7), st.integers(0, 5))
@settings(max_examples=25, deadline=None)
def test_timing_and_failures_change_no_order(
    keys: list[str], pattern: str, page: int, failures: int
) -> None:
    url = f"s3://b/{pattern}"
    expected = listed(Sorted(keys, page), url, most=1)
    assert listed(Sorted(keys, page, seconds=0.002), url) == expected
    failing = Sorted(keys, page, failures=failures)
    store = opened(failing, [url], Impatient(), 3)
    assert [entry.key for page in store.pages() for entry in page] == expected


def test_requests_at_once_are_bounded() -> None:
    backend = Sorted(names(4_000)["folders"], page=50, seconds=0.001)
    listed(backend, most=3)
    assert 1 < backend.most_at_once <= 3


def test_a_small_source_costs_one_request() -> None:
    backend = Sorted([f"a/{n}" for n in range(9)])
    assert sorted(listed(backend, "s3://b/a/")) == backend.keys
    assert backend.requests == 1


@pytest.mark.parametrize(
    ("url", "few"),
    [("s3://b/many/*/b_*.npy", 130), ("s3://b/many/07/*", 80), ("s3://b/many/*", 50)],
)
def test_what_cannot_match_is_leapt_over(url: str, few: int) -> None:
    """A glob matches few of 48,000 keys in 10 folders (960 pages)."""
    kinds = [f"{kind}_{n:03}.npy" for kind in "abcdef" for n in range(200)]
    kinds += [f"g_{n:05}.npy" for n in range(3600)]
    backend = Sorted([f"many/{n:02}/{name}" for n in range(10) for name in kinds], page=50)
    matches = parse_url(url).matches
    assert sorted(listed(backend, url)) == [key for key in backend.keys if matches(key)]
    assert backend.requests <= few + sum(map(matches, backend.keys)) // 50


def test_several_urls_are_listed_together() -> None:
    backend = Sorted([f"{folder:03}/{n}" for folder in range(100) for n in range(5)])
    urls = [f"s3://b/{folder:03}/" for folder in range(100)]
    store = opened(backend, urls, Impatient(), 16)
    entries = [entry for page in store.pages() for entry in page]
    assert sorted(entry.key for entry in entries) == backend.keys
    assert all(entry.key.startswith(f"{entry.store:03}/") for entry in entries)
    assert backend.requests == 100
    assert listed(backend, "s3://b/00*/*", "s3://b/*/*")[:3] != []
    assert len(listed(backend, "s3://b/00*/*", "s3://b/*/*")) == 500


def test_the_first_objects_are_from_everywhere() -> None:
    keys = names(40_000)["folders"]
    found = listed(Sorted(keys, page=1000))
    folders = [key.split("/")[1] for key in found]
    # By then not all folders are known, but the ranges that the first rounds found are.
    assert len({*folders[:8]}) == 8
    assert len({*folders[:64]}) > 16
    assert len({*folders[:1000]}) > 50


@given(st.integers(0, 3000))
@settings(max_examples=30)
def test_each_beginning_is_spread(count: int) -> None:
    entries = [Entry(f"{n:05}", 1, None, None) for n in range(count)]
    found = [int(entry.key) for entry in spread_evenly(entries[::-1])]
    assert sorted(found) == list(range(count))
    for some in (8, 16, 64, 500):
        if count >= 4 * some:
            gaps = [b - a for a, b in pairwise([*sorted(found[:some]), count])]
            assert max(gaps) <= max(2.5 * count / some, count / 16)


class FromTheStart(Sorted):
    """It ignores the key after which it should list."""

    def place(self, after: str | None, prefix: str) -> int:
        return bisect_left(self.keys, prefix)


class Shuffled(Sorted):
    """It lists in an order of its own."""

    def __init__(self, keys: Sequence[str], page: int = 10) -> None:
        super().__init__(keys, page)
        random.Random(1).shuffle(self.keys)

    def place(self, after: str | None, prefix: str) -> int:
        return self.keys.index(after) + 1 if after in self.keys else 0


@pytest.mark.parametrize("kind", [FromTheStart, Shuffled])
def test_a_store_that_does_not_list_in_order_is_listed_page_by_page(
    kind: type[Sorted], caplog: pytest.LogCaptureFixture
) -> None:
    keys = names(1000)["folders"]
    backend = kind(keys, 50)
    with caplog.at_level(logging.WARNING):
        found = listed(backend)
    assert {*found} == {*keys}
    assert found[-1000:] == backend.keys
    assert "does not list in the order of keys" in caplog.text


class Endless(Sorted):
    """It loses its place and repeats one page for ever."""

    def listing(self, location: Location, after: str | None) -> Iterator[Page]:
        while True:
            yield Page(Entry(key, 1, None, None) for key in self.keys[:10])


def test_a_page_that_comes_again_ends_the_listing() -> None:
    with pytest.raises(StoreError, match="repeats its page"):
        listed(Endless(names(1000)["folders"]))


class Refusing(Sorted):
    """It refuses all but the first page."""

    def ask(self) -> None:
        super().ask()
        if self.requests > 1:
            raise AccessError("403")


def test_a_refusal_is_raised_where_the_listing_is_read() -> None:
    with pytest.raises(AccessError, match="403"):
        listed(Refusing(names(1000)["folders"]))


def test_a_store_that_stays_away_is_given_up() -> None:
    backend = Sorted(names(1000)["folders"], failures=1 << 30)
    with pytest.raises(TransientStoreError, match="given up"):
        listed(backend, seconds=0.3)
