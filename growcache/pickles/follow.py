"""From the first instruction of a pickle to its end."""

from __future__ import annotations

import struct

from growcache.errors import FormatError
from growcache.pickles.machine import Machine
from growcache.pickles.steps import STEPS

_STOP = ord(".")
_DAMAGED = (
    AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError, struct.error,
)  # fmt: skip
_OTHERS = (
    (b"\x1f\x8b", "compressed by gzip: decompress it first"),
    (b"\x28\xb5\x2f\xfd", "compressed by Zstandard: decompress it first"),
    (b"\x04\x22\x4d\x18", "compressed by LZ4: decompress it first"),
    (b"PK\x03\x04", "that is a zip archive, as torch.save and numpy.savez write them"),
    (b"\x93NUMPY", "that is an .npy file: use numpy.load"),
)


def follow(data: bytes) -> object:
    """Return what the pickle describes; without recursion, however deep that is.

    Raises:
        FormatError: it is refused, or damaged.
    """
    machine, steps = Machine(data), STEPS
    try:
        while (code := data[machine.at]) != _STOP:
            machine.at += 1
            steps[code](machine)
        found = machine.stack.pop()
    except FormatError:
        raise
    except _DAMAGED as error:
        raise _damaged(machine, error) from None
    if machine.unfinished:
        raise FormatError("a pickle holds an array or dtype without its values; refused")
    return found


def _damaged(machine: Machine, error: Exception) -> FormatError:
    data = machine.data
    seen = next((what for magic, what in _OTHERS if data.startswith(magic)), None)
    if seen:
        return FormatError(f"expected a pickle, found something {seen}")
    why = "it ends too early" if machine.at >= len(data) else type(error).__name__
    return FormatError(
        f"expected a pickle, found one that is damaged at byte {machine.at} of {len(data)} "
        f"({why}), or something else; it starts with {data[:12]!r}"
    )
