"""Waiting for a store that refuses everybody, or answers nobody: what is said, who asks again."""

from __future__ import annotations

import math

from growcache.errors import StoreRefusedError

FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS = 0.5, 5.0
NOTICE_SECONDS = 1.5  # of failures alone, before a store counts as one that does not answer
SAY_SECONDS, OVER_SECONDS = (
    3.0,
    3.0,
)  # that something is missing, or not any more, before that is told
RECENT_SECONDS = 30.0  # that a failure speaks for: an attempt and the wait after it


def awaited(error: BaseException) -> str:
    """Return what has to happen before a request can succeed, in words.

    >>> from growcache.errors import CredentialsError, TransientStoreError
    >>> awaited(CredentialsError("s3://b: the credentials have expired; renew them"))
    'credentials (s3://b: the credentials have expired; renew them)'
    >>> awaited(TransientStoreError("s3://b/x: connection refused by 127.0.0.1:9"))
    'the store to answer (s3://b/x: connection refused by 127.0.0.1:9)'
    """
    wanted = error.wanted if isinstance(error, StoreRefusedError) else "the store to answer"
    return f"{wanted} ({error})"


class Halt:
    """No group is filled while the store refuses, but for one now and then, on trial.

    It never ends by itself: somebody renews a login the next morning. Where the first halt is over
    when a trial has read something, a second one is only over with a whole group, for part of a
    mixture of sources may be refused, and what was read of the others is fetched in vain each time.
    """

    def __init__(self) -> None:
        self.waiting_for = ""
        self._due = 0.0  # monotonic seconds
        self._trial: str | None = None
        self._halts = self._refusals = 0  # since the last whole group

    def holds_back(self, now: float) -> bool:
        """Return whether no permit may be given now."""
        return bool(self.waiting_for) and (self._trial is not None or now < self._due)

    def took_off(self, permit: str) -> None:
        """Note that a permit was given."""
        if self.waiting_for:
            self._trial = permit

    def refused(self, permit: str, waiting_for: str, now: float) -> None:
        """Note that a group was refused.

        Args:
            permit: of the group.
            waiting_for: what has to happen, in words.
            now: monotonic seconds.
        """
        if not self.waiting_for:
            self._halts += 1
        if not self.waiting_for or permit == self._trial:
            self._later(now)
        self.waiting_for = waiting_for

    def ended(self, permit: str, now: float) -> None:
        """Note that a permit came back without an answer of the store."""
        if permit == self._trial:
            self._later(now)

    def _later(self, now: float) -> None:
        delay = min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2.0 ** min(self._refusals, 10))
        self._trial, self._due = None, now + delay
        self._refusals += 1

    def answered(self, permit: str, *, whole: bool) -> None:
        """Note that something was read for a permit, or all of it."""
        if self.waiting_for and (permit != self._trial or (self._halts > 1 and not whole)):
            return
        self.waiting_for, self._trial = "", None
        if whole:
            self._halts = self._refusals = 0


class Silence:
    """Whether a store answers, by the failures and answers that are told."""

    def __init__(self) -> None:
        self._since = math.inf  # the first failure since the last answer, monotonic seconds
        self._last = -math.inf
        self._awaited = ""
        self._refused = False

    def failed(self, waiting_for: str, now: float, *, refused: bool = False) -> None:
        """Note a failure that is tried again.

        Args:
            waiting_for: what has to happen, in words.
            now: monotonic seconds.
            refused: whether that is an answer, only not the one that is wanted.
        """
        if self._since == math.inf:
            self._since = now
        self._last, self._awaited, self._refused = now, waiting_for, refused

    def answered(self) -> None:
        """Note that something was answered."""
        self._since = math.inf

    def waiting_for(self, now: float) -> str:
        """Return what has to happen, in words; empty where the store answers."""
        noticed = self._refused or now - self._since >= NOTICE_SECONDS
        recent = now - self._last < RECENT_SECONDS
        return self._awaited if self._since < math.inf and noticed and recent else ""


class Notice:
    """Says once, when something is missing for some seconds, what it is, and when that is over."""

    def __init__(self) -> None:
        self._since = self._over_since = math.inf  # monotonic seconds
        self._said = False

    def look(self, missing: str, now: float) -> list[str]:
        """Return what is to be said now.

        Args:
            missing: what is waited for, in words; empty where nothing is.
            now: monotonic seconds.
        """
        if missing:
            self._since, self._over_since = min(self._since, now), math.inf
            if self._said or now - self._since < SAY_SECONDS:
                return []
            self._said = True
            return [f"waiting for {missing}; it is tried again until then"]
        self._over_since = min(self._over_since, now)
        if now - self._over_since < OVER_SECONDS:  # what is on trial may be refused again
            return []
        self._since = math.inf
        said, self._said = self._said, False
        return ["the store answers again"] if said else []
