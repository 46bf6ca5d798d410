"""Replace the samples of another configuration: a new generation grows as the older ones shrink."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from growcache.cache.cache import Cache
from growcache.cache.files import generation_numbers, generation_paths
from growcache.cache.generations import (
    begin_generation,
    end_generation,
    finish_ended,
    make_room_for_next,
)
from growcache.cache.space import fixed_budget
from growcache.config import CacheConfig
from growcache.errors import OtherSamplesError

T = TypeVar("T")

PAUSE_SECONDS = 0.05
INDEX_BLOCKS = 65536  # what a new generation takes besides the fixed part of its bound

_log = logging.getLogger(__name__)


class Once:
    """A call that is made at the first call only."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def __call__(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call()


def run_replacing(config: CacheConfig, run_on: Callable[[Cache], T], *, replace: bool) -> T:
    """Run on the newest generation; where its samples are others and may be replaced, on a new one."""
    with ExitStack() as opened:
        cache = _open_newest(config, opened)
        try:
            return run_on(cache)
        except OtherSamplesError as error:
            if not replace:
                raise
            _log.warning("%s", str(error).partition(". Choose")[0])
        _begin_next(config, cache)
    with ExitStack() as opened:
        return run_on(_open_newest(config, opened, begun=True))


def _open_newest(config: CacheConfig, opened: ExitStack, *, begun: bool = False) -> Cache:
    root = Path(config.path).absolute()
    newest = Cache.open(root, config)
    while not (begun or newest.totals().drawn) and len(generation_numbers(root)) > 1:
        end_generation(newest.layout)  # a replacement that ended before its first sample
        newest.abandon()
        newest = Cache.open(root, config)
    opened.enter_context(newest)
    *older, _ = generation_paths(root)
    newest.older.caches = [opened.enter_context(Cache.open(path, config)) for path in older]
    finish_ended(root)
    newest.older.follow_list(newest.layout)
    newest.count_older()
    newest.space.admit()
    return newest


def _begin_next(config: CacheConfig, cache: Cache) -> None:
    make_room_for_next(
        cache, fixed_budget(int(config.max_bytes)).total + INDEX_BLOCKS, PAUSE_SECONDS
    )
    begin_generation(Path(config.path).absolute(), any_owner=config.allow_network_filesystem)
