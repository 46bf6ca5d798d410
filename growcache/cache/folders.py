"""What is removed, renamed or made in a cache's folders, by their descriptors.

A path is looked up anew by every call, and a folder on the way may have become a symbolic
link since the last one. A descriptor stays what it was opened as; the last name is never
followed. So nothing outside a cache is ever touched.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from growcache.cache.files import (
    ARRAYS,
    SHARD_PARTS,
    Layout,
    allocated_tree,
    shard_names,
)
from growcache.cache.names import (
    REMOVED,
    is_folder_of_arrays,
    is_incoming,
    is_lease,
    is_shard,
    is_temporary,
)

NOT_COUNTED = frozenset({"lost+found"})  # at the top of a file system of the cache's own

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}


@contextmanager
def folder(path: Path) -> Iterator[int]:
    """Lend the descriptor of a folder that is no symbolic link.

    Raises:
        OSError: there is none.
    """
    descriptor = os.open(path, _FLAGS | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def root_folder(layout: Layout) -> Iterator[int]:
    """Lend the descriptor of the cache directory, which may be named by a symbolic link."""
    descriptor = os.open(layout.root, _FLAGS)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def subfolder(directory: int, name: str, mode: int) -> Iterator[int]:
    """Make a folder in a folder, where it is missing, and lend its descriptor."""
    with suppress(FileExistsError):
        os.mkdir(name, mode, dir_fd=directory)
    descriptor = os.open(name, _FLAGS | os.O_NOFOLLOW, dir_fd=directory)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def parted(directory: int, ours: Callable[[str], bool]) -> tuple[list[str], list[str]]:
    """Return the names in a folder that may be removed, and those that may not.

    Args:
        directory: its descriptor.
        ours: whether a name is growcache's.
    """
    own: list[str] = []
    foreign: list[str] = []
    with os.scandir(directory) as entries:
        for entry in entries:
            kind = entry.is_dir if is_folder_of_arrays(entry.name) else entry.is_file
            fits = ours(entry.name) and kind(follow_symlinks=False)
            (own if fits else foreign).append(entry.name)
    return sorted(own), sorted(foreign)


def inner_folders(layout: Layout) -> list[tuple[Path, Callable[[str], bool]]]:
    """Return the folders of a cache that are there, each with what tells a name of ours."""
    places: list[tuple[Path, Callable[[str], bool]]] = [
        (layout.shards, is_shard),
        (layout.incoming, is_incoming),
        (layout.leases, is_lease),
    ]
    return [(path, ours) for path, ours in places if path.is_dir() and not path.is_symlink()]


def strangers(layout: Layout) -> list[Path]:
    """Return what lies in a cache and is not growcache's."""
    inner = inner_folders(layout)
    own = {path.name for path in (*layout.own_files, *(path for path, _ in inner))}
    found = [
        path
        for path in sorted(layout.root.iterdir())
        if path.name not in own | NOT_COUNTED and not is_temporary(path.name)
    ]
    for place, ours in inner:
        with folder(place) as descriptor:
            found += [place / name for name in parted(descriptor, ours)[1]]
    return found


def bytes_of_strangers(layout: Layout, found: Iterable[Path]) -> int:
    """Return what they allocate, but for what is looked at all the time (`Room.other_bytes`)."""
    return sum(
        allocated_tree(path)
        for path in found
        if path.parent != layout.leases
        and (path.parent != layout.root or (path.is_dir() and not path.is_symlink()))
    )


def remove(directory: int, name: str) -> None:
    """Remove a file, or a folder with its arrays, as far as it is there.

    What is no array of ours stays in such a folder, and the folder with it.
    """
    with suppress(FileNotFoundError):
        if is_folder_of_arrays(name):
            _remove_arrays(directory, name)
        else:
            with suppress(IsADirectoryError):  # no file of ours
                os.unlink(name, dir_fd=directory)


def _remove_arrays(directory: int, name: str) -> None:
    try:
        inner = os.open(name, _FLAGS | os.O_NOFOLLOW, dir_fd=directory)
    except OSError as error:
        if error.errno in {errno.ENOTDIR, errno.ELOOP}:  # a file or a link: not ours
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


def remove_shard(layout: Layout, number: int) -> None:
    """Unlink a shard and its sidecar, as far as they are there.

    Whoever opens it meanwhile finds it whole or missing: the samples go first, and a
    directory goes at once, to where only litter lies.
    """
    with folder(layout.shards) as shards:
        for name in shard_names(number):
            if is_folder_of_arrays(name):
                _remove_at_once(layout, shards, name)
            else:
                remove(shards, name)


def _remove_at_once(layout: Layout, shards: int, name: str) -> None:
    """Move a folder of arrays to where it is swept, and remove it there."""
    if not _is_folder(shards, name):
        return
    aside = f"{REMOVED}{uuid.uuid4().hex[:8]}{name}"
    with folder(layout.incoming) as incoming:
        try:
            os.rename(name, aside, src_dir_fd=shards, dst_dir_fd=incoming)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            remove(shards, name)  # on a full disk it is more important that it goes than how
        else:
            remove(incoming, aside)


def _is_folder(directory: int, name: str) -> bool:
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def remove_parts(layout: Layout, prefix: str) -> None:
    """Remove all files of a shard under one prefix in ``incoming``, as far as they are there."""
    with suppress(FileNotFoundError), folder(layout.incoming) as incoming:
        for part in SHARD_PARTS:
            remove(incoming, prefix + part)
