"""File modes inside a cache: for its owner only, or shared with a group.

A cache folder of mode 2770 (the setgid bit, and all rights for the group) is shared. Members of
the group work on it as different users, such as service and trainer in two containers. All
files and folders made in it are accessible to the group, whatever the umask. Any other cache is
accessible to its owner only. So is a folder that growcache makes for a cache.
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
    """Whether the group of a folder shares the files and folders made in it."""
    found = os.fstat(folder) if isinstance(folder, int) else folder.stat()
    return found.st_mode & _GROUP_OF_DIRECTORY == _GROUP_OF_DIRECTORY


def share_if_folder_is(descriptor: int, folder: Path | int) -> None:
    """Give the group access to a new file or folder if its parent ``folder`` is shared."""
    if not is_shared(folder):
        return
    mode = os.fstat(descriptor).st_mode
    group = _GROUP_OF_DIRECTORY if stat.S_ISDIR(mode) else _GROUP_OF_FILE
    if mode & group != group:
        os.fchmod(descriptor, stat.S_IMODE(mode) | group)


def mode_of_new_directory(folder: Path | int) -> int:
    """Return the mode for a new folder in ``folder``.

    The new folder inherits the setgid bit. systemd's RestrictSUIDSGID forbids setting it later,
    so a umask of 0007 makes `share_if_folder_is` unnecessary.
    """
    return DIRECTORY_MODE | stat.S_IRWXG if is_shared(folder) else DIRECTORY_MODE


def make_private_directory(directory: Path) -> None:
    """Make a folder and its missing parents, for their owner only, unless it exists."""
    try:
        directory.mkdir(DIRECTORY_MODE, exist_ok=True)
    except FileNotFoundError:
        # Path.mkdir makes parents by the umask, and a user with write access there could
        # replace a cache.
        make_private_directory(directory.parent)
        directory.mkdir(DIRECTORY_MODE, exist_ok=True)


def make_inner_directory(directory: Path) -> None:
    """Make a folder in a cache, shared like the cache, unless it exists."""
    directory.mkdir(mode_of_new_directory(directory.parent), exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        share_if_folder_is(descriptor, directory.parent)
    finally:
        os.close(descriptor)


def may_share_with_group(folder: Path) -> bool:
    """Whether this process belongs to the folder's group, without which the setgid bit is lost."""
    return os.geteuid() == 0 or folder.stat().st_gid in {os.getegid(), *os.getgroups()}
