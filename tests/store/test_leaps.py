"""What a glob lets a listing leave out: never a match."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from growcache.store.urls import MatchSeeker, is_unsupported_key, key_before, parse_url

PARTS = st.sampled_from(["a", "b", "*", "a*", "b?", "[ab]*", "**", "*0", "ab", "?"])
GLOBS = st.lists(PARTS, min_size=1, max_size=4).map("/".join)
KEYS = st.lists(st.text("ab0/-~é", min_size=1, max_size=7), max_size=30)


@given(GLOBS, KEYS, st.text("ab0/-~é", max_size=7))
@settings(max_examples=500)
def test_no_match_is_leapt_over(pattern: str, keys: list[str], key: str) -> None:
    location = parse_url(f"s3://b/{pattern}")
    there = MatchSeeker(pattern, is_glob=location.is_glob).seek(key)
    assert there is None or there >= key
    for other in keys:
        if other >= key and location.matches(other):
            assert there is not None
            assert there <= other


@pytest.mark.parametrize(
    ("pattern", "key", "there"),
    [
        ("a/*.npy", "", "a/"),
        ("a/2024-*.npy", "a/", "a/2024-"),
        ("a/2024-*.npy", "a/2024-07.npy", "a/2024-07.npy"),
        ("a/2024-*.npy", "a/2025", None),
        ("a/2024-*.npy", "a/2024-1/deep.npy", "a/2024-10"),
        ("a/*/b_*.npy", "a/x/a_9.npy", "a/x/b_"),
        ("a/*/b_*.npy", "a/x/c.npy", "a/x0"),
        ("a/*/b_*.npy", "a/x", "a/x"),
        ("a/x*/b/*", "a/x7/a", "a/x7/b/"),
        ("a/x*z/b/*", "a/x7/b/1", "a/x70"),
        ("a/**/b.npy", "a/x/y/z", "a/x/y/z"),
        ("*", "a/b", "a0"),
    ],
)
def test_what_is_leapt_over(pattern: str, key: str, there: str | None) -> None:
    assert MatchSeeker(pattern, is_glob=True).seek(key) == there


@given(st.text("ab0/-.~é \x01!\ud7ff\ue000", max_size=7))
def test_what_is_listed_after_is_smaller_and_can_be_named(key: str) -> None:
    before = key_before(key)
    assert before is None or before < key
    if before is not None and not is_unsupported_key(key):
        assert not is_unsupported_key(before)
