"""The directory: whether it is a cache, whether it is still in place, and how it is emptied.

A folder becomes a cache if it is empty, has the marker, or has a file whose checksum shows that
growcache wrote it. Any other folder stays unchanged. The marker is durable before the folder
gets its second entry, so a crash leaves an empty folder or a marked one.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from growcache.cache.files import (
    LAYOUT_VERSION,
    MARKER,
    PLAIN_LAYOUT_VERSION,
    SIDECAR,
    CacheLayout,
    checksummed_json,
    fsync_directory,
    newer_layout_error,
    read_marker,
    unusable_path_error,
    write_atomic,
)
from growcache.cache.folders import (
    NOT_COUNTED,
    cache_folders,
    is_temporary_name,
    open_folder,
    open_root,
    own_and_foreign_names,
    remove_entry,
)
from growcache.cache.index.schema import MOST_PATH_BYTES
from growcache.cache.index.structure import has_our_tables
from growcache.cache.locks import FileLock, LockedError, close_owned, lock_holder, open_owned
from growcache.cache.side_files import read_identity
from growcache.cache.sidecar import Sidecar
from growcache.cache.system import end_samplers, is_process_stopped, process_has_open
from growcache.errors import (
    CacheBusyError,
    CacheError,
    CacheGoneError,
    CacheMissingError,
    CachePathError,
    CorruptShardError,
)
from growcache.modes import (
    is_shared,
    make_inner_directory,
    make_private_directory,
    may_share_with_group,
)

_log = logging.getLogger(__name__)

MARKER_TEXT = (
    "A growcache cache. growcache adds and deletes its files; empty it with: growcache clear"
)
SHOWN_ENTRIES = 3

_HALF_MARKER = re.compile(rf"\.{re.escape(MARKER)}\.[0-9a-f]{{8}}\.tmp")
_LOCK_KEYS = {"host", "pid", "command"}


def adopt(layout: CacheLayout, *, any_owner: bool = False) -> None:
    """Make the folder a cache, durably.

    Raises:
        CachePathError: The folder belongs to something else.
    """
    try:
        _refuse_long_path(layout)
        _make_root(layout.root)
        _require_group(layout.root)
        check_kinds(layout, any_owner=any_owner)
        if not is_cache(layout) and (found := _foreign_names(layout)):
            raise _foreign_folder_error(layout, found)
        if read_marker(layout) is None:
            write_marker(layout)
        _make_directories(layout)
    except OSError as error:
        if isinstance(error, CacheError):
            raise
        raise unusable_path_error(layout.root, error) from error


def is_cache(layout: CacheLayout) -> bool:
    """Whether growcache made the folder.

    Raises:
        CachePathError: A later version made it.
    """
    version = read_marker(layout)
    if version is not None and version > LAYOUT_VERSION:
        raise newer_layout_error(layout, version)
    return version is not None or any(_evidence(layout))


def _evidence(layout: CacheLayout) -> Iterator[bool]:
    """Yield the checks that recognise a cache from before there were markers."""
    with suppress(CacheError):
        yield read_identity(layout.root) is not None
    yield has_our_tables(layout.index)
    # A service that died at its start had written nothing else that identifies it.
    yield lock_holder(layout.supervisor_lock).keys() >= _LOCK_KEYS
    for path in _sidecars(layout.shards):
        with suppress(CorruptShardError, OSError):
            yield path.name.startswith(f"{Sidecar.from_bytes(path.read_bytes()).number:08d}.")


def _sidecars(shards: Path) -> Iterator[Path]:
    if not shards.is_symlink() and shards.is_dir():
        for path in shards.iterdir():
            if path.suffix == SIDECAR and path.stem.isdecimal():
                yield path


def _foreign_names(layout: CacheLayout) -> list[str]:
    """Return the names that make a folder without evidence count as not empty."""
    with os.scandir(layout.root) as entries:
        names = [entry.name for entry in entries]
    found = [n for n in names if n not in NOT_COUNTED and not _HALF_MARKER.fullmatch(n)]
    # Another service may have adopted it after the search for the marker.
    return sorted(found) if found and read_marker(layout) is None else []


def _foreign_folder_error(layout: CacheLayout, found: list[str]) -> CachePathError:
    more = len(found) - SHOWN_ENTRIES
    names = ", ".join(found[:SHOWN_ENTRIES]) + (f" and {more} more" if more > 0 else "")
    return CachePathError(
        f"{layout.root} is not a growcache cache, and is not empty (it holds {names}); nothing "
        "was changed. Choose another cache.path: a new folder, or an empty one"
    )


def _refuse_long_path(layout: CacheLayout) -> None:
    if len(os.fsencode(os.path.realpath(layout.index))) > MOST_PATH_BYTES:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))


def _make_root(root: Path) -> None:
    missing = [path for path in (root, *root.parents) if not path.exists()]
    _make_directory(root, make_private_directory)
    if not os.access(root, os.R_OK):
        raise CachePathError(
            f"no permission to read the cache directory {root}; change its permissions, or "
            "choose another cache.path",
            code="GC406",
        )
    # Without this a power cut may remove a new cache completely, and with it the number of the
    # highest issued group.
    for parent in {path.parent for path in missing}:
        with suppress(PermissionError):  # it may be writable, but not readable
            fsync_directory(parent)


def _require_group(root: Path) -> None:
    if is_shared(root) and not may_share_with_group(root):
        raise CachePathError(
            f"{root} is shared with its group ({root.stat().st_gid}), to which this process of "
            f"uid {os.geteuid()} does not belong; run it with that group (docker run "
            "--group-add GID), or remove the group's write permission: chmod g-ws",
            code="GC406",
        )


def require_cache(layout: CacheLayout) -> None:
    """Require a cache, before anything in it is deleted or repaired.

    Raises:
        CacheMissingError: The folder is not a cache.
        CachePathError: A later version made it, or it cannot be used.
    """
    try:
        check_kinds(layout, any_owner=True)
        known = is_cache(layout)
    except OSError as error:
        if isinstance(error, CacheError):
            raise
        raise unusable_path_error(layout.root, error) from error
    if not known:
        raise CacheMissingError(
            f"no cache at {layout.directory}; nothing was changed. Fill one with: growcache run CONFIG"
        )


def check_kinds(layout: CacheLayout, *, any_owner: bool) -> None:
    """Raise CachePathError for a link or another file type under one of growcache's names."""
    me = os.geteuid()
    for path in layout.folders:
        with suppress(FileNotFoundError):
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode):
                raise _wrong_kind_error(path, found.st_mode, "a folder of the cache's own")
            if found.st_uid != me and not any_owner and not is_shared(path):
                raise CachePathError(
                    f"{path} belongs to user {found.st_uid}, and this is user {me}; run growcache "
                    "as that user, or choose another cache.path",
                    code="GC406",
                )
    for path in layout.own_files:
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(mode := path.lstat().st_mode):
                raise _wrong_kind_error(path, mode, "a file of the cache's own")


