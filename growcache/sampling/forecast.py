"""What groups and shards will take on disk, as far as can be told before they are made."""

from __future__ import annotations

from growcache.sampling.draws import RAMP_END, Sizing
from growcache.sampling.messages import Permit
from growcache.sampling.sizing import ROUNDING_BYTES, SIDECAR_BYTES


class Forecast:
    """Expects of the next group what the last one took.

    Args:
        sizing: how objects are cut.
        record_bytes: of a sample.
    """

    def __init__(self, sizing: Sizing, record_bytes: int) -> None:
        self._sizing = sizing
        self._part_bytes_measured = sizing.samples_per_object * (record_bytes + SIDECAR_BYTES)
        self._part_bytes = 0.0  # of the last group, once one was encoded

    def learn(self, permit: Permit, nbytes: int) -> None:
        """Note what the shards take that a permit is about."""
        share = len(permit.written) / len(permit.shards)
        beyond = max(0, nbytes / share - self._rounding_bytes)
        if visits := len(permit.stops) - len(permit.left_out):
            self._part_bytes = beyond / visits

    def group_bytes(self, parts: int) -> int:
        """Return what a group of so many parts takes."""
        return self._bytes(parts, self._part_bytes or self._part_bytes_measured)

    def full_group_bytes(self) -> int:
        """Return what a group of full shards takes, by what was measured at the beginning."""
        return self._bytes(self._sizing.group_parts(RAMP_END), self._part_bytes_measured)

    def shard_bytes(self, number: int, capacity: int) -> int:
        """Return what a shard of which nothing is known takes, rather too little.

        Args:
            number: of the shard.
            capacity: more than this no group takes.
        """
        shards = self._sizing.group_shards
        group = self.group_bytes(self._sizing.group_parts(number // shards))
        return 3 * (min(capacity, group) // shards) // 4

    def _bytes(self, parts: int, part_bytes: float) -> int:
        return int(parts * part_bytes) + self._rounding_bytes

    @property
    def _rounding_bytes(self) -> int:
        """What the files of a group take however little is in them."""
        return self._sizing.group_shards * ROUNDING_BYTES
