"""The names in a cache that belong to growcache, and their removal.

Nothing else is ever removed.

Every call looks up a path anew, and a folder on the way may have become a symbolic link since
the last call. So entries are removed, renamed and made through the descriptors of their
folders, and the last name is never followed.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from growcache.cache.files import (
    ARRAYS,
    OFFSETS,
    SHARD_PARTS,
    CacheLayout,
    allocated_tree,
    generation_in,
    shard_names,
)
from growcache.modes import mode_of_new_directory, share_if_folder_is

REMOVED_PREFIX = "removed-"  # prefix of folders of arrays that are being removed
SET_ASIDE_PREFIX = "set-aside-"  # prefix of files that a repair took out of the shards

_NUMBER = r"(?P<number>[0-9]{8,})"
_PARTS = "|".join(re.escape(part) for part in SHARD_PARTS)
_SHARD = re.compile(rf"{_NUMBER}(?:{_PARTS})")
# Ids of the run, the group and the attempt, and an id of the permit; see `PermitIssuer`.
_PERMIT = r"[0-9a-f]{8}-[0-9]{8,}-[0-9]+-[0-9a-f]{4}"
_INCOMING = re.compile(
    rf"(?:{_PERMIT}-|{REMOVED_PREFIX}[0-9a-f]{{8}}|{SET_ASIDE_PREFIX})[0-9]{{8,}}(?:{_PARTS})"
)
_ROOT = [path.name for path in CacheLayout("/").own_files]
_TEMPORARY = re.compile(rf"\.(?:{'|'.join(map(re.escape, _ROOT))})\.[0-9a-f]{{8}}\.tmp")
_LEASE = re.compile(r"[0-9a-f]{32}\.lease")
_LEASE_TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.tmp")


def is_shard_name(name: str) -> bool:
    """Return whether a file, or folder of arrays, in ``shards`` has one of growcache's names.

    >>> is_shard_name("00000007.json"), is_shard_name("00000007.csv"), is_shard_name("7.json")
    (True, False, False)
    """
    match = _SHARD.fullmatch(name)
    return match is not None and name in shard_names(int(match["number"]))


def is_incoming_name(name: str) -> bool:
    """Return whether an entry of ``incoming`` has one of growcache's names, usually with its permit.

    >>> is_incoming_name("0123abcd-00000007-0-ef01-00000007.json"), is_incoming_name("a-00000007.json")
    (True, False)
    """
    return _INCOMING.fullmatch(name) is not None


def is_temporary_name(name: str) -> bool:
    """Return whether an entry of the cache directory is a file that a crash kept from its name.

    >>> is_temporary_name(".issued.0123abcd.tmp"), is_temporary_name(".thesis.0123abcd.tmp")
    (True, False)
    """
    return _TEMPORARY.fullmatch(name) is not None


def is_temporary_lease_name(name: str) -> bool:
    return _LEASE_TEMPORARY.fullmatch(name) is not None


def is_lease_name(name: str) -> bool:
    return _LEASE.fullmatch(name) is not None or is_temporary_lease_name(name)


def is_array_folder_name(name: str) -> bool:
    """Return whether an entry with one of growcache's names must be a folder.

    All others are files.

    >>> is_array_folder_name("00000007.npy"), is_array_folder_name("00000007.offsets.npy")
    (True, False)
    """
    return name.endswith(ARRAYS) and not name.endswith(OFFSETS)


NOT_COUNTED = frozenset({"lost+found"})  # at the top of a dedicated file system

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FULL_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT}


@contextmanager
def open_folder(path: Path) -> Iterator[int]:
    descriptor = os.open(path, _FLAGS | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def open_root(layout: CacheLayout) -> Iterator[int]:
    """Yield the descriptor of the cache directory, which may be a symbolic link."""
    descriptor = os.open(layout.root, _FLAGS)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def make_folder(directory: int, name: str) -> Iterator[int]:
    with suppress(FileExistsError):
        os.mkdir(name, mode_of_new_directory(directory), dir_fd=directory)
    descriptor = os.open(name, _FLAGS | os.O_NOFOLLOW, dir_fd=directory)
    try:
        share_if_folder_is(descriptor, directory)
        yield descriptor
    finally:
        os.close(descriptor)


def own_and_foreign_names(
    directory: int, ours: Callable[[str], bool]
) -> tuple[list[str], list[str]]:
    own: list[str] = []
    foreign: list[str] = []
    with os.scandir(directory) as entries:
        for entry in entries:
            kind = entry.is_dir if is_array_folder_name(entry.name) else entry.is_file
            fits = ours(entry.name) and kind(follow_symlinks=False)
            (own if fits else foreign).append(entry.name)
    return sorted(own), sorted(foreign)


def cache_folders(layout: CacheLayout) -> list[tuple[Path, Callable[[str], bool]]]:
    places: list[tuple[Path, Callable[[str], bool]]] = [
        (layout.shards, is_shard_name),
        (layout.incoming, is_incoming_name),
        (layout.leases, is_lease_name),
    ]
    return [(path, ours) for path, ours in places if path.is_dir() and not path.is_symlink()]


def foreign_paths(layout: CacheLayout) -> list[Path]:
    inner = cache_folders(layout)
    own = {path.name for path in (*layout.own_files, *(path for path, _ in inner))}
    found = [
        path
        for path in sorted(layout.root.iterdir())
        if path.name not in own | NOT_COUNTED
        and not is_temporary_name(path.name)
        and generation_in(path) is None
    ]
    for place, ours in inner:
        with open_folder(place) as descriptor:
            found += [place / name for name in own_and_foreign_names(descriptor, ours)[1]]
    return found


def foreign_bytes(layout: CacheLayout, found: Iterable[Path]) -> int:
    """Return the allocated bytes of files, without the places that `SpaceAccount.measure` counts."""
    return sum(
        allocated_tree(path)
        for path in found
        if path.parent != layout.leases
        and (path.parent != layout.root or (path.is_dir() and not path.is_symlink()))
    )


def remove_entry(directory: int, name: str) -> None:
    """Remove a file or a folder of arrays. A folder with foreign files stays."""
    with suppress(FileNotFoundError):
        if is_array_folder_name(name):
            _remove_arrays(directory, name)
        else:
            with suppress(IsADirectoryError):  # not one of growcache's files
                os.unlink(name, dir_fd=directory)


def _remove_arrays(directory: int, name: str) -> None:
    try:
        inner = os.open(name, _FLAGS | os.O_NOFOLLOW, dir_fd=directory)
    except OSError as error:
        if error.errno in {errno.ENOTDIR, errno.ELOOP}:  # a foreign file or link
            return
        raise
    try:
        with os.scandir(inner) as entries:
            arrays = [entry.name for entry in entries if _is_array(entry)]
        for array in arrays:
            with suppress(FileNotFoundError):
                os.unlink(array, dir_fd=inner)
    finally:
        os.close(inner)
    try:
        os.rmdir(name, dir_fd=directory)
    except OSError as error:
        if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
            raise


def _is_array(entry: os.DirEntry[str]) -> bool:
    return entry.name.endswith(ARRAYS) and entry.is_file(follow_symlinks=False)


def remove_shard(layout: CacheLayout, number: int) -> None:
    """Unlink a shard and its sidecar, as far as they exist.

    A reader that opens it meanwhile finds it complete or missing. The samples are removed
    first, and a directory is first renamed to where only litter is.
    """
    with open_folder(layout.shards) as shards:
        for name in shard_names(number):
            if is_array_folder_name(name):
                _move_away_and_remove(layout, shards, name)
            else:
                remove_entry(shards, name)


def _move_away_and_remove(layout: CacheLayout, shards: int, name: str) -> None:
    if not _is_folder(shards, name):
        return
    aside = f"{REMOVED_PREFIX}{uuid.uuid4().hex[:8]}{name}"
    with open_folder(layout.incoming) as incoming:
        try:
            os.rename(name, aside, src_dir_fd=shards, dst_dir_fd=incoming)
        except OSError as error:
            if error.errno not in _FULL_DISK_ERRORS:
                raise
            remove_entry(shards, name)  # on a full disk its removal matters more than the way
        else:
            remove_entry(incoming, aside)


def _is_folder(directory: int, name: str) -> bool:
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def remove_incoming_shard(layout: CacheLayout, prefix: str) -> None:
    with suppress(FileNotFoundError), open_folder(layout.incoming) as incoming:
        for part in SHARD_PARTS:
            remove_entry(incoming, prefix + part)
