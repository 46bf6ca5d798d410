"""Wishes: shards that a lease names although they are not there (protocol 24). Pure.

A checkpoint names the shards of its epoch with their digests. Whoever resumes it takes a
lease on them; those that were evicted meanwhile, or were never drawn on this machine, are
its wishes. The supervisor draws them again before anything new, under their old numbers,
and commits one only if its digest is the wished one. Else the wish is refused, with the
reason, which stands in the index for as long as a lease asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from growcache.cache.index import IndexView

REFUSED_META = "refused_wishes"  # {shard: {digest: reason}}, in the index
MOST_REFUSED = 1000  # noted at a time; the others follow as readers give these up

Refused = Mapping[tuple[int, str], str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What has become of a wish.

    Attributes:
        state: ``live``: the shard is there, and may be opened under the lease that wished
            for it. ``pending``: it may still come. ``refused``: it will not.
        reason: why it was refused, in words.
    """

    state: Literal["live", "pending", "refused"]
    reason: str = ""


LIVE, PENDING = Outcome("live"), Outcome("pending")


def outcomes(view: IndexView, wishes: Mapping[int, str]) -> dict[int, Outcome]:
    """Return what has become of each wish, as of one look at the index.

    Whoever asks must hold the lease already, and have looked after it was made.

    Args:
        view: of the index.
        wishes: digests by shard number.
    """
    there = {row.number: row.digest for row in view.shards if row.number in wishes}
    noted = refused_of(view.meta.get(REFUSED_META))
    return {
        number: outcome(number, digest, there.get(number), noted)
        for number, digest in wishes.items()
    }


def outcome(number: int, digest: str, found: str | None, refused: Refused) -> Outcome:
    """Return what has become of one wish.

    Args:
        number: of the shard.
        digest: that it must have.
        found: the digest of the live shard of that number; None where there is none.
        refused: as the supervisor noted it.
    """
    if found == digest:
        return LIVE
    if found is not None:
        return Outcome("refused", other_bytes(number))
    reason = refused.get((number, digest))
    return PENDING if reason is None else Outcome("refused", reason)


def other_bytes(number: int) -> str:
    """Return why a wish is refused whose shard this cache holds with another digest."""
    return (
        f"shard {number} of this cache has other bytes: objects were rewritten since, or this "
        "machine's listing grew in other steps"
    )


def refused_of(meta: Any) -> dict[tuple[int, str], str]:
    """Return the refused wishes that the index notes, by (shard, digest)."""
    return {
        (int(number), digest): reason
        for number, reasons in (meta or {}).items()
        for digest, reason in reasons.items()
    }


def refused_meta(refused: Refused) -> dict[str, dict[str, str]]:
    """Return refused wishes as the index notes them; the first `MOST_REFUSED`."""
    meta: dict[str, dict[str, str]] = {}
    for (number, digest), reason in list(refused.items())[:MOST_REFUSED]:
        meta.setdefault(str(number), {})[digest] = reason
    return meta
