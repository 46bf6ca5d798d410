"""Files that are overwritten in place as soon as somebody opens them, while they are read."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

_IN_OPEN = 0x20
_EVENT = struct.Struct("iIII")
_PIECE = 1 << 16
_LIBC = ctypes.CDLL(None, use_errno=True)


def _watch(paths: list[Path]) -> tuple[int, dict[int, Path]]:
    descriptor = _LIBC.inotify_init1(os.O_CLOEXEC)
    assert descriptor >= 0, os.strerror(ctypes.get_errno())
    watched = {
        _LIBC.inotify_add_watch(descriptor, os.fsencode(path), _IN_OPEN): path for path in paths
    }
    return descriptor, watched


def _overwrite(file: int, data: bytes) -> None:
    """Overwrite from the end, so that a concurrent reader gets the old beginning with the new end."""
    for at in range((len(data) - 1) // _PIECE * _PIECE, -1, -_PIECE):
        os.pwrite(file, data[at : at + _PIECE], at)


@contextlib.contextmanager
def overwritten_when_opened(contents: Mapping[Path, bytes]) -> Iterator[list[Path]]:
    """Overwrite each file once, when it is opened for the first time.

    Yields:
        The files that were overwritten so far.
    """
    files = {path: os.open(path, os.O_WRONLY) for path in contents}
    descriptor, watched = _watch([*contents])
    done: list[Path] = []

    def work() -> None:
        while len(done) < len(contents):
            found = os.read(descriptor, 4096)
            for at in range(0, len(found), _EVENT.size):
                path = watched.get(_EVENT.unpack_from(found, at)[0])
                if path is None:
                    return
                if path not in done:
                    _overwrite(files[path], contents[path])
                    done.append(path)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield done
    finally:
        for path in contents:  # whoever waits for the first opening has it now
            path.read_bytes()[:1]
        thread.join(300)
        for file in files.values():
            os.close(file)
        os.close(descriptor)
