"""Which folder is a cache: it is asked before anything is written into one, or deleted in it.

A folder is adopted when it is empty, when it has our marker, or when something in it shows
by a checksum that growcache wrote it. Anything else belongs to somebody, and stays as it is.
The marker is durable before the folder gets its second entry, so a crash at any moment
leaves an empty folder or a marked one.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from growcache.cache.files import (
    LAYOUT_VERSION,
    MARKER,
    SIDECAR,
    Layout,
    fsync_directory,
    make_directory,
    newer,
    read_marker,
    unusable,
    write_atomic,
)
from growcache.cache.folders import NOT_COUNTED
from growcache.cache.guarded import guarded
from growcache.cache.identity import read_identity
from growcache.cache.index.structure import MOST_PATH_BYTES, has_our_tables
from growcache.cache.locks import holder
from growcache.cache.sidecar import Sidecar
from growcache.errors import CacheError, CacheMissingError, CachePathError, CorruptShardError

ABOUT = (
    "A cache of growcache. Its files come and go as growcache decides; "
    "empty it with: growcache clear"
)
SHOWN = 3

_HALF_MARKER = re.compile(rf"\.{re.escape(MARKER)}\.[0-9a-f]{{8}}\.tmp")
_LOCK_KEYS = {"host", "pid", "command"}


def adopt(layout: Layout, *, any_owner: bool = False) -> None:
    """Make the folder a cache's, with the directories in it, durably.

    Args:
        layout: of the cache.
        any_owner: whether others may own its directories, as network file systems have it.

    Raises:
        CachePathError: it is somebody's, or cannot be used; nothing was written into it.
    """
    try:
        _refuse_long(layout)
        _make_root(layout.root)
        check_kinds(layout, any_owner=any_owner)
        if not is_cache(layout) and (found := _foreign(layout)):
            raise _not_ours(layout, found)
        if read_marker(layout) is None:
            _write_marker(layout)
        _make_directories(layout)
    except OSError as error:
        if isinstance(error, CacheError):
            raise
        raise unusable(layout.root, error) from error


def is_cache(layout: Layout) -> bool:
    """Return whether growcache has made the folder, by its marker or by what lies in it.

    Raises:
        CachePathError: a later growcache has.
    """
    version = read_marker(layout)
    if version is not None and version > LAYOUT_VERSION:
        raise newer(layout, version)
    return version is not None or any(_evidence(layout))


def _evidence(layout: Layout) -> Iterator[bool]:
    """Yield whether something verifies that caches of before the marker have, too."""
    with suppress(CacheError):
        yield read_identity(layout.root) is not None
    yield has_our_tables(layout.index)
    # A service that died at its start had written nothing else that can be told from others'.
    yield holder(layout.supervisor_lock).keys() >= _LOCK_KEYS
    for path in _sidecars(layout.shards):
        with suppress(CorruptShardError, OSError):
            yield path.name.startswith(f"{Sidecar.from_bytes(path.read_bytes()).number:08d}.")


def _sidecars(shards: Path) -> Iterator[Path]:
    if not shards.is_symlink() and shards.is_dir():
        for path in shards.iterdir():
            if path.suffix == SIDECAR and path.stem.isdecimal():
                yield path


def _foreign(layout: Layout) -> list[str]:
    """Return what keeps a folder without any evidence from being empty."""
    with os.scandir(layout.root) as entries:
        names = [entry.name for entry in entries]
    found = [n for n in names if n not in NOT_COUNTED and not _HALF_MARKER.fullmatch(n)]
    # Another service may have adopted it since the marker was looked for.
    return sorted(found) if found and read_marker(layout) is None else []


def _not_ours(layout: Layout, found: list[str]) -> CachePathError:
    more = len(found) - SHOWN
    names = ", ".join(found[:SHOWN]) + (f" and {more} more" if more > 0 else "")
    return CachePathError(
        f"{layout.root} is no cache of growcache, and is not empty (it holds {names}); nothing "
        "was changed. Choose another cache.path: a new folder, or an empty one"
    )


def _refuse_long(layout: Layout) -> None:
    if len(os.fsencode(os.path.realpath(layout.index))) > MOST_PATH_BYTES:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))


def _make_root(root: Path) -> None:
    missing = [path for path in (root, *root.parents) if not path.exists()]
    _make_directory(root)
    if not os.access(root, os.R_OK):
        raise CachePathError(
            f"may not read the cache directory {root}; change its permissions, or choose another "
            "cache.path"
        )
    # Without this a power cut may take a new cache as a whole, and with it the number of
    # the highest group that was issued.
    for parent in {path.parent for path in missing}:
        with suppress(PermissionError):  # it may be written, but not read
            fsync_directory(parent)


def require_cache(layout: Layout) -> None:
    """Check that a folder is a cache, before anything in it is deleted or mended.

    Raises:
        CacheMissingError: it is none.
        CachePathError: a later growcache made it, or it cannot be used.
    """
    try:
        check_kinds(layout, any_owner=True)
        known = is_cache(layout)
    except OSError as error:
        if isinstance(error, CacheError):
            raise
        raise unusable(layout.root, error) from error
    if not known:
        raise CacheMissingError(
            f"no cache at {layout.root}; nothing was changed. Fill one with: growcache run CONFIG"
        )


def check_kinds(layout: Layout, *, any_owner: bool) -> None:
    """Refuse links and the like under the names that a cache uses, and folders of others.

    Raises:
        CachePathError: with the name; nothing was read or written.
    """
    me = os.geteuid()
    for path in layout.folders:
        with suppress(FileNotFoundError):
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode):
                raise _wrong_kind(path, found.st_mode, "a folder of the cache's own")
            if found.st_uid != me and not any_owner:
                raise CachePathError(
                    f"{path} belongs to user {found.st_uid}, and this is user {me}; run growcache "
                    "as that user, or choose another cache.path"
                )
    for path in layout.own_files:
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(mode := path.lstat().st_mode):
                raise _wrong_kind(path, mode, "a file of the cache's own")


def _wrong_kind(path: Path, mode: int, expected: str) -> CachePathError:
    kind = "a symbolic link" if stat.S_ISLNK(mode) else "something else"
    return CachePathError(
        f"{path}: expected {expected}, found {kind}; nothing was changed. Move it away, or "
        "choose another cache.path"
    )


def _write_marker(layout: Layout) -> None:
    try:
        write_atomic(layout.marker, guarded({"about": ABOUT, "layout": LAYOUT_VERSION}))
    except (
        FileNotFoundError
    ):  # swept by a service that started at the same moment, and wrote its
        if read_marker(layout) is None:
            raise


def _make_directories(layout: Layout) -> None:
    made = False
    for directory in layout.folders:
        made |= not directory.exists()
        _make_directory(directory)
    if made:
        fsync_directory(layout.root)


def _make_directory(directory: Path) -> None:
    try:
        make_directory(directory)
    except OSError as error:
        raise CachePathError(
            f"cannot make the cache directory {directory}: {error.strerror}; "
            "choose another cache.path"
        ) from None
    if not os.access(directory, os.W_OK | os.X_OK):
        raise CachePathError(
            f"may not write into the cache directory {directory}; change its "
            "permissions, or choose another cache.path"
        )
