"""Web servers that answer a request for a part of an object with all of it."""

from __future__ import annotations

import functools
import logging

logger = logging.getLogger(__name__)


@functools.cache
def say_whole(root: str) -> None:
    """Warn of a server that knows no ranges; once."""
    logger.warning(
        "%s knows no ranges: every read of a part of an object is one of all of it",
        root.rstrip("/"),
    )
