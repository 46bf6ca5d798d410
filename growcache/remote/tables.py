"""A table in memory: rows that are found by their key, in few bytes each.

A million rows of a number and two short texts take about 50 MB: keys are 64 bits of them, sorted,
numbers are arrays, texts lie in one another's wake.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import orjson

from growcache.errors import FormatError
from growcache.seeding import Words, hash64

Ints: TypeAlias = npt.NDArray[np.int64]
Cell: TypeAlias = int | float | str

NONE = -1  # the row of a key that no row has
EXAMPLES = 3  # keys that are kept as they are, for messages
_AT_ONCE = 1 << 16  # texts that are objects of their own for a moment

# Of the cells of a column: all that it takes to say what the column is.
_INTEGER, _NUMBER, _TEXT, _MISSING = 1, 2, 4, 8
_INTEGERS = re.compile(r"-?(0|[1-9][0-9]{0,17})")  # 007 is a name; 19 digits may be too many
_NUMBERS = re.compile(
    r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[+-]?inf", re.IGNORECASE
)
_NAMED_0 = re.compile(r"[+-]?0[0-9]+")
_NOTHING = re.compile(r"|nan|n/?a", re.IGNORECASE)  # as pandas, R and BIDS leave cells empty


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts, one behind the other.

    Attributes:
        data: all of them, UTF-8.
        ends: where each ends; int64.
    """

    data: bytes
    ends: Ints

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, i: int) -> str:
        return self.data[self.ends[i - 1] if i else 0 : self.ends[i]].decode()

    def __iter__(self) -> Iterator[str]:
        start = 0
        for end in self.ends.tolist():
            yield self.data[start:end].decode()
            start = end

    def taken(self, rows: Ints) -> Texts:
        """Return the texts of these rows, in their order."""
        starts = np.concatenate([np.zeros(1, np.int64), self.ends[:-1]])
        data = bytearray()
        for at in range(0, len(rows), _AT_ONCE):
            some = rows[at : at + _AT_ONCE]
            places = zip(starts[some].tolist(), self.ends[some].tolist(), strict=True)
            data += b"".join([self.data[start:end] for start, end in places])
        return Texts(bytes(data), np.cumsum((self.ends - starts)[rows], dtype=np.int64))


Column: TypeAlias = Texts | Ints | npt.NDArray[np.float64]


class Growing:
    """A column whose cells are still coming; all of them say what it is."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._lengths = array("q")
        self._kinds = 0

    def __len__(self) -> int:
        return len(self._lengths)

    def add_texts(self, cells: Sequence[str]) -> None:
        """Add cells of a file that knows texts only: some of them look like numbers."""
        for cell in set(cells):
            self._kinds |= _kind_of_text(cell)
        self._add(cells)

    def add_values(self, cells: Sequence[object]) -> None:
        """Add cells of a file that tells numbers from texts.

        Raises:
            FormatError: one is neither, nor nothing.
        """
        texts = []
        for cell in cells:
            kind, text = _of_value(cell)
            self._kinds |= kind
            texts.append(text)
        self._add(texts)

    def _add(self, texts: Sequence[str]) -> None:
        encoded = [text.encode() for text in texts]
        self._data += b"".join(encoded)
        self._lengths.extend(map(len, encoded))

    @property
    def texts(self) -> Texts:
        """The cells as texts."""
        lengths = np.frombuffer(self._lengths, np.int64) if self._lengths else np.zeros(0, int)
        return Texts(bytes(self._data), np.cumsum(lengths, dtype=np.int64))

    def column(self, rows: Ints) -> Column:
        """Return the cells of these rows: integers, else numbers, else texts."""
        texts = self.texts
        if self._kinds & _TEXT or not self._kinds & (_INTEGER | _NUMBER):
            return texts.taken(rows)
        if self._kinds == _INTEGER:
            return np.fromiter(map(int, texts), np.int64, len(texts))[rows]
        numbers = map(_number, texts)
        return np.fromiter(numbers, np.float64, len(texts))[rows]


def _kind_of_text(cell: str) -> int:
    if _INTEGERS.fullmatch(cell):
        return _INTEGER
    if _NOTHING.fullmatch(cell):
        return _MISSING
    if _NUMBERS.fullmatch(cell) and not _NAMED_0.fullmatch(cell):
        return _NUMBER
    return _TEXT


def _of_value(cell: object) -> tuple[int, str]:
    if isinstance(cell, str):
        return _TEXT, cell
    if isinstance(cell, int):
        fits = -(1 << 63) <= cell < 1 << 63
        return _INTEGER if fits else _TEXT, str(int(cell))  # True is 1
    if isinstance(cell, float):
        return _NUMBER, repr(cell)
    if cell is None:
        return _MISSING, ""
    raise FormatError(f"expected numbers and texts, found {type(cell).__name__}: {cell!r:.60}")


def _number(text: str) -> float:
    return np.nan if _NOTHING.fullmatch(text) else float(text)


class Table:
    """Columns by name, and which row a key has.

    Args:
        keys: of the rows, as texts.
        columns: the others.

    Raises:
        FormatError: two rows have one key, or there is none.
    """

    def __init__(self, keys: Growing, columns: Mapping[str, Growing]) -> None:
        texts = keys.texts
        if not len(texts):
            raise FormatError("it has no rows")
        hashes = np.fromiter(map(hash64, texts), np.uint64, len(texts))
        rows = np.argsort(hashes, kind="stable")
        self._hashes: Words = hashes[rows]
        twice = np.flatnonzero(self._hashes[1:] == self._hashes[:-1])
        if len(twice):
            first = np.min(rows[twice])
            raise FormatError(f"two rows have the key {texts[int(first)]!r}")
        self._columns = {name: column.column(rows) for name, column in columns.items()}
        self.examples = [texts[i] for i in range(min(EXAMPLES, len(texts)))]

    def __len__(self) -> int:
        return len(self._hashes)

    def find(self, keys: Sequence[str]) -> Ints:
        """Return the row of each key, `NONE` where it has none."""
        hashes = np.fromiter(map(hash64, keys), np.uint64, len(keys))
        rows = np.searchsorted(self._hashes, hashes)
        found = self._hashes[np.minimum(rows, len(self) - 1)] == hashes
        return np.where(found, rows, NONE)

    def column(self, name: str) -> Column:
        """Return a column, by row."""
        return self._columns[name]

    def cell(self, name: str, row: int) -> Cell:
        """Return one cell, as a value of Python."""
        column = self._columns[name]
        cell: Cell = column[row] if isinstance(column, Texts) else column[row].item()
        return cell

    @property
    def digest(self) -> str:
        """128 bits, in hex, that stand for keys and cells; not for the order of the rows."""
        hasher = hashlib.blake2b(self._hashes.tobytes(), digest_size=16)
        for name, column in self._columns.items():
            kind = "str" if isinstance(column, Texts) else column.dtype.str
            hasher.update(orjson.dumps([name, kind]))
            for part in _arrays(column):
                hasher.update(part.tobytes())
        return hasher.hexdigest()

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        columns = [part for column in self._columns.values() for part in _arrays(column)]
        return sum(part.nbytes for part in [self._hashes, *columns])


def _arrays(column: Column) -> list[npt.NDArray[Any]]:
    if isinstance(column, Texts):
        return [column.ends, np.frombuffer(column.data, np.uint8)]
    return [column]
