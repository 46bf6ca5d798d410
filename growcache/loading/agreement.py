"""Ranks on several machines agree on the samples of a pass that each of them delivers.

Their caches grow differently, but all ranks must make the same number of steps. So each rank
offers the count that its machine's cache has for it, and all ranks take the smallest. A
framework's module provides the collective operation. This file defines the compared values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple, Protocol

from growcache.loading.options import LoaderOptions
from growcache.loading.waiting import WaitControl


class Offer(NamedTuple):
    pass_number: int
    step: int = 0  # of the epoch, if the rest of a pass is read
    rows: int = 0  # for each rank of this machine

    def terms(self, options: LoaderOptions) -> str:
        """Return the terms that must be equal on all ranks, in words."""
        settings = ", ".join(f"{name}={value!r}" for name, value in options.alike.items())
        return f"pass {self.pass_number} from step {self.step} on, with {settings}"


def digest_of(terms: str) -> int:
    """Return a number from 0 to 2**63 - 1 that is the same for equal terms."""
    digest = hashlib.blake2b(terms.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Agreement(Protocol):
    """The agreement of one rank with the other ranks of its job."""

    def prepare(self, reason: Callable[[], str]) -> None:
        """Set the reason that the other ranks show while they wait for this rank's next offer."""

    def agree(self, offer: Offer, watch: WaitControl) -> int:
        """Return the smallest number of rows that any rank offers.

        Raises:
            CacheError: A rank is gone.
            ConfigError: The ranks' terms differ.
            StoppedError: ``watch`` stopped the wait.
        """

    def close(self) -> None:
        """Leave, which the other ranks notice. A second call does nothing."""
