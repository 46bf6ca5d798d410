from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from growcache.cache.cache import Cache
from growcache.config import CacheConfig
from tests.cache.shards import IDENTITY

OpenCache = Callable[..., Cache]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def open_cache(root: Path) -> Iterator[OpenCache]:
    """Opens the cache at ``root`` (closing the one opened before), with an identity."""
    opened: list[Cache] = []

    def open_again(*, identity: bool = True, **config: Any) -> Cache:
        while opened:
            opened.pop().close()
        config = {"max_bytes": 5_000_000, **config}
        cache = Cache.open(root, CacheConfig(path=root, **config), takeover_seconds=0.2)
        opened.append(cache)
        if identity:
            cache.set_identity(IDENTITY)
        return cache

    yield open_again
    while opened:
        opened.pop().close()


@pytest.fixture
def cache(open_cache: OpenCache) -> Cache:
    return open_cache()
