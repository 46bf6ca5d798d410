"""A shard in memory, in any format: maps that hold no descriptor and survive bus errors.

`mmap.mmap` keeps a descriptor open for the life of the map (until ``trackfd=False`` in Python
3.13). Most users have a limit of 1,024 descriptors, which a cache of 64 GB would reach. So this
module calls the C library. The arrays are private and writable, because torch warns about
read-only memory. Nothing ever writes to them.

The kernel sends SIGBUS to a thread that touches a page beyond the end of its file, or a page
that the disk cannot read. SIGBUS ends the process. No check before a copy prevents that,
because a file can be truncated during the copy. System calls that report EFAULT instead copy a
tenth slower than ``memcpy``, and short rows many times slower. So a signal handler maps zeros
in place of the missing pages, and marks the map as damaged. Code that copied out of a map calls
`is_map_damaged` afterwards.

SIGBUS is sent to the thread that touched the page, in the middle of a copy. No lock is held
there, so the handler may be a Python function. Other bus errors are passed to the previous
handler.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from growcache.errors import CacheError, CorruptShardError
from growcache.schema import STR, Array, Field, Sample, Schema, Value

_PAGE_BYTES = mmap.PAGESIZE
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_SA_SIGINFO = 4
# Other architectures (s390x, mips64) have another ``struct sigaction``. There a bus error ends
# the process.
_MACHINES = frozenset({"x86_64", "aarch64", "riscv64", "ppc64le", "loongarch64"})
# Offsets in ``siginfo_t`` on these architectures.
_CODE_OFFSET, _ADDRESS_OFFSET = 8, 16

_watched_maps: dict[int, int] = {}  # bytes by first address
_damaged_maps: set[int] = set()  # their first addresses


class _SignalAction(ctypes.Structure):
    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


def watch_map(address: int, size: int) -> None:
    """Let a map survive bus errors until `unwatch_map`.

    The handler is set each time, because other code may set its own, as `faulthandler.enable`
    does.
    """
    _watched_maps[address] = size
    if _bus_error_handler is not None:
        _install_handler(_bus_error_handler)


def unwatch_map(address: int) -> None:
    _watched_maps.pop(address, None)
    _damaged_maps.discard(address)


def is_map_damaged(memory: npt.NDArray[np.uint8]) -> bool:
    """Whether bytes of a map were missing when they were touched."""
    return bool(_damaged_maps) and memory.ctypes.data in _damaged_maps


def any_map_damaged() -> bool:
    return bool(_damaged_maps)


def mark_map_damaged(address: int) -> None:
    """Mark the map of an address that a system call could not read (EFAULT)."""
    _replace_with_zeros(address)


def _replace_with_zeros(address: int) -> bool:
    """Replace the rest of a map by zeros; return whether the address is in a map."""
    for first, size in tuple(_watched_maps.items()):
        if first <= address < first + size:
            _damaged_maps.add(first)  # before any thread can read the zeros
            page = address - address % _PAGE_BYTES
            return _map_zeros(page, first + size - page)
    return False


def _map_zeros(address: int, size: int) -> bool:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
    access = mmap.PROT_READ | mmap.PROT_WRITE
    return bool(_libc_signals.mmap(address, size, access, flags, -1, 0) == address)


def _on_bus_error(number: int, info: int, context: int) -> None:
    code = ctypes.c_int.from_address(info + _CODE_OFFSET).value
    address = ctypes.c_void_p.from_address(info + _ADDRESS_OFFSET).value or 0
    if code > 0 and _replace_with_zeros(address):
        return
    _restore_previous_handler()
    if code <= 0:  # a process sent it, so the kernel will not send it again
        signal.pthread_kill(threading.get_ident(), signal.SIGBUS)


def _restore_previous_handler() -> None:
    """Pass the signal to the previous handler, and the next one to the default."""
    global _previous_action
    previous, _previous_action = _previous_action, _SignalAction()
    _libc_signals.sigaction(signal.SIGBUS, ctypes.byref(previous), None)


def _install_handler(handler: int) -> None:
    global _previous_action
    found = _SignalAction()
    action = _SignalAction(handler=handler, flags=_SA_SIGINFO)
    if not _libc_signals.sigaction(signal.SIGBUS, ctypes.byref(action), ctypes.byref(found)):
        _previous_action = found if found.handler != handler else _previous_action


def _make_handler() -> int | None:
    """Return the address of the handler, or None if signals have another layout."""
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        return None
    kind = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    try:
        handler = kind(_on_bus_error)
    except (MemoryError, OSError):  # the system forbids code that is generated at run time
        return None
    # It must outlive this module, which is freed before the last thread ends.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(handler))
    return ctypes.cast(handler, ctypes.c_void_p).value


def _load_libc_signals() -> Any:
    found = ctypes.CDLL(None, use_errno=True)
    word, pointer = ctypes.c_int, ctypes.c_void_p
    found.mmap.restype = pointer
    found.mmap.argtypes = (pointer, ctypes.c_size_t, word, word, word, ctypes.c_long)
    found.sigaction.argtypes = (word, pointer, pointer)
    return found


_libc_signals = _load_libc_signals()
_previous_action = _SignalAction()
_bus_error_handler = _make_handler()


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.syscall.argtypes = (
    ctypes.c_long,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_uint,
)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_POPULATE_READ = 22  # from Linux 5.14; Python has no name for it


# Read by one call. Next to a thread that is busy in Python, each call costs a switch interval.
READ_PIECE_BYTES = 32 << 20
# Devices with this much read-ahead reach full speed by themselves.
FAR_READ_AHEAD_BYTES = 4 << 20
# The largest request to read ahead that kernels do not shorten.
REQUEST_BYTES = 128 << 10
_PROCESS_MADVISE, _MOST_RANGES = 440, 1024  # the same number on all architectures

_FAILED = ctypes.c_void_p(-1).value


class _FileMap:
    """The memory of a file's arrays, which is unmapped with the last of them."""

    def __init__(self, descriptor: int, size: int, flags: int = mmap.MAP_PRIVATE) -> None:
        self._size = size
        self._address = _libc.mmap(
            None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0
        )
        if self._address == _FAILED:
            raise CacheError(
                f"cannot map a file of {size:,} bytes: {_errno_text()}; sysctl "
                "vm.max_map_count limits the maps of a process: raise it, or use larger "
                "shards, which need fewer",
                code="GC418",
            )
        if flags & mmap.MAP_PRIVATE:  # others may truncate the file
            watch_map(self._address, size)
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (size,),
            "data": (self._address, False),
        }

    def __del__(self, unwatch: Any = unwatch_map, munmap: Any = _libc.munmap) -> None:
        if self._address != _FAILED:
            unwatch(self._address)
            munmap(self._address, self._size)


