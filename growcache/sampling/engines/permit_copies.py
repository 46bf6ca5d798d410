"""Track the actors of each permit.

A slow permit gets a second actor, and the first result wins.

A group is a pure function of its permit, so a copy is safe. It is also a test: if both copies
arrive, their bytes must be equal. Otherwise something is wrong with the source, the user's code
or a machine.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from growcache.cache.sidecar import Sidecar
from growcache.sampling.messages import Message

LEAST_SLOW_SECONDS = 10.0
SLOW_FACTOR = 3.0  # times the median of earlier permits
REMEMBERED, LEAST_REMEMBERED = 32, 4  # permits whose time is known


@dataclass(frozen=True, slots=True)
class ShardOutcome:
    """A shard of a permit.

    Facts that a store may answer differently are separate from the digest.
    """

    number: int
    drawn: tuple[object, ...]
    digest: str

    @classmethod
    def of(cls, sidecar: Sidecar) -> ShardOutcome:
        holes = tuple((hole.key, hole.part, hole.version) for hole in sidecar.holes)
        drawn = (sidecar.samples, sidecar.left_out, holes)
        return cls(sidecar.number, drawn, sidecar.digest)


def differing_shards(ones: Sequence[ShardOutcome], others: Sequence[ShardOutcome]) -> list[int]:
    """Return the shards that were drawn alike, but have different bytes.

    >>> one, other = ShardOutcome(7, (64,), "aa"), ShardOutcome(7, (64,), "bb")
    >>> differing_shards([one], [other]), differing_shards([one], [ShardOutcome(7, (63,), "bb")])
    ([7], [])
    """
    return [
        one.number
        for one, other in zip(ones, others, strict=True)
        if one.drawn == other.drawn and one.digest != other.digest
    ]


@dataclass(slots=True)
class CopiedPermit:
    message: Message
    owner: int  # slot to which the supervisor gave it
    given_at: float  # monotonic seconds
    slots: set[int]  # slots that work on it
    first: int | None = None  # slot that arrived first
    outcomes: dict[int, Sequence[ShardOutcome]] = field(default_factory=dict)
    is_cut: bool = False  # the first result is shorter than the others
    is_over: bool = False  # for the supervisor; only a comparison is left

    @property
    def speaker(self) -> int:
        """The slot whose messages count."""
        return self.owner if self.first is None else self.first


class PermitCopies:
    def __init__(self) -> None:
        self._permits: dict[str, CopiedPermit] = {}
        self._seconds: deque[float] = deque(maxlen=REMEMBERED)

    def of(self, permit_id: str) -> CopiedPermit | None:
        return self._permits.get(permit_id)

    def owned_by(self, slot: int) -> list[str]:
        return [id_ for id_, one in self._permits.items() if one.owner == slot]

    def given(self, message: Message, slot: int, now: float) -> None:
        self._permits[message["id"]] = CopiedPermit(message, slot, now, {slot})

    def slow(self, now: float) -> list[CopiedPermit]:
        """Return the permits that are due for a copy."""
        if len(self._seconds) < LEAST_REMEMBERED:
            return []
        patience = max(LEAST_SLOW_SECONDS, SLOW_FACTOR * statistics.median(self._seconds))
        return [
            one
            for one in self._permits.values()
            if one.first is None and len(one.slots) == 1 and now - one.given_at > patience
        ]

    def arrived(
        self, permit_id: str, slot: int, now: float
    ) -> Literal["first", "later", "unknown"]:
        """Record that a slot has read and encoded its copy."""
        known = self._permits.get(permit_id)
        if known is None or slot not in known.slots:
            return "unknown"
        if known.first is None:
            known.first = slot
            self._seconds.append(now - known.given_at)
        return "first" if known.first == slot else "later"

    def compared(
        self, permit_id: str, slot: int, outcome: Sequence[ShardOutcome]
    ) -> tuple[int, list[int]] | None:
        """Record the digests of a copy; return a slot with other bytes, and the shards concerned."""
        known = self._permits.get(permit_id)
        if known is None:
            return None
        known.outcomes[slot] = outcome
        for other, before in known.outcomes.items():
            if (
                other != slot
                and not known.is_cut
                and (found := differing_shards(before, outcome))
            ):
                return other, found
        return None

    def over(self, permit_id: str, slot: int) -> None:
        """Record that a slot has finished its copy."""
        if known := self._permits.get(permit_id):
            known.slots.discard(slot)
            known.is_over = known.is_over or slot == known.speaker
            if known.is_over and not known.slots:
                del self._permits[permit_id]

    def forget(self, permit_id: str) -> None:
        """Forget a permit that the supervisor withdrew, or will issue again."""
        self._permits.pop(permit_id, None)

    def slot_ended(self, slot: int) -> list[CopiedPermit]:
        """Forget the work of a slot; return permits of others that are lost with it."""
        lost = []
        for permit_id, known in list(self._permits.items()):
            if slot not in known.slots and slot != known.owner:
                continue
            if known.owner == slot or known.first == slot:
                del self._permits[permit_id]
                if known.owner != slot and not known.is_over:
                    lost.append(known)
            else:
                self.over(permit_id, slot)
        return lost
