"""Whether a failure is one key's or the store's: what the last successful reads say."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from growcache.store.contract import Entry
from growcache.store.retries import RecentReads


def entry(key: str) -> Entry:
    return Entry(key, 1, None, None)


def test_nothing_is_known_at_first() -> None:
    evidence = RecentReads()
    assert not evidence.others_since("a", 0.0)
    assert evidence.witnesses("a") == []


def test_a_key_does_not_speak_for_itself() -> None:
    evidence = RecentReads()
    evidence.answered(entry("a"), time.monotonic())
    assert not evidence.others_since("a", 0.0)
    assert evidence.others_since("b", 0.0)


def test_what_was_before_the_request_says_nothing() -> None:
    evidence = RecentReads()
    evidence.answered(entry("a"), time.monotonic())
    assert not evidence.others_since("b", time.monotonic() + 1)
    assert evidence.witnesses("b") == [entry("a")]


def test_what_was_let_in_before_a_refusal_says_nothing_about_it() -> None:
    evidence = RecentReads()
    refused_at = time.monotonic()
    evidence.answered(entry("a"), refused_at - 1)
    assert evidence.others_since("b", refused_at)
    assert not evidence.others_asked_since("b", refused_at)
    evidence.answered(entry("a"), refused_at + 1)
    assert evidence.others_asked_since("b", refused_at)


@given(st.lists(st.sampled_from("abc"), max_size=12), st.sampled_from("abc"))
def test_as_if_all_reads_were_kept(reads: list[str], key: str) -> None:
    evidence = RecentReads()
    for one in reads:
        evidence.answered(entry(one), 0.0)
    assert evidence.others_since(key, 0.0) == any(one != key for one in reads)
    if others := [one for one in reads if one != key]:
        assert evidence.witnesses(key)[0] == entry(others[-1])
