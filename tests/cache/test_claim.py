"""Taking a cache over for another source: its listing never survives the claim on it.

Two things see to it, the order of `claim` and the sweep of the next start; the first test
fails where neither does.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from growcache.cache import meta
from growcache.cache.cache import Cache
from growcache.cache.files import CacheLayout
from growcache.cache.index.writer import IndexDatabase
from growcache.config import CacheConfig


class Died(BaseException):
    """The process ends here."""


def test_a_crash_while_claiming_leaves_no_listing_of_the_other_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CacheConfig(path=tmp_path / "cache", min_free=0)
    with Cache.open(config.path, config) as cache:
        cache.claim({"source.url": ["a"]})
        cache.layout.catalog.write_bytes(b"what a holds")

    forget = meta.forget_cache

    def forget_and_die(layout: CacheLayout, index: IndexDatabase) -> None:
        forget(layout, index)  # the claim of the first source is gone from here on
        raise Died

    with monkeypatch.context() as patch, Cache.open(config.path, config) as cache:
        patch.setattr(meta, "forget_cache", forget_and_die)
        with pytest.raises(Died):
            cache.claim({"source.url": ["b"]})
    with Cache.open(config.path, config) as cache:
        cache.claim({"source.url": ["b"]})
        assert not cache.layout.catalog.exists()


def test_the_same_claim_keeps_the_listing(tmp_path: Path) -> None:
    config = CacheConfig(path=tmp_path / "cache", min_free=0)
    for _ in range(2):
        with Cache.open(config.path, config) as cache:
            cache.claim({"source.url": ["a"]})
            if not cache.layout.catalog.exists():
                cache.layout.catalog.write_bytes(b"what a holds")
    assert (tmp_path / "cache" / "catalog.bin").read_bytes() == b"what a holds"
