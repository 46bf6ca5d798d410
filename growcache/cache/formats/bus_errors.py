"""A map survives that its file is cut short: the bus error is caught, and the map is marked.

The kernel sends SIGBUS to whoever touches a page of a map that its file does not reach any more, or
that the disk cannot read, and SIGBUS ends the process. No check before a copy prevents that,
because a file can be cut short while the copy runs. The system calls that report EFAULT instead
copy a tenth slower than ``memcpy``, and short rows many times slower. So a handler puts a page of
zeros in the place of the missing one, and marks the map as damaged. Whoever copied out of a map asks
`is_damaged` afterwards, and delivers nothing of it. This costs nothing where no file is damaged.

SIGBUS is sent to the thread that touched the page, in the middle of a copy: no lock is held
there, so the handler may be a function of Python. A bus error elsewhere is handed on to the
handler that was there before.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import signal
import sys
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

_PAGE = mmap.PAGESIZE
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_SA_SIGINFO = 4
# Others (s390x, mips64) have another ``struct sigaction``: there a bus error ends the process.
_MACHINES = frozenset({"x86_64", "aarch64", "riscv64", "ppc64le", "loongarch64"})
# Where ``siginfo_t`` has them on these.
_CODE_OFFSET, _ADDRESS_OFFSET = 8, 16

_maps: dict[int, int] = {}  # bytes by first address
_damaged: set[int] = set()  # their first addresses


class _Action(ctypes.Structure):
    """The C libraries' ``struct sigaction`` on these machines."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


def watch(address: int, size: int) -> None:
    """Have a map survive bus errors, until `unwatch`.

    The handler is set each time, because others set theirs: `faulthandler.enable` does.
    """
    _maps[address] = size
    if _handler is not None:
        _install(_handler)


def unwatch(address: int) -> None:
    """Forget a map that is about to be unmapped."""
    _maps.pop(address, None)
    _damaged.discard(address)


def is_damaged(memory: npt.NDArray[np.uint8]) -> bool:
    """Return whether bytes of a map were missing when they were touched.

    Args:
        memory: the whole map.
    """
    return bool(_damaged) and memory.ctypes.data in _damaged


def any_damaged() -> bool:
    """Return whether any map is damaged, in no time."""
    return bool(_damaged)


def mark_damaged(address: int) -> None:
    """Mark the map of an address that a system call could not read (EFAULT)."""
    _replace(address)


def _replace(address: int) -> bool:
    """Put zeros in the place of a map's rest; return whether the address is in a map."""
    for first, size in tuple(_maps.items()):
        if first <= address < first + size:
            _damaged.add(first)  # before anybody can read the zeros
            page = address - address % _PAGE
            return _put_zeros(page, first + size - page)
    return False


def _put_zeros(address: int, size: int) -> bool:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
    access = mmap.PROT_READ | mmap.PROT_WRITE
    return bool(_libc.mmap(address, size, access, flags, -1, 0) == address)


def _on_bus_error(number: int, info: int, context: int) -> None:
    code = ctypes.c_int.from_address(info + _CODE_OFFSET).value
    address = ctypes.c_void_p.from_address(info + _ADDRESS_OFFSET).value or 0
    if code > 0 and _replace(address):
        return
    _hand_on()
    if code <= 0:  # a process sent it, so nothing sends it again
        signal.pthread_kill(threading.get_ident(), signal.SIGBUS)


def _hand_on() -> None:
    """Let the handler that was there before have the signal, and the default one the next."""
    global _previous
    previous, _previous = _previous, _Action()
    _libc.sigaction(signal.SIGBUS, ctypes.byref(previous), None)


def _install(handler: int) -> None:
    global _previous
    found = _Action()
    action = _Action(handler=handler, flags=_SA_SIGINFO)
    if not _libc.sigaction(signal.SIGBUS, ctypes.byref(action), ctypes.byref(found)):
        _previous = found if found.handler != handler else _previous


def _made() -> int | None:
    """Return the address of the handler; None where signals are of another layout."""
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        return None
    kind = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    try:
        handler = kind(_on_bus_error)
    except (MemoryError, OSError):  # a system that forbids code that is made while it runs
        return None
    # It must outlive this module, which goes before the last thread does.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(handler))
    return ctypes.cast(handler, ctypes.c_void_p).value


def _library() -> Any:
    found = ctypes.CDLL(None, use_errno=True)
    word, pointer = ctypes.c_int, ctypes.c_void_p
    found.mmap.restype = pointer
    found.mmap.argtypes = (pointer, ctypes.c_size_t, word, word, word, ctypes.c_long)
    found.sigaction.argtypes = (word, pointer, pointer)
    return found


_libc = _library()
_previous = _Action()
_handler = _made()
