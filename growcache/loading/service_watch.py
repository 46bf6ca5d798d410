"""Warn a training process, once per event, if the service of its cache adds no new samples.

The thread that writes the counters of leases checks every few seconds while batches are
received, so the loop has no costs. A loop that waits for samples is not warned here, because
`waiting` says what it waits for.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from growcache.cache.files import CacheLayout
from growcache.cache.index.reader import read_index
from growcache.cache.status import ServicePulse, service_pulse
from growcache.errors import GrowcacheError

_log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
STOPPED_SECONDS = 3.0  # a restarting service may be absent for a moment
ABSENT_SECONDS = 40.0  # of training on a cache whose service was never seen
WAITING_SECONDS = 60.0  # without a new sample

Event = Literal["stopped", "absent", "silent", "waiting"]


@dataclass
class ServiceWatch:
    """Decides from a service's signs of life when to report an event. Pure."""

    began: float | None = None
    seen: ServicePulse | None = None  # last sign of life of a running service
    seen_at: float = 0.0
    drawn: int = -1
    drawn_at: float = 0.0
    reported: set[Event] = field(default_factory=set)  # events that still last

    def look(self, pulse: ServicePulse, now: float) -> Event | None:
        """Return an event that was not reported yet, or None.

        ``now`` is in monotonic seconds.
        """
        if self.began is None:
            self.began = self.drawn_at = now
        event = self._running(pulse, now) if pulse.runs else self._gone(now)
        if event is None or event in self.reported:
            return None
        self.reported.add(event)
        return event

    def _running(self, pulse: ServicePulse, now: float) -> Event | None:
        self.seen, self.seen_at = pulse, now
        self.reported -= {"stopped"}
        if pulse.drawn != self.drawn or pulse.state != "waiting":
            self.drawn, self.drawn_at = pulse.drawn, now
            self.reported -= {"waiting"}
        if pulse.silence:
            return "silent"
        self.reported -= {"silent"}
        return "waiting" if now - self.drawn_at >= WAITING_SECONDS else None

    def _gone(self, now: float) -> Event | None:
        if self.seen is not None:
            return "stopped" if now - self.seen_at >= STOPPED_SECONDS else None
        assert self.began is not None
        return "absent" if now - self.began >= ABSENT_SECONDS else None


class ServiceWatches:
    """The watches of all caches that this process trains on, for one thread."""

    def __init__(self) -> None:
        self._watches: dict[Path, ServiceWatch] = {}
        self._looked_at = float("-inf")

    def look(self, roots: set[Path]) -> None:
        now = time.monotonic()
        if not roots or now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        for root in roots:
            try:
                self._look_at(root, now)
            except (GrowcacheError, OSError):  # the loader reports it, if it matters there
                continue

    def _look_at(self, root: Path, now: float) -> None:
        watch = self._watches.setdefault(root, ServiceWatch())
        pulse = service_pulse(root)
        event = watch.look(pulse, now)
        if event is None:
            return
        view = read_index(CacheLayout(root).root)
        if not view.complete:
            seconds = now - (watch.drawn_at if event == "waiting" else watch.began or now)
            _log.warning(
                "%s", event_text(event, root, watch, pulse, view.totals.samples, seconds)
            )


def event_text(
    event: Event,
    root: Path,
    watch: ServiceWatch,
    pulse: ServicePulse,
    samples: int,
    seconds: float,
) -> str:
    repeat = f"epochs repeat the {samples:,} samples that are cached"
    if event == "stopped":
        last = watch.seen or pulse
        at = time.strftime("%H:%M:%S", time.localtime(last.updated_at))
        return (
            f"the service of the cache {root} has stopped (pid {last.pid} on {last.host}, at "
            f"{at}): the cache no longer grows, and {repeat}; start it again with: growcache "
            "run CONFIG"
        )
    if event == "absent":
        return (
            f"no service has run on the cache {root} for {seconds:.0f} s: {repeat}; start one with: "
            "growcache run CONFIG (reported once)"
        )
    if event == "silent":
        begin = f"the cache {root} gets nothing new and waits for {pulse.silence}"
    else:
        awaited = pulse.waiting_for or "the next report"
        begin = f"the cache {root} has received nothing new for {seconds:.0f} s: its service waits for {awaited}"
    return f"{begin}; until then {repeat}. See: growcache status {root}"
