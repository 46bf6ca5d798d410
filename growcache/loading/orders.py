"""What a trainer and its gather process tell each other, beside the items of a producer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from growcache.cache.leases import RankNote
from growcache.loading.options import LoaderOptions
from growcache.loading.resume import Missing
from growcache.loading.state import LoaderState, Mark


@dataclass(frozen=True, slots=True)
class Order:
    """What a gather process is to make.

    Attributes:
        options: of the loader, without the user's functions.
        start: where it begins.
        missing: what to do about shards of the start that are not there any more.
        note: what it says to other ranks; None where there are none.
        wanted: the epoch that the consumer has begun.
        argv: of the trainer, whose command its leases name.
        level: from which on its log records are sent.
        failed: why the service that the trainer started has ended, if it did.
    """

    options: LoaderOptions
    start: LoaderState
    missing: Missing
    note: RankNote | None
    wanted: int
    argv: list[str]
    level: int
    failed: str | None


@dataclass(frozen=True, slots=True)
class Begin:
    """The consumer begins an epoch."""

    epoch: int


@dataclass(frozen=True, slots=True)
class More:
    """The consumer received a block.

    Attributes:
        delivered: where it stands.
        waited: whether it had to wait for it.
        free: buffers that nobody refers to any more.
        spoiled: likewise, but they may not be filled again.
    """

    delivered: Mark
    waited: bool
    free: list[int]
    spoiled: list[int]


@dataclass(frozen=True, slots=True)
class EndPass:
    """A pass is over, and its lease wanted no more."""

    pass_number: int


@dataclass(frozen=True, slots=True)
class Halt:
    """Make no more blocks, but keep the leases."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End, in good order."""


@dataclass(frozen=True, slots=True)
class ServiceChanged:
    """The service that the trainer started on the cache has ended, or one was started anew.

    Attributes:
        reason: why it ended; None: there is a new one.
    """

    reason: str | None


Command: TypeAlias = Order | Begin | More | EndPass | Halt | Stop | ServiceChanged


@dataclass(frozen=True, slots=True)
class Ready:
    """The process has started, and waits for its order."""


@dataclass(frozen=True, slots=True)
class Logged:
    """A record of the process's log."""

    name: str
    level: int
    message: str