def map_file(path: Path) -> Bytes:
    """Return the bytes of a file. The last array that views them unmaps it.

    May raise CorruptShardError.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            return np.asarray(_FileMap(file.fileno(), size)) if size else np.empty(0, np.uint8)
    except (FileNotFoundError, NotADirectoryError):
        raise CorruptShardError(f"{path}: the shard is missing; run growcache check") from None


def map_shared(descriptor: int, size: int) -> Bytes:
    """Return the bytes of a file as a shared map.

    The last array unmaps it. May raise CacheError.

    Its pages are mapped at once, so that no page fault happens during a training step.
    """
    return np.asarray(_FileMap(descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE))


def read_pieces(memory: Bytes, *, asking: bool = True) -> Iterator[Bytes]:
    """Yield a mapped file in pieces, each after it is in memory. May raise CorruptShardError.

    Touching a cold map waits for each page, or for a few, which takes ten times the disk's
    time. So pieces are read in order, by one call each that releases the GIL. ``asking``
    requests the whole file first; do not set it if the kernel reads `FAR_READ_AHEAD_BYTES`
    ahead by itself.
    """
    if asking:
        _request_all(memory)
    for start in range(0, len(memory), READ_PIECE_BYTES):
        piece = memory[start : start + READ_PIECE_BYTES]
        _populate(piece)
        yield piece


def _request_all(memory: Bytes) -> None:
    """Ask the kernel to read a whole map, in requests that it does not shorten.

    Kernels before Linux 5.10 cannot be asked, and read the touched pages.
    """
    starts = np.arange(0, len(memory), REQUEST_BYTES, dtype=np.uint64)
    ranges = np.empty((len(starts), 2), np.uint64)  # address and length, as in ``iovec``
    ranges[:, 0] = starts + np.uint64(memory.ctypes.data)
    ranges[:, 1] = np.minimum(np.uint64(len(memory)) - starts, np.uint64(REQUEST_BYTES))
    with suppress(OSError):  # the call does not exist
        process = os.pidfd_open(os.getpid())
        try:
            for first in range(0, len(ranges), _MOST_RANGES):
                some = ranges[first : first + _MOST_RANGES]
                advice = (some.ctypes.data, len(some), mmap.MADV_WILLNEED, 0)
                _libc.syscall(_PROCESS_MADVISE, process, *advice)
        finally:
            os.close(process)


def _populate(piece: Bytes) -> None:
    try:
        _advise(piece, _POPULATE_READ)
    except OSError as error:
        if error.errno == errno.EFAULT:
            raise CorruptShardError(
                f"{len(piece):,} bytes of a shard cannot be read from the disk; run growcache check"
            ) from None
        if error.errno != errno.EINVAL:
            raise
        piece[::_PAGE_BYTES].max()  # for older kernels: touch every page, without the GIL


def is_in_page_cache(memory: Bytes) -> bool:
    """Whether a file is in the page cache. For another user's read-only file always True."""
    if not len(memory):
        return True
    pages: Bytes = np.empty(-(-len(memory) // _PAGE_BYTES), np.uint8)
    if _libc.mincore(memory.ctypes.data, len(memory), pages.ctypes.data):
        raise OSError(ctypes.get_errno(), _errno_text())
    return bool((pages & 1).all())


def drop_pages(memory: Bytes) -> None:
    """Unmap the pages of a map. The map stays, and the page cache may keep the pages."""
    _advise(memory, mmap.MADV_DONTNEED)


def drop_from_page_cache(path: Path) -> None:
    """Advise the kernel to drop a file from the page cache. The file may be missing."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def read_ahead_bytes(path: Path) -> int:
    """Return the kernel's read-ahead for the file's device, or 0 if unknown."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for where in (
        f"class/bdi/{number}",
        f"dev/block/{number}/bdi",
        f"dev/block/{number}/../bdi",
    ):
        with suppress(OSError, ValueError):
            return 1024 * int(Path("/sys", where, "read_ahead_kb").read_text(encoding="ascii"))
    return 0


def _advise(memory: Bytes, advice: int) -> None:
    if len(memory) and _libc.madvise(memory.ctypes.data, len(memory), advice):
        raise OSError(ctypes.get_errno(), _errno_text())


def _errno_text() -> str:
    return os.strerror(ctypes.get_errno())


Bytes: TypeAlias = npt.NDArray[np.uint8]
Integers: TypeAlias = npt.NDArray[np.int64]
Buffer: TypeAlias = bytes | Bytes


@dataclass(frozen=True, slots=True)
class RaggedColumn:
    memory: Bytes  # uint8 [k], the map of the values, or a part of it
    starts: Integers  # int64 [samples], the first byte of each value in memory
    lengths: Integers  # int64 [samples], in bytes
    dims: Integers  # int64 [samples, k], the sizes of the ragged dimensions


class FileEnd(NamedTuple):
    """The last byte of a file, which shows whether the file was truncated later.

    The rest of a file's last page reads as zeros without an error. So this is the last byte of
    that page that is not zero. Zeros after it do not change.
    """

    address: int
    value: int

    @classmethod
    def of(cls, memory: Bytes) -> FileEnd:
        first = (len(memory) - 1) // mmap.PAGESIZE * mmap.PAGESIZE
        filled = np.flatnonzero(memory[first:])
        place = first + int(filled[-1]) if len(filled) else len(memory) - 1
        return cls(memory.ctypes.data + place, int(memory[place]))

    def holds(self) -> bool:
        """Whether the byte still has its value. The map must exist."""
        return ctypes.c_uint8.from_address(self.address).value == self.value


class MappedShard:
    """The files of a shard in memory.

    ``fields`` are strided views of a map, uint8 [samples, nbytes]. ``ragged`` has all other
    fields.
    """

    def __init__(
        self,
        schema: Schema,
        samples: int,
        memories: Sequence[Buffer],
        fields: Mapping[str, Bytes],
        ragged: Mapping[str, RaggedColumn],
    ) -> None:
        self.schema = schema
        self.nbytes = sum(map(len, memories))
        self.fields = dict(fields)
        self.ragged = dict(ragged)
        self._samples = samples
        self.memories = tuple(memories)
        self.sentinels: tuple[FileEnd, ...] = ()

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, i: int) -> Sample:
        """Return a sample whose arrays are copies.

        May raise IndexError or CorruptShardError.
        """
        i = range(len(self))[i]
        sample = {field.name: self._value(field, i) for field in self.schema.fields}
        self.refuse_damaged()
        return sample

    def _value(self, field: Field, i: int) -> Value:
        rows = self.fields.get(field.name)
        if rows is not None:
            array: Array = rows[i].copy().view(field.item_dtype)
            return array.reshape(field.fixed_shape)
        column = self.ragged[field.name]
        start = int(column.starts[i])
        raw = column.memory[start : start + int(column.lengths[i])]
        if field.is_blob:
            return _decoded_text(raw.tobytes()) if field.dtype == STR else raw.tobytes()
        return (
            raw.copy().view(field.item_dtype).reshape(field.shape_of(column.dims[i].tolist()))
        )

    def __iter__(self) -> Iterator[Sample]:
        return map(self.__getitem__, range(len(self)))

    def digest(self, *, asking: bool = True) -> str:
        """Return the xxh3_128 of the files without holding the GIL, which also reads them into memory."""
        digest = xxhash.xxh3_128()
        for memory in self.memories:
            if isinstance(memory, bytes):
                digest.update(memory)
                continue
            for piece in read_pieces(memory, asking=asking):
                digest.update(piece.data)
        return digest.hexdigest()

    def bring(self, *, asking: bool = True) -> None:
        """Read the files into memory in order.

        ``asking`` is as for `read_pieces`. May raise CorruptShardError.
        """
        for memory in self.memories:
            if isinstance(memory, np.ndarray):
                for _ in read_pieces(memory, asking=asking):
                    pass

    @property
    def in_memory(self) -> bool:
        return all(isinstance(m, bytes) or is_in_page_cache(m) for m in self.memories)

    def remember_ends(self) -> None:
        """Remember the ends of the files for `damaged`.

        Call it while they are known to be whole.
        """
        self.sentinels = tuple(map(FileEnd.of, filter(len, self._maps())))

    @property
    def damaged(self) -> bool:
        """Whether a file was truncated or unreadable since it was mapped.

        Bytes that were copied out of the maps before may then be zeros.
        """
        # Touching them may reveal it, too.
        ends = [sentinel.holds() for sentinel in self.sentinels]
        return not all(ends) or any(map(is_map_damaged, self._maps()))

    def _maps(self) -> list[Bytes]:
        return [memory for memory in self.memories if isinstance(memory, np.ndarray)]

    def refuse_damaged(self) -> None:
        if self.damaged:
            raise CorruptShardError(
                "a mapped shard cannot be read, because its file was cut short or the disk "
                "fails; run growcache check"
            )

    def let_go(self) -> None:
        """Unmap the pages of the files. Touching them reads them again."""
        for memory in self.memories:
            if isinstance(memory, np.ndarray):
                drop_pages(memory)

    def close(self) -> None:
        """Release the files. Each is unmapped with the last array that views it."""
        self.memories = self.sentinels = ()
        self._samples = 0
        self.fields, self.ragged = {}, {}


def empty_shard(schema: Schema) -> MappedShard:
    nothing = np.empty(0, np.uint8)
    none = np.empty(0, np.int64)
    fields, ragged = {}, {}
    for field in schema.fields:
        if field.is_ragged:
            dims = np.empty((0, len(field.ragged_dims)), np.int64)
            ragged[field.name] = RaggedColumn(nothing, none, none, dims)
        else:
            fields[field.name] = np.empty((0, field.nbytes), np.uint8)
    return MappedShard(schema, 0, [], fields, ragged)


def _decoded_text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CorruptShardError(
            f"a string is not valid UTF-8 ({error}); run growcache check"
        ) from None
