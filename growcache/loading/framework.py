"""What a front door lends to the loader: its framework's fastest copies, and its batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from growcache.loading.buffers import Allocate, BufferPool, allocate_here
from growcache.loading.leftovers import Leftovers
from growcache.loading.vectored import copy_rows
from growcache.schema import Array

Bytes: TypeAlias = npt.NDArray[np.uint8]
Integers: TypeAlias = npt.NDArray[np.int64]
Booleans: TypeAlias = npt.NDArray[np.bool_]

# take(memory, starts, out): out[i] = memory[starts[i] : starts[i] + nbytes]; uint8 [k], of which
# nothing else may be touched, int64 [n], uint8 [n, nbytes] contiguous and not empty.
Take: TypeAlias = Callable[[Bytes, Integers, Bytes], None]

# take_slices(memory, starts, lengths, out): the same of rows that differ in length, int64 [n], at
# least one; one lies behind the other in out, uint8 [all lengths], not empty.
TakeSlices: TypeAlias = Callable[[Bytes, Integers, Integers, Bytes], object]

# join(parts, out): the parts, uint8 [k_i] each, one behind the other; there is at least one.
Join: TypeAlias = Callable[[Sequence[Bytes], Bytes], object]

# From here on a row takes longer to copy than Python, or the system, takes to be told of it.
LONG_ROW_BYTES = 16 * 1024

# Of rows that are gathered at once. To begin a block costs the thread that copies, and the loop
# that receives it, some tenths of a millisecond each, for the copies before have left nothing
# of theirs in the CPU's caches.
BLOCK_BYTES = 72_000_000


def take_rows(memory: Bytes, starts: Integers, out: Bytes) -> None:
    """Copy rows that begin anywhere into ``out``, in few operations: the `Take` of NumPy alone.

    `numpy.take` would copy once, but only out of rows without gaps and in one array. So short
    rows are copied twice, as items of their length, and long ones by the system.
    To do it in pieces that the CPU's cache holds would be a sixth faster, but would let go of
    the GIL for each of them, and wait to have it back beside a busy loop.

    Args:
        memory: uint8 [k]; only the rows are touched.
        starts: int64 [n], where they begin.
        out: uint8 [n, nbytes], contiguous and not empty.

    Raises:
        IndexError: a row that is not within the memory.
    """
    nbytes = out.shape[1]
    if nbytes >= LONG_ROW_BYTES:
        take_slices(memory, starts, np.full(len(starts), nbytes), out.reshape(-1))
        return
    if starts.min() < 0 or starts.max() > len(memory) - nbytes:
        raise IndexError(f"rows at {starts.min()} to {starts.max()} of {len(memory)} bytes")
    item = f"V{nbytes}"
    rows: Array = np.ndarray((len(memory) - nbytes + 1,), item, memory, 0, (1,))
    out.view(item)[:, 0] = rows[starts]


def take_slices(memory: Bytes, starts: Integers, lengths: Integers, out: Bytes) -> None:
    """Copy rows of different lengths: the `TakeSlices` of NumPy alone.

    Raises:
        IndexError: a row that is not within the memory.
    """
    long = len(out) >= LONG_ROW_BYTES * len(lengths)
    if long and copy_rows(memory, starts, lengths, out):
        return
    np.concatenate(slices(memory, starts, lengths), out=out)


def slices(memory: Bytes, starts: Integers, lengths: Integers) -> list[Bytes]:
    """Return the rows where they are.

    Raises:
        IndexError: a row that is not within the memory.
    """
    stops = starts + lengths
    if starts.min() < 0 or stops.max() > len(memory):
        raise IndexError(f"rows from {starts.min()} to {stops.max()} of {len(memory)} bytes")
    pairs = zip(starts.tolist(), stops.tolist(), strict=True)
    return [memory[start:stop] for start, stop in pairs]


def join_parts(parts: Sequence[Bytes], out: Bytes) -> None:
    """Copy the parts one behind the other: the `Join` of NumPy alone."""
    np.concatenate(parts, out=out)


def _as_it_is(name: str, array: Any) -> Any:
    return array


def _nobody() -> tuple[int, int] | None:
    return None


class Carrier(Protocol):
    """Brings batches to another memory than that of the process, beside the loop."""

    def begin(self) -> None:
        """Get ready for an epoch; called by the loop's thread."""

    def enter(self) -> None:
        """Get the calling thread ready, which makes batches; more than once is harmless.

        What it computes on a device from now on is done before the next batch is there.
        """

    def lock(self, buffer: Bytes) -> None:
        """Make memory that batches come to again and again one that they are quickly sent from."""

    def allocate(self, nbytes: int, kept: list[Bytes] | None) -> Bytes:
        """Return memory for batches: an `Allocate`."""

    def send(self, batch: Any, origin: object = None) -> Any:
        """Begin to bring a batch there; called by threads that make batches.

        What the batch refers to stays as it is until it has arrived, and so does what the
        origin refers to, which it was made of: the user's function may have begun copies.
        """

    def receive(self, sent: Any) -> Any:
        """Return the batch there, for the thread that calls; that is the loop's."""


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework as far as the loader knows it; NumPy's by default.

    Attributes:
        take: copies rows of one length.
        take_slices: copies rows of different lengths.
        join: copies what lies in several arrays.
        deliver: ``deliver(field, array)``: what a batch holds instead of an array.
        prepare: called first in the thread that copies.
        ranks: (rank, world size) of this process as the framework has it; None: it has none.
        allocate: makes the memory of batches.
        leftovers: what such memory is taken from first, and left in; None: it goes.
        carrier: brings batches to where they are wanted; None: they stay in memory.
        block_bytes: about how much is gathered at once, if batches are not larger.
        at_once: how many batches it is handed in one piece, which it cuts itself.
        frees_lock: whether its copies of long rows let go of the GIL, and so may be shared by
            threads; each calls ``prepare`` first.
    """

    take: Take = take_rows
    take_slices: TakeSlices = take_slices
    join: Join = join_parts
    deliver: Callable[[str, Any], Any] = _as_it_is
    prepare: Callable[[], None] | None = None
    ranks: Callable[[], tuple[int, int] | None] = _nobody
    allocate: Allocate = allocate_here
    leftovers: Leftovers | None = None
    carrier: Carrier | None = None
    block_bytes: int = BLOCK_BYTES
    at_once: int = 1
    frees_lock: bool = False

    def pool(self, name: str, nbytes: int = 0) -> BufferPool:
        """Return a pool of buffers for what has that name.

        Args:
            name: tells it from the other pools of a loader.
            nbytes: as for `BufferPool`.
        """
        bases = () if self.leftovers is None else self.leftovers.take(name)
        return BufferPool(nbytes, allocate=self.allocate, bases=bases)

    def leave(self, name: str, pool: BufferPool) -> None:
        """Leave the buffers of a pool of that name, which is not wanted any more."""
        if self.leftovers is not None:
            self.leftovers.leave(name, pool.leave())


NUMPY = Framework(frees_lock=True)