def _wrong_kind_error(path: Path, mode: int, expected: str) -> CachePathError:
    kind = "a symbolic link" if stat.S_ISLNK(mode) else "something else"
    return CachePathError(
        f"{path}: expected {expected}, found {kind}; nothing was changed. Move it away, or "
        "choose another cache.path"
    )


def write_marker(layout: CacheLayout, version: int = PLAIN_LAYOUT_VERSION) -> None:
    try:
        write_atomic(layout.marker, checksummed_json({"about": MARKER_TEXT, "layout": version}))
    except (
        FileNotFoundError
    ):  # a service that started at the same moment removed it, and wrote its own
        if read_marker(layout) is None:
            raise


def _make_directories(layout: CacheLayout) -> None:
    made = False
    for directory in layout.folders:
        made |= not directory.exists()
        _make_directory(directory, make_inner_directory)
    if made:
        fsync_directory(layout.root)


def _make_directory(directory: Path, make: Callable[[Path], None]) -> None:
    try:
        make(directory)
    except OSError as error:
        raise CachePathError(
            f"cannot make the cache directory {directory}: {error.strerror}; "
            "choose another cache.path"
        ) from None
    if not os.access(directory, os.W_OK | os.X_OK):
        raise CachePathError(
            f"no permission to write into the cache directory {directory}; change its "
            "permissions, or choose another cache.path",
            code="GC406",
        )


