"""Modes of what is in a cache: its owner's only, or shared with a group.

A cache's folder of mode 2770 (the setgid bit, and all rights for the group) says that members of the group work
on the cache as different users, such as service and trainer in two containers. Whatever is made in it is the
group's too, whatever the umask. Otherwise it is its owner's only, and so is a folder that growcache makes for a cache.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

DIRECTORY_MODE, FILE_MODE = 0o700, 0o600
_GROUP_OF_DIRECTORY = stat.S_ISGID | stat.S_IRWXG
_GROUP_OF_FILE = stat.S_IRGRP | stat.S_IWGRP

ONE_USER_OR_GROUP = (
    "run reader and service as one user (docker run --user UID:GID), or share the cache's folder "
    "with a group of both (mode 2770) before the service fills it"
)


def is_shared(folder: Path | int) -> bool:
    """Whether the group of a folder shares what is made in it."""
    found = os.fstat(folder) if isinstance(folder, int) else folder.stat()
    return found.st_mode & _GROUP_OF_DIRECTORY == _GROUP_OF_DIRECTORY


def share_if_folder_is(descriptor: int, folder: Path | int) -> None:
    """Give the group a new file or folder, where ``folder``, in which it was made, is shared."""
    if not is_shared(folder):
        return
    mode = os.fstat(descriptor).st_mode
    group = _GROUP_OF_DIRECTORY if stat.S_ISDIR(mode) else _GROUP_OF_FILE
    if mode & group != group:
        os.fchmod(descriptor, stat.S_IMODE(mode) | group)


def mode_of_new_directory(folder: Path | int) -> int:
    """Return the mode for a folder that is made in ``folder``.

    It inherits the setgid bit. systemd's RestrictSUIDSGID forbids to set that later, so a umask of 0007
    makes `share_if_folder_is` unnecessary.
    """
    return DIRECTORY_MODE | stat.S_IRWXG if is_shared(folder) else DIRECTORY_MODE


def make_private_directory(directory: Path) -> None:
    """Make a folder, and those above it that are missing, for their owner only, unless it is there."""
    try:
        directory.mkdir(DIRECTORY_MODE, exist_ok=True)
    except FileNotFoundError:
        # Path.mkdir makes parents as the umask says; who may write there can replace a cache.
        make_private_directory(directory.parent)
        directory.mkdir(DIRECTORY_MODE, exist_ok=True)


def make_inner_directory(directory: Path) -> None:
    """Make a folder in a cache, shared as the cache is, unless it is there."""
    directory.mkdir(mode_of_new_directory(directory.parent), exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        share_if_folder_is(descriptor, directory.parent)
    finally:
        os.close(descriptor)


def may_share_with_group(folder: Path) -> bool:
    """Whether this process belongs to the folder's group; else the kernel drops the setgid bit."""
    return os.geteuid() == 0 or folder.stat().st_gid in {os.getegid(), *os.getgroups()}
