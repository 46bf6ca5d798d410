"""Replace the samples of another configuration: a new generation grows as the older ones shrink."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar

from growcache.cache.cache import Cache
from growcache.cache.files import generation_numbers, generation_paths
from growcache.cache.generations import (
    begin_generation,
    end_generation,
    finish_ended,
    makes_room_for_next,
)
from growcache.cache.space import fixed_budget
from growcache.cache.status import write_status
from growcache.cache.status_model import Status
from growcache.config import CacheConfig
from growcache.errors import OtherSamplesError
from growcache.sampling.end_requests import listen_for_the_end
from growcache.sampling.space_allocator import READERS_OF_OLDER
from growcache.sampling.status_builder import cache_fields, process_fields

T = TypeVar("T")

PAUSE_SECONDS = 0.05
SHOW_SECONDS = 0.5
INDEX_BLOCKS = 65536  # of a new generation, besides the fixed part of its bound

_log = logging.getLogger(__name__)


class Once:
    """A function that is executed only by its first call."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def __call__(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call()


def run_replacing(
    config: CacheConfig,
    run_on: Callable[[Cache], T],
    make_room: Callable[[Cache], T | None] | None = None,
) -> T:
    """Run on the newest generation, or on a new one if its samples are different.

    A new generation starts after ``make_room`` has made room for it; without ``make_room``
    there is none. If ``make_room`` was asked to end, its result is returned.
    """
    with ExitStack() as opened:
        cache = _open_newest(config, opened)
        try:
            return run_on(cache)
        except OtherSamplesError as error:
            if make_room is None:
                raise
            _log.warning("%s", str(error).partition(". To replace its")[0])
        if (ended := make_room(cache)) is not None:
            return ended
        begin_generation(
            Path(config.path).absolute(), any_owner=config.allow_network_filesystem
        )
    with ExitStack() as opened:
        return run_on(_open_newest(config, opened, begun=True))


def _open_newest(config: CacheConfig, opened: ExitStack, *, begun: bool = False) -> Cache:
    root = Path(config.path).absolute()
    newest = Cache.open(_newest_path(root), config)
    while not (begun or newest.totals().drawn) and len(generation_numbers(root)) > 1:
        end_generation(newest.layout)  # a replacement that ended before its first sample
        newest.abandon()
        newest = Cache.open(_newest_path(root), config)
    opened.enter_context(newest)
    *older, _ = generation_paths(root)
    newest.older.caches = [opened.enter_context(Cache.open(path, config)) for path in older]
    finish_ended(root)
    newest.older.follow_list(newest.layout)
    newest.count_older()
    newest.space.admit()
    return newest


def _newest_path(root: Path) -> Path:
    """Return the path of the newest generation, which may not have an index yet."""
    return generation_paths(root)[-1]


class RoomForNext:
    """Waits for the room of the next generation's index, and shows that in the status."""

    def __init__(
        self, config: CacheConfig, cache: Cache, on_status: Callable[[Status], None]
    ) -> None:
        self._config = config
        self._cache = cache
        self._on_status = on_status
        self._process = process_fields(config.path)
        self._need_bytes = fixed_budget(int(config.max_bytes)).total + INDEX_BLOCKS
        self._show_at = 0.0

    async def make(
        self, parent: int | None, duration: float | None, *, handle_interrupt: bool
    ) -> Status | None:
        """Make room. Returns the last status if the service was asked to end before."""
        ended = asyncio.Event()
        listen_for_the_end(ended.set, parent, handle_interrupt=handle_interrupt)
        if duration is not None:
            asyncio.get_running_loop().call_later(duration, ended.set)
        while not ended.is_set():
            self._cache.require_in_place()
            if makes_room_for_next(self._cache, self._need_bytes):
                return None
            if time.monotonic() >= self._show_at:
                self._show(
                    state="waiting", waiting_for=READERS_OF_OLDER, waiting_reason="readers"
                )
                self._show_at = time.monotonic() + SHOW_SECONDS
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), PAUSE_SECONDS)
        return self._show(state="stopped", pid=None)

    def _show(self, **said: Any) -> Status:
        shown = Status(**self._process | cache_fields(self._cache) | said)
        self._on_status(shown)
        write_status(self._config.path, shown)
        return shown
