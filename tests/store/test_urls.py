from __future__ import annotations

import re

import pytest
from fsspec.utils import glob_translate
from hypothesis import example, given, settings
from hypothesis import strategies as st

from growcache.errors import ConfigError
from growcache.store.urls import (
    MatchSeeker,
    is_unsupported_key,
    key_before,
    parse_url,
    redact,
    translate_glob,
)

COMPONENT = st.sampled_from(
    ["a", "b", "*", "?", "a*", "*.npy", "[ab]", "[!a]", "[a-c]x", "[", "**"]
)
PATTERN = st.lists(COMPONENT, min_size=1, max_size=4).map("/".join)
KEY = st.lists(
    st.sampled_from(["a", "b", "ax", "x.npy", "[", "c"]), min_size=1, max_size=4
).map("/".join)


@given(PATTERN, KEY)
@example("[!]a]/b", "b/b")
@example("a/[]a]", "a/]")
@example("a[b/c", "a[b/c")
def test_globs_mean_what_fsspec_means(pattern: str, key: str) -> None:
    ours = re.compile(translate_glob(pattern)).match(key) is not None
    assert ours == (re.compile(glob_translate(pattern)).match(key) is not None)


@given(PATTERN, KEY)
def test_every_match_lies_below_the_prefix(pattern: str, key: str) -> None:
    location = parse_url(f"s3://bucket/{pattern}")
    if location.matches(key):
        assert key.startswith(location.prefix)
        below = key.removeprefix(location.prefix).count("/") + 1
        assert location.depth is None or below <= location.depth


@pytest.mark.parametrize(
    ("url", "scheme", "bucket", "pattern"),
    [
        ("s3://b/a/*.npy", "s3", "b", "a/*.npy"),
        ("S3://b/x?y", "s3", "b", "x?y"),
        ("gs://b/", "gs", "b", ""),
        ("/data/x", "file", "", "/data/x"),
        ("file:///data/", "file", "", "/data/"),
        ("https://host:80/a?q=1", "https", "host:80", "a?q=1"),
        ("memory://b/x", "memory", "", "b/x"),
        ("sftp://me:pw@h:22/d/*.npy", "sftp", "h:22", "/d/*.npy"),
        ("zip://*.npy::s3://b/a.zip", "chain", "", "zip://*.npy::s3://b/a.zip"),
    ],
)
def test_urls_are_taken_apart(url: str, scheme: str, bucket: str, pattern: str) -> None:
    found = parse_url(url)
    assert (found.scheme, found.bucket, found.pattern) == (scheme, bucket, pattern)


def test_a_query_is_no_wildcard() -> None:
    assert parse_url("https://host/a?q=1").is_key
    assert parse_url("s3://b/a?q").is_glob


def test_relative_paths_become_absolute(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(str(tmp_path))
    assert parse_url("rec/*.npy").pattern == f"{tmp_path}/rec/*.npy"
    assert parse_url("rec/").pattern == f"{tmp_path}/rec/"


def test_passwords_are_not_shown() -> None:
    url = "sftp://me:hidden@host/x"
    assert "hidden" not in redact(url) + parse_url(url).url + parse_url(url).root
    assert "hidden" not in redact("https://host/x?X-Amz-Signature=hidden")
    with pytest.raises(ConfigError) as caught:
        parse_url("sftp://me:hidden@host/a**b")
    assert "hidden" not in str(caught.value)


GLOB_PARTS = st.sampled_from(["a", "b", "*", "a*", "b?", "[ab]*", "**", "*0", "ab", "?"])
GLOBS = st.lists(GLOB_PARTS, min_size=1, max_size=4).map("/".join)
KEY_LISTS = st.lists(st.text("ab0/-~é", min_size=1, max_size=7), max_size=30)


@given(GLOBS, KEY_LISTS, st.text("ab0/-~é", max_size=7))
@settings(max_examples=500)
def test_no_match_is_skipped(pattern: str, keys: list[str], key: str) -> None:
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
def test_where_the_next_match_may_be(pattern: str, key: str, there: str | None) -> None:
    assert MatchSeeker(pattern, is_glob=True).seek(key) == there


@given(st.text("ab0/-.~é \x01!\ud7ff\ue000", max_size=7))
def test_the_key_before_is_smaller_and_can_be_named(key: str) -> None:
    before = key_before(key)
    assert before is None or before < key
    if before is not None and not is_unsupported_key(key):
        assert not is_unsupported_key(before)
