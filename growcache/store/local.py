"""Local files as objects. Size and times of the open file are their version."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import stat
import time
from collections.abc import Awaitable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from growcache.errors import (
    AccessError,
    CredentialsError,
    ObjectMissingError,
    StoreError,
    StoreMissingError,
    TransientStoreError,
)
from growcache.store.contract import PAGE_ENTRIES, Entry, Page, paginate
from growcache.store.response_check import changed_error, settling_seconds
from growcache.store.urls import Location
from growcache.usercode import printable

if TYPE_CHECKING:
    from typing_extensions import Buffer


logger = logging.getLogger(__name__)

_GONE_ERRNOS = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR})
_REFUSED_ERRNOS = frozenset({errno.EACCES, errno.EPERM})
# Errors of network mounts while the server is away.
_TRANSIENT_ERRNOS = frozenset(
    {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.ENOTCONN,
     errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.EREMOTEIO, errno.ENODEV}
)  # fmt: skip
# Errors of mounts with tickets (NFS with Kerberos, AFS) after a ticket has expired.
_LAPSED_TICKET_ERRNOS = frozenset(
    {errno.ENOKEY, errno.EKEYEXPIRED, errno.EKEYREVOKED, errno.EKEYREJECTED}
)
_LARGEST_READ = 1 << 30  # Linux reads at most 2 GiB - 4 KiB at once


class LocalBackend:
    identity = "file"
    sorted = False  # by folder

    def __init__(self, concurrency: int) -> None:
        self._threads = ThreadPoolExecutor(min(32, concurrency), "growcache-read")

    def listing(self, location: Location, after: str | None) -> Iterator[Page]:
        root = Path(location.prefix)
        identity = _folder_identity(root)
        if identity is None:
            raise StoreMissingError(
                f"no folder {root}; expected the one that source.url {location.url} names"
            )
        for page in paginate(
            map(_entry_of_file, _walk(str(root), location.depth, frozenset()))
        ):
            if len(page) < PAGE_ENTRIES and _folder_identity(root) != identity:
                # It was unmounted, so objects that were missing before prove nothing.
                raise TransientStoreError(f"{root} became another folder while it was listed")
            yield Page(entry for entry in page if entry is not None)

    def head(self, key: str) -> Entry:
        try:
            found = Path(key).stat()
        except OSError as error:
            raise _translate_error(error, key) from None
        if not stat.S_ISREG(found.st_mode):
            raise ObjectMissingError(
                f"{key} is not a file; to take all files below a folder, end source.url with /"
            )
        return Entry(key, found.st_size, None, found.st_mtime)

    def get(self, entry: Entry, start: int, stop: int) -> Awaitable[Buffer]:
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._threads, _read_range, entry, start, stop)

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _folder_identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError as error:
        if error.errno in _GONE_ERRNOS:
            return None
        raise _as_store_error(_translate_error(error, str(path))) from None
    return (found.st_dev, found.st_ino) if stat.S_ISDIR(found.st_mode) else None


def _as_store_error(error: OSError) -> OSError:
    return CredentialsError(str(error)) if isinstance(error, AccessError) else error


def _walk(folder: str, depth: int | None, above: frozenset[tuple[int, int]]) -> Iterator[str]:
    """Yield files (and links to files) below a folder, without following links back up."""
    try:
        found = os.stat(folder)  # noqa: PTH116 - strings, because there may be a million paths
        with os.scandir(folder) as scan:
            children = sorted((child.name, child.is_dir()) for child in scan)
    except OSError as error:
        if error.errno in _TRANSIENT_ERRNOS | _LAPSED_TICKET_ERRNOS or (
            not above and error.errno in _REFUSED_ERRNOS
        ):
            raise _as_store_error(_translate_error(error, folder)) from None
        logger.warning("listing leaves out %s: %s", printable(folder), error.strerror)
        return
    here = (found.st_dev, found.st_ino)
    if here in above:
        return
    base = folder if folder.endswith("/") else folder + "/"
    for name, is_folder in children:
        if not is_folder:
            yield base + name
        elif depth is None or depth > 1:
            yield from _walk(base + name, depth and depth - 1, above | {here})


def _entry_of_file(path: str) -> Entry | None:
    try:
        found = os.stat(path)  # noqa: PTH116
    except OSError as error:
        if error.errno in _TRANSIENT_ERRNOS | _LAPSED_TICKET_ERRNOS:
            raise _translate_error(error, path) from None
        return None  # a dangling link, or deleted between the two calls
    if not stat.S_ISREG(found.st_mode):
        return None
    return Entry(path, found.st_size, None, found.st_mtime)


def _read_range(entry: Entry, start: int, stop: int) -> bytes:
    try:
        descriptor = os.open(entry.key, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _read_unchanged(descriptor, entry, start, stop)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _translate_error(error, entry.key) from None


def _read_unchanged(descriptor: int, entry: Entry, start: int, stop: int) -> bytes:
    """Read a range of the listed version.

    Raises:
        TransientStoreError: The file may have changed during the read.
    """
    before = os.fstat(descriptor)
    _check_version(entry, before)
    # A program can set a file's modification time, but not its change time.
    if wait := settling_seconds(before.st_ctime, time.time()):
        time.sleep(wait)
    data = _pread(descriptor, start, stop)
    after = os.fstat(descriptor)
    if before.st_ctime_ns == after.st_ctime_ns and before.st_mtime_ns == after.st_mtime_ns:
        return data
    _check_version(entry, after)
    raise TransientStoreError(f"{entry.key} was changed while it was read")


def _check_version(entry: Entry, found: os.stat_result) -> None:
    if found.st_size != entry.size or found.st_mtime != entry.mtime:
        raise changed_error(entry, Entry(entry.key, found.st_size, None, found.st_mtime))


def _pread(descriptor: int, start: int, stop: int) -> bytes:
    data = os.pread(descriptor, min(stop - start, _LARGEST_READ), start)
    if len(data) == stop - start or not data:
        return data
    return data + _pread(descriptor, start + len(data), stop)


def _translate_error(error: OSError, key: str) -> OSError:
    if isinstance(error, StoreError):
        return error
    if error.errno in _GONE_ERRNOS:
        return ObjectMissingError(f"{key} does not exist")
    if error.errno in _LAPSED_TICKET_ERRNOS:
        return CredentialsError(f"{key} can no longer be read: {error.strerror}")
    if error.errno in _REFUSED_ERRNOS:
        return AccessError(f"{key} may not be read by this user: {error.strerror}")
    if error.errno in _TRANSIENT_ERRNOS:
        return TransientStoreError(f"{key} cannot be read at the moment: {error.strerror}")
    return StoreError(f"{key} cannot be read: {error.strerror}")
