"""What a front door lends to the loader: its framework's fastest copies, and its batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]
Integers: TypeAlias = npt.NDArray[np.int64]
Booleans: TypeAlias = npt.NDArray[np.bool_]

# take(source, rows, out): out[i] = source[rows[i]]; uint8 [samples, nbytes] with any row
# stride, int64 [n], uint8 [n, nbytes] contiguous. Rows are within bounds.
Take: TypeAlias = Callable[[Bytes, Integers, Bytes], None]

# join(parts, out): the parts, uint8 [k_i] each, one behind the other; there is at least one.
Join: TypeAlias = Callable[[Sequence[Bytes], Bytes], object]

# From here on a row takes longer to copy than Python takes to name it.
LONG_ROW_BYTES = 16 * 1024


def take_rows(source: Bytes, rows: Integers, out: Bytes) -> None:
    """Copy ``source[rows]`` into ``out``, in few operations: the `Take` of NumPy alone.

    `numpy.take` copies straight into ``out``, but of a strided source it first makes a
    contiguous copy, all of it. There short rows are copied twice, as items of their
    length, and long ones as parts that are joined.

    Args:
        source: uint8 [samples, nbytes], with any distance between rows.
        rows: int64 [n].
        out: uint8 [n, nbytes], contiguous.

    Raises:
        IndexError: a row that is not there.
    """
    samples, nbytes = source.shape
    if len(rows) and not 0 <= rows.min() <= rows.max() < samples:
        raise IndexError(f"rows {rows.min()} to {rows.max()} of {samples}")
    if not out.size:
        return
    if source.flags.c_contiguous:
        np.take(source, rows, axis=0, out=out, mode="clip")  # "raise" would buffer ``out``
    elif nbytes >= LONG_ROW_BYTES:
        join_parts([source[row] for row in rows.tolist()], out.reshape(-1))
    else:
        item = f"V{nbytes}"
        out.view(item)[:, 0] = source.view(item)[:, 0][rows]


def join_parts(parts: Sequence[Bytes], out: Bytes) -> None:
    """Copy the parts one behind the other: the `Join` of NumPy alone."""
    np.concatenate(parts, out=out)


def _as_it_is(name: str, array: Any) -> Any:
    return array


def _nobody() -> tuple[int, int] | None:
    return None


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework as far as the loader knows it; NumPy's by default.

    Attributes:
        take: copies rows of one length.
        join: copies parts of different lengths.
        deliver: ``deliver(field, array)``: what a batch holds instead of an array.
        prepare: called first in the thread that copies.
        ranks: (rank, world size) of this process as the framework has it; None: it has none.
    """

    take: Take = take_rows
    join: Join = join_parts
    deliver: Callable[[str, Any], Any] = _as_it_is
    prepare: Callable[[], None] | None = None
    ranks: Callable[[], tuple[int, int] | None] = _nobody


NUMPY = Framework()
