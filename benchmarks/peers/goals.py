"""The goals of growcache against its peers, and whether it met them.

The gaps between epochs count for growcache, but not for the others. It delivers several batches
at once and waits for the first, so without the gaps its wait in each epoch would be left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from benchmarks.measure import verdict
from benchmarks.peers.results import Results
from benchmarks.peers.roster import CONTESTANTS

SUBJECT = "growcache"
SPEED = "bytes_per_second"
SUSTAINED = "sustained_bytes_per_second"


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure of growcache with its bound.

    Attributes:
        case: name of the samples.
        what: is measured.
        value: that came out.
        bound: that it is held to.
        at_most: whether the bound is an upper one.
    """

    case: str
    what: str
    value: float
    bound: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        """Whether the bound is kept."""
        return self.value <= self.bound if self.at_most else self.value >= self.bound

    @property
    def verdict(self) -> str:
        """Return ``met`` or ``MISSED``, and the bound."""
        return verdict(self.value, self.bound, at_most=self.at_most)


# How many times as fast as these growcache has to be, main thread idle.
BOUNDS = {
    "256KiB": {
        "memcpy": 0.8,
        "mosaicml": 10.0,
        "litdata": 10.0,
        "webdataset": 8.0,
        "tfdata": 2.0,
    },
    "3KiB": {"take": 0.6},
}
EVERY_PEER = {"256KiB": 1.1, "3KiB": 1.1}
WAIT_MILLISECONDS = {"256KiB": 0.4, "3KiB": 0.02}


def goals(results: Mapping[str, Results]) -> Iterator[Goal]:
    """Yield every goal whose figures are there."""
    for case, found in results.items():
        yield from _speeds(case, found)
        wait = found.median(SUBJECT, "steps", lambda r: r.get("sustained_wait_seconds"))
        if case in WAIT_MILLISECONDS and wait is not None:
            what = "wait per step of pure Python, ms"
            yield Goal(case, what, wait * 1e3, WAIT_MILLISECONDS[case], at_most=True)


def _speeds(case: str, found: Results) -> Iterator[Goal]:
    ratios = {
        name: ratio
        for name in CONTESTANTS
        if name != SUBJECT
        and (ratio := found.ratio(SUBJECT, name, "idle", SUSTAINED, SPEED)) is not None
    }
    for name, bound in BOUNDS.get(case, {}).items():
        if name in ratios:
            what = f"speed, idle, × {CONTESTANTS[name].title}"
            yield Goal(case, what, ratios[name], bound)
    peers = {name: r for name, r in ratios.items() if not CONTESTANTS[name].limit}
    if case in EVERY_PEER and peers:
        closest = min(peers, key=lambda name: peers[name])
        what = f"speed, idle, × the fastest peer ({CONTESTANTS[closest].title})"
        yield Goal(case, what, peers[closest], EVERY_PEER[case])
