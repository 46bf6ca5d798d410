"""Web servers that answer a request for a part of an object with all of it."""

from __future__ import annotations

import functools
import logging

from growcache.remote.response_check import BrokenReadError

logger = logging.getLogger(__name__)


@functools.cache
def say_whole(root: str) -> None:
    """Warn of a server that knows no ranges; once."""
    logger.warning(
        "%s knows no ranges: every read of a part of an object is one of all of it",
        root.rstrip("/"),
    )


class RangeSupport:
    """Whether a web server knows ranges, as far as its answers tell.

    Attributes:
        known: None: it was not asked for a range yet.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self.known: bool | None = None

    def take_in(self, *, whole: bool) -> None:
        """Learn from the response to a request for a range.

        Args:
            whole: whether it was all of the object.

        Raises:
            BrokenReadError: it was, and the server has answered with ranges before.
        """
        if whole and self.known:
            raise BrokenReadError(
                f"{self._root}: expected a part of an object, the server sent all of it, which "
                "it does not do otherwise"
            )
        if whole:
            say_whole(self._root)
        self.known = not whole
