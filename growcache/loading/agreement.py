"""Ranks on several machines agree on how many samples of a pass each of them delivers.

Their caches grow unlike, and all ranks must make the same number of steps. So each rank offers the count
that its machine's cache has for it, and all take the smallest. The front door of a framework brings the
collective operation; this file names what is compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple, Protocol

from growcache.loading.options import LoaderOptions
from growcache.loading.waiting import WaitControl


class Offer(NamedTuple):
    pass_number: int
    step: int = 0  # of the epoch, where the rest of a pass goes on
    rows: int = 0  # for each rank of this machine

    def terms(self, options: LoaderOptions) -> str:
        """Return what must be alike on all ranks, in words."""
        settings = ", ".join(f"{name}={value!r}" for name, value in options.alike.items())
        return f"pass {self.pass_number} from step {self.step} on, with {settings}"


def digest_of(terms: str) -> int:
    """Return a number from 0 to 2**63 - 1 that equal terms share."""
    digest = hashlib.blake2b(terms.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Agreement(Protocol):
    def prepare(self, reason: Callable[[], str]) -> None:
        """Set what the other ranks read when they wait for this one's next offer."""

    def agree(self, offer: Offer, watch: WaitControl) -> int:
        """Return the smallest number of rows that any rank offers.

        Raises:
            CacheError: a rank is gone.
            ConfigError: ranks differ in what must be alike.
            StoppedError: ``watch`` stopped the wait.
        """

    def close(self) -> None:
        """Leave; the other ranks see it. Twice is harmless."""