class OpenDirectory:
    """The directory, its lock and its index, as the supervisor has them open.

    If the directory is moved or replaced, the supervisor continues with its open files, which
    no reader sees. The descriptor keeps the directory's inode number from being reused.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout
        self._root: int | None = open_owned(layout.root.resolve(), os.O_RDONLY | os.O_DIRECTORY)
        self._known = {path: path.stat() for path in (layout.supervisor_lock, layout.index)}

    def require(self, error: Exception | None = None) -> None:
        """Raise CacheGoneError if one of them, or the missing file in ``error``, is not in place.

        A removal may have reached a file that is neither the first nor the last.
        """
        if not self.in_place:
            raise CacheGoneError(
                f"the cache directory {self._layout.root} was removed, moved or replaced while "
                "the service ran; restore the folder, then start the service again"
            )
        if lost := next(self._lost(), None) or self._missing_file(error):
            raise CacheGoneError(
                f"{lost} was removed or replaced while the service ran; the next growcache run "
                "repairs the cache as far as possible"
            )

    def _missing_file(self, error: Exception | None) -> Path | None:
        if not isinstance(error, FileNotFoundError) or error.filename is None:
            return None
        path = Path(os.fsdecode(error.filename))
        return path if path.is_relative_to(self._layout.root) else None

    @property
    def in_place(self) -> bool:
        return self._root is None or _is_same_file(self._layout.root, os.fstat(self._root))

    def _lost(self) -> Iterator[Path]:
        yield from (
            path for path, known in self._known.items() if not _is_same_file(path, known)
        )
        for path in self._layout.folders:
            if path.is_symlink() or not path.is_dir():
                yield path

    def close(self) -> None:
        if self._root is not None:
            close_owned(self._root)
            self._root = None


def _is_same_file(path: Path, known: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), known)
    except (FileNotFoundError, NotADirectoryError):
        return False


def clear_cache(layout: CacheLayout) -> None:
    """Delete everything but marker, locks, purge list and foreign files.

    A crash leaves all or nothing. Shards on disk would be adopted, because they describe
    themselves. So a note that they are not wanted is written first and removed last, and the
    next start continues the deletion.
    """
    write_atomic(layout.clearing, b"")
    finish_clear(layout)


def finish_clear(layout: CacheLayout) -> None:
    if not layout.clearing.exists():
        return
    with open_root(layout) as root:
        for name in _index_first(layout):
            remove_entry(root, name)
        for name in own_and_foreign_names(root, is_temporary_name)[0]:
            remove_entry(root, name)
    for directory, ours in cache_folders(layout):
        with open_folder(directory) as descriptor:
            for name in own_and_foreign_names(descriptor, ours)[0]:
                remove_entry(descriptor, name)
            os.fsync(descriptor)
    fsync_directory(layout.root)
    layout.clearing.unlink()
    fsync_directory(layout.root)


def _index_first(layout: CacheLayout) -> list[str]:
    """Return the names with the index first, so that readers see the whole cache or none."""
    locks = (layout.supervisor_lock, layout.samplers_lock)
    kept = (layout.marker, *locks, layout.purged, layout.clearing)
    first = [layout.index]
    return [
        path.name for path in first + [p for p in layout.own_files if p not in (*kept, *first)]
    ]


# Readers test the lock by holding it themselves for microseconds.
TAKEOVER_PROBE_SECONDS = 0.5
SAMPLERS_GRACE_SECONDS = 0.5  # for samplers to end by themselves, even on a busy machine


def take_over(layout: CacheLayout, samplers_seconds: float) -> FileLock:
    """Return the supervisor's lock, after the last sampler of an earlier supervisor has ended."""
    before = lock_holder(layout.supervisor_lock)
    try:
        lock = FileLock.acquire(layout.supervisor_lock, seconds=TAKEOVER_PROBE_SECONDS)
    except LockedError:
        raise in_use_error(layout, "stop that service, or choose another cache.path") from None
    try:
        _wait_for_samplers(layout, samplers_seconds, before)
    except BaseException:
        lock.close()
        raise
    return lock


def _wait_for_samplers(layout: CacheLayout, seconds: float, before: Mapping[str, Any]) -> None:
    """Wait for the samplers of a dead supervisor to end, and kill those that hang.

    They end by themselves within milliseconds. A remaining one is stopped, or in a call that
    never returns, and its files are worthless.
    """
    path = layout.samplers_lock
    began = time.monotonic()
    try:
        FileLock.acquire(path, seconds=min(seconds, SAMPLERS_GRACE_SECONDS)).close()
        return
    except LockedError:
        ended = end_samplers(path)
    try:
        FileLock.acquire(path, seconds=seconds + began - time.monotonic()).close()
    except LockedError:
        raise CacheBusyError(_hung_samplers_message(layout, before, ended)) from None
    _log.warning(
        "service killed hung samplers of an earlier service that died: pids %s",
        ", ".join(map(str, ended)),
    )


def _hung_samplers_message(
    layout: CacheLayout, before: Mapping[str, Any], ended: Sequence[int]
) -> str:
    of = f"of the dead service with pid {before.get('pid', '?')} on {before.get('host', '?')}"
    if ended:
        pids = ", ".join(map(str, ended))
        return (
            f"samplers {of} still hold {layout.root}: {pids} were killed but do not end, "
            "because the kernel waits for a disk or a network share; try again later"
        )
    return (
        f"samplers {of} still hold {layout.root}, and cannot be seen from here: they belong to "
        "another user, or run on another host or in another container; end them there "
        "(growcache sampler)"
    )


def in_use_error(layout: CacheLayout, advice: str) -> CacheBusyError:
    who = lock_holder(layout.supervisor_lock)
    pid, host = who.get("pid", "?"), who.get("host", "?")
    told = f"the cache at {layout.root} is in use by pid {pid} on {host} ({who.get('command', '?')})"
    if (
        type(pid) is int
        and process_has_open(pid, layout.supervisor_lock)
        and is_process_stopped(pid)
    ):
        return CacheBusyError(
            f"{told}, which is stopped by a signal; continue it with: kill -CONT {pid}, or end "
            f"it with: kill -KILL {pid}"
        )
    return CacheBusyError(f"{told}; {advice}")
