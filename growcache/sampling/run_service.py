"""Run the service in this process: on a cache, or on one whose samples are replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from growcache.cache.cache import Cache
from growcache.cache.status_model import Status
from growcache.config import Config
from growcache.config_source import SourceConfig
from growcache.formats import check_source
from growcache.formats.base import require_library
from growcache.sampling.config_reload import ConfigFile
from growcache.sampling.label_table import require_table_library
from growcache.sampling.permits import RunLimits
from growcache.sampling.replacement import Once, RoomForNext, run_replacing
from growcache.sampling.sources import make_each
from growcache.sampling.supervisor import OnStatus, Supervisor


def run_service(
    config: Config,
    *,
    until_full: bool = False,
    duration: float | None = None,
    samples: int | None = None,
    refresh: bool = False,
    retry_holes: bool = False,
    on_status: OnStatus = lambda status: None,
    on_ready: Callable[[], None] = lambda: None,
    on_stderr: Callable[[bytes], None] | None = None,
    parent: int | None = None,
    handle_interrupt: bool = True,
    file: ConfigFile | None = None,
    replace: bool = False,
) -> Status:
    """Run the service in this process until it is stopped, and return its last status.

    In the main thread, SIGINT and SIGTERM stop it cleanly.

    Args:
        config: The configuration.
        until_full: End when the cache is full or complete.
        duration: End after this number of seconds.
        samples: End after this number of samples is drawn.
        refresh: List the source again.
        retry_holes: Retry the objects of holes.
        on_status: Called with the status about four times a second.
        on_ready: Called when the service is ready.
        on_stderr: Called with the error output of samplers.
        parent: End when the other end of this descriptor is closed.
        handle_interrupt: Handle SIGINT.
        file: File whose changes are followed, as far as they can be applied.
        replace: Let new samples replace those of another configuration.
    """
    make_each(config.sources, _check)
    if config.sampling.engine == "ray":
        require_library("sampling.engine: ray", "ray", "ray", "Ray")
    ready = Once(on_ready)

    def make_room(cache: Cache) -> Status | None:
        ready()  # the trainer continues meanwhile, and may be the reader that is waited for
        room = RoomForNext(config.cache, cache, on_status)
        return asyncio.run(room.make(parent, duration, handle_interrupt=handle_interrupt))

    def run_on(cache: Cache) -> Status:
        limits = RunLimits(until_full, duration, samples)
        supervisor = Supervisor(
            config,
            cache,
            limits,
            on_status,
            refresh=refresh,
            retry_holes=retry_holes,
            file=file,
            on_stderr=on_stderr,
        )
        ready()
        return asyncio.run(supervisor.run(parent, handle_interrupt=handle_interrupt))

    return run_replacing(config.cache, run_on, make_room if replace else None)


def _check(source: SourceConfig) -> None:
    check_source(source)
    if source.labels is not None:
        require_table_library(source.labels.url)
