"""What is left of readers that were killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from growcache.cache.reader_lease import Lease


@contextmanager
def killed(lease: Lease) -> Iterator[None]:
    """Close the lease within: its bytes stay as they were, and no process holds them."""
    body = lease.path.read_bytes()
    lease.path.unlink()
    yield
    lease.path.write_bytes(body)
