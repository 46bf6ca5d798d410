"""What of a cache must stay where it is while a service runs: else it was taken away.

A service goes on with what it has open when its folder is removed, moved or replaced, or the
index in it is. Nobody else would see what it writes then, and what it writes by path would
come into somebody else's folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from growcache.cache.files import Layout
from growcache.cache.locks import close_owned, open_owned
from growcache.errors import CacheGoneError


class Anchors:
    """The cache directory, its lock and its index, as a service has them open.

    The directory is held open, so that no other one is given its number meanwhile.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._root: int | None = open_owned(layout.root.resolve(), os.O_RDONLY | os.O_DIRECTORY)
        self._known = {path: path.stat() for path in (layout.supervisor_lock, layout.index)}

    def require(self) -> None:
        """Check that all is where it was.

        Raises:
            CacheGoneError: with what is not.
        """
        if not self.in_place:
            raise CacheGoneError(
                f"the cache directory {self._layout.root} was removed, moved or replaced while "
                "the service ran; start it again when the folder is what it is to be"
            )
        if lost := next(self._lost(), None):
            raise CacheGoneError(
                f"{lost} was removed or replaced while the service ran; the next growcache run "
                "puts right what can be"
            )

    @property
    def in_place(self) -> bool:
        """Whether the path still leads to the directory that the service was started in."""
        return self._root is None or _is(self._layout.root, os.fstat(self._root))

    def _lost(self) -> Iterator[Path]:
        yield from (path for path, known in self._known.items() if not _is(path, known))
        for path in self._layout.folders:
            if path.is_symlink() or not path.is_dir():
                yield path

    def close(self) -> None:
        """Let go of the directory; twice is harmless."""
        if self._root is not None:
            close_owned(self._root)
            self._root = None


def _is(path: Path, known: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), known)
    except (FileNotFoundError, NotADirectoryError):
        return False
