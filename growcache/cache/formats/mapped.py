"""A shard in memory, whatever its format: where every value lies in which map."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from growcache.cache.formats import bus_errors
from growcache.cache.formats.mapping import bring, in_memory, let_go
from growcache.errors import CorruptShardError
from growcache.schema import STR, Array, Field, Sample, Schema, Value

Bytes: TypeAlias = npt.NDArray[np.uint8]
Integers: TypeAlias = npt.NDArray[np.int64]
Buffer: TypeAlias = bytes | Bytes


@dataclass(frozen=True, slots=True)
class RaggedColumn:
    """The values of one field, each of its own size.

    Attributes:
        memory: uint8 [k], the map that they lie in, or a part of it.
        starts: int64 [samples], the first byte of each value in ``memory``.
        lengths: int64 [samples], in bytes.
        dims: int64 [samples, k], the sizes of the field's ragged dimensions.
    """

    memory: Bytes
    starts: Integers
    lengths: Integers
    dims: Integers


class Sentinel(NamedTuple):
    """The last byte of a file that tells whether the file was cut short since.

    Where a file ends in the middle of a page, the rest of the page reads as zeros, and no error tells
    of it. So this is the last byte of the last page that is not zero: zeros behind it stay
    what they are.

    Attributes:
        address: of the byte.
        value: that it has.
    """

    address: int
    value: int

    @classmethod
    def of(cls, memory: Bytes) -> Sentinel:
        """Return that of a whole file, which is not empty."""
        first = (len(memory) - 1) // mmap.PAGESIZE * mmap.PAGESIZE
        filled = np.flatnonzero(memory[first:])
        place = first + int(filled[-1]) if len(filled) else len(memory) - 1
        return cls(memory.ctypes.data + place, int(memory[place]))

    def holds(self) -> bool:
        """Return whether the byte has the value still; its map must be there."""
        return ctypes.c_uint8.from_address(self.address).value == self.value


class MappedShard:
    """The files of a shard in memory.

    Args:
        schema: of its samples.
        samples: how many.
        memories: its files, in their order.
        fields: the columns of equal rows.
        ragged: all other columns.

    Attributes:
        schema: of its samples.
        nbytes: bytes of all its files.
        fields: per name uint8 [samples, nbytes], strided views of a map.
        ragged: per name the values of every other field.
        memories: the files.
        sentinels: of the files, once `remember_ends` was called.
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
        self.sentinels: tuple[Sentinel, ...] = ()

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, i: int) -> Sample:
        """Return sample ``i`` as arrays, bytes and strings of its own.

        Raises:
            IndexError: there is none of that number, or the shard is closed.
            CorruptShardError: a file was cut short since it was mapped.
        """
        i = range(len(self))[i]
        sample = {field.name: self._value(field, i) for field in self.schema.fields}
        self.refuse_damaged()
        return sample

    def _value(self, field: Field, i: int) -> Value:
        rows = self.fields.get(field.name)
        if rows is not None:
            array: Array = rows[i].copy().view(field.item)
            return array.reshape(field.fixed_shape)
        column = self.ragged[field.name]
        start = int(column.starts[i])
        raw = column.memory[start : start + int(column.lengths[i])]
        if field.is_blob:
            return _text(raw.tobytes()) if field.dtype == STR else raw.tobytes()
        return raw.copy().view(field.item).reshape(field.shape_of(column.dims[i].tolist()))

    def __iter__(self) -> Iterator[Sample]:
        return map(self.__getitem__, range(len(self)))

    def digest(self, *, asking: bool = True) -> str:
        """Return the xxh3_128 of the files, without holding the GIL; this also brings them.

        Args:
            asking: as for `bring`.
        """
        digest = xxhash.xxh3_128()
        for memory in self.memories:
            if isinstance(memory, bytes):
                digest.update(memory)
                continue
            for piece in bring(memory, asking=asking):
                digest.update(piece.data)
        return digest.hexdigest()

    def bring(self, *, asking: bool = True) -> None:
        """Read the files into memory, in order.

        Args:
            asking: for what comes next before a piece is waited for (see `mapping.bring`).

        Raises:
            CorruptShardError: the disk cannot.
        """
        for memory in self.memories:
            if isinstance(memory, np.ndarray):
                for _ in bring(memory, asking=asking):
                    pass

    @property
    def in_memory(self) -> bool:
        """Whether touching the files needs no disk, so far as this user may know."""
        return all(isinstance(m, bytes) or in_memory(m) for m in self.memories)

    def remember_ends(self) -> None:
        """Remember how the files end, for `damaged`; the caller knows that they are whole."""
        self.sentinels = tuple(map(Sentinel.of, filter(len, self._maps())))

    @property
    def damaged(self) -> bool:
        """Whether a file was cut short, or could not be read, since it was mapped.

        What was copied out of the maps before this was asked may be zeros then.
        """
        ends = [sentinel.holds() for sentinel in self.sentinels]  # to touch them may tell, too
        return not all(ends) or any(map(bus_errors.is_damaged, self._maps()))

    def _maps(self) -> list[Bytes]:
        return [memory for memory in self.memories if isinstance(memory, np.ndarray)]

    def refuse_damaged(self) -> None:
        """Do nothing, unless the shard is `damaged`.

        Raises:
            CorruptShardError: it is.
        """
        if self.damaged:
            raise CorruptShardError(
                "a shard cannot be read where it is mapped: its file was cut short, or the disk "
                "fails; run growcache check"
            )

    def let_go(self) -> None:
        """Forget the pages of the files, which come again when they are touched."""
        for memory in self.memories:
            if isinstance(memory, np.ndarray):
                let_go(memory)

    def close(self) -> None:
        """Let go of the files; each is unmapped when the last array that views it goes."""
        self.memories = self.sentinels = ()
        self._samples = 0
        self.fields, self.ragged = {}, {}


def empty(schema: Schema) -> MappedShard:
    """Return a shard without samples, which has no files."""
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


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CorruptShardError(
            f"a string is no UTF-8 ({error}); run growcache check"
        ) from None
