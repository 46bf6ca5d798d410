"""What a lease tells of its reader: how far the loop is, and how long it waited. Pure.

The fields have fixed places and sizes, so that a reader updates all of them in place with one
write. A job's figures are the sums over its leases: each counts what was received under it.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

# Upper bounds, in seconds, of the buckets of waits; one more bucket holds what took longer.
WAIT_BOUNDS = (
    *(100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
BUCKETS = len(WAIT_BOUNDS) + 1

# flags · progress_at · epoch · pass · delivered · batches · waits · wait_seconds · buckets.
# What is left of the room is for fields to come: it reads as zeros where nobody wrote it.
_FIELDS = struct.Struct("<Qd5Qd24Q")
COUNTERS_BYTES = 512
_MOST = 1 << 53  # no counter of a sound lease is larger

_GAVE_STATE, _COUNTS = 1, 2


@dataclass(slots=True)
class Counters:
    """What one reader received under one lease.

    Attributes:
        gave_state: whether its loader ever gave a `state_dict()`, or went on from one, so that
            it may come back for the rest.
        counts: whether its reader counts at all; else its uses tell what was delivered.
        progress_at: wall time of the last sample that the loop received.
        epoch: in which the loop stands.
        pass_number: of the lease.
        delivered: samples that the loop received.
        batches: that it received.
        waits: batches that it had to wait for, longer than the first of `WAIT_BOUNDS`.
        wait_seconds: that it had no batch, in all.
        histogram: those waits by bucket. The first bucket is empty here, see `wait_histogram`.
    """

    gave_state: bool = False
    counts: bool = False
    progress_at: float = 0.0
    epoch: int = 0
    pass_number: int = 0
    delivered: int = 0
    batches: int = 0
    waits: int = 0
    wait_seconds: float = 0.0
    histogram: list[int] = field(default_factory=lambda: [0] * BUCKETS)

    def receive(self, samples: int, now: float) -> None:
        """Count a batch."""
        self.delivered += samples
        self.batches += 1
        self.progress_at = now

    def wait(self, seconds: float) -> None:
        """Count a time without a batch.

        >>> counters = Counters()
        >>> counters.wait(0.00002), counters.wait(0.3), counters.wait(99.0)
        (None, None, None)
        >>> counters.waits, counters.histogram[11], counters.histogram[-1]
        (2, 1, 1)
        """
        self.wait_seconds += seconds
        if seconds > WAIT_BOUNDS[0]:
            self.waits += 1
            self.histogram[bisect_left(WAIT_BOUNDS, seconds)] += 1

    def wait_histogram(self) -> list[int]:
        """Return the batches by the bucket of their wait; most had none to speak of."""
        return [max(0, self.batches - self.waits), *self.histogram[1:]]

    def pack(self) -> bytes:
        """Return the fields as a lease has them."""
        flags = _GAVE_STATE * self.gave_state | _COUNTS * self.counts
        buckets = self.histogram + [0] * (24 - BUCKETS)
        return _FIELDS.pack(
            *(flags, self.progress_at, self.epoch, self.pass_number, self.delivered),
            *(self.batches, self.waits, self.wait_seconds, *buckets),
        )

    @classmethod
    def unpack(cls, data: bytes) -> Counters:
        """Return what `pack` wrote; fields that are missing are zero.

        Raises:
            ValueError: no reader wrote that.
        """
        padded = data[: _FIELDS.size].ljust(_FIELDS.size, b"\0")
        fields = _FIELDS.unpack(padded)
        flags, at, epoch, pass_number, delivered, batches, waits, seconds = fields[:8]
        buckets = list(fields[8 : 8 + BUCKETS])
        whole = max(epoch, pass_number, delivered, batches, waits, *buckets) < _MOST
        if not (whole and math.isfinite(at) and 0 <= seconds < math.inf):
            raise ValueError("no counters of a reader")
        return cls(
            gave_state=bool(flags & _GAVE_STATE),
            counts=bool(flags & _COUNTS),
            progress_at=at,
            epoch=epoch,
            pass_number=pass_number,
            delivered=delivered,
            batches=batches,
            waits=waits,
            wait_seconds=seconds,
            histogram=buckets,
        )


def summed(counters: Iterable[Counters]) -> Counters:
    """Return the sums over leases of one job, and of the rest the latest."""
    total = Counters()
    for one in counters:
        total.gave_state |= one.gave_state
        total.counts |= one.counts
        total.delivered += one.delivered
        total.batches += one.batches
        total.waits += one.waits
        total.wait_seconds += one.wait_seconds
        total.histogram = [a + b for a, b in zip(total.histogram, one.histogram, strict=True)]
        total.progress_at = max(total.progress_at, one.progress_at)
        total.epoch = max(total.epoch, one.epoch)
        total.pass_number = max(total.pass_number, one.pass_number)
    return total
