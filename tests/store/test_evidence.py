"""Whether a failure is one key's or the store's: as the last successful reads show."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from growcache.store.contract import Entry
from growcache.store.retries import RecentReads


def entry(key: str) -> Entry:
    return Entry(key, 1, None, None)


def test_nothing_is_known_at_first() -> None:
    recent = RecentReads()
    assert not recent.has_other_since("a", 0.0)
    assert recent.other_objects("a") == []


def test_a_key_does_not_speak_for_itself() -> None:
    recent = RecentReads()
    recent.record(entry("a"), time.monotonic())
    assert not recent.has_other_since("a", 0.0)
    assert recent.has_other_since("b", 0.0)


def test_what_was_before_the_request_says_nothing() -> None:
    recent = RecentReads()
    recent.record(entry("a"), time.monotonic())
    assert not recent.has_other_since("b", time.monotonic() + 1)
    assert recent.other_objects("b") == [entry("a")]


def test_what_was_let_in_before_a_refusal_says_nothing_about_it() -> None:
    recent = RecentReads()
    refused_at = time.monotonic()
    recent.record(entry("a"), refused_at - 1)
    assert recent.has_other_since("b", refused_at)
    assert not recent.has_other_requested_since("b", refused_at)
    recent.record(entry("a"), refused_at + 1)
    assert recent.has_other_requested_since("b", refused_at)


@given(st.lists(st.sampled_from("abc"), max_size=12), st.sampled_from("abc"))
def test_as_if_all_reads_were_kept(reads: list[str], key: str) -> None:
    recent = RecentReads()
    for one in reads:
        recent.record(entry(one), 0.0)
    assert recent.has_other_since(key, 0.0) == any(one != key for one in reads)
    if others := [one for one in reads if one != key]:
        assert recent.other_objects(key)[0] == entry(others[-1])
