"""The user's function on every delivered sample, and its results as a batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from growcache.loading.buffers import Allocate, BufferPool, allocate_here
from growcache.loading.crews import Call, Crew, Rows, Threads, arguments_of, other_fields, store
from growcache.loading.gather import Column, typed
from growcache.loading.late_calls import TIMEOUT_SECONDS, LateCalls
from growcache.loading.ragged import of_values
from growcache.loading.shipping import Function, Shipped
from growcache.schema import Array, Field, Origin, Schema

_log = logging.getLogger(__name__)


def _nameless(row: int) -> str:
    return ""


class Transform:
    """Applies a function to the rows of blocks; used by one thread at a time.

    The function may change the sample's arrays in place: they are copies. What it returns
    is copied into the batch. Its first results decide about its fields: those are of one
    shape, or ragged where they are bytes, strings, or named as a ragged field of the cache.

    Args:
        function: called as ``function(sample, rng=…, origin=…)`` with what it takes of these.
        seed: of the loader.
        rows: the most that one block holds.
        cached: schema of the samples.
        before: what was decided in the process that this one goes on for: dimensions that
            were ragged there are so here, whatever the first results show.
        crew: who calls the function; threads by default.
        allocate: makes the memory for results of one size, and
        allocate_ragged: for others.
        timeout_seconds: that a call may take before it is told of.

    Attributes:
        schema: of what the function returns; None before its first results.
    """

    def __init__(
        self,
        function: Function,
        seed: int,
        rows: int,
        cached: Schema,
        before: Schema | None = None,
        crew: Crew | None = None,
        allocate: Allocate = allocate_here,
        allocate_ragged: Allocate = allocate_here,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self._takes = arguments_of(function)
        if crew is None:
            assert not isinstance(function, Shipped)  # it goes where processes call it
            crew = Threads(Call(function, seed))
        self._crew = crew
        self._timeout_seconds = timeout_seconds
        self._rows = rows
        self._cached = {field.name: field for field in cached.fields if field.is_ragged}
        self._before = {field.name: field.shape for field in before.fields} if before else {}
        self.schema: Schema | None = None
        self._allocate = allocate
        self._allocate_ragged = allocate_ragged
        self._pools: dict[str, BufferPool] = {}

    @property
    def takes_origin(self) -> bool:
        """Whether `run` must be given origins."""
        return "origin" in self._takes

    def run(
        self,
        columns: Mapping[str, Column],
        places: Sequence[tuple[int, int]],
        origins: Sequence[Origin] | None,
        name: Callable[[int], str] = _nameless,
    ) -> dict[str, Column]:
        """Return the batch of what the function makes of each row.

        Args:
            columns: of n rows, by field.
            places: (pass, position) of each row; they decide its generator.
            origins: of each row, where `takes_origin`.
            name: says where a row came from, for who has to look for it.

        Raises:
            FormatError: results that differ in names, dtypes or shapes.
        """
        rows = Rows(columns, places, origins)
        late: LateCalls[int] = LateCalls(
            self._timeout_seconds,
            lambda i, seconds: _say_late(places[i], name(i), seconds, self._timeout_seconds),
        )
        if self.schema is None:
            results = self._crew.results(rows, late)
            self.schema = self._decide(results)
            out = self._batch(self.schema, len(rows))
            for i, result in enumerate(results):
                store(self.schema, result, out, i)
        else:
            out = self._batch(self.schema, len(rows))
            self._crew.fill(rows, out, self.schema, late)
        return {name: self._column(name, values) for name, values in out.items()}

    def cancel(self) -> None:
        """Have `run` raise StoppedError, from any thread, in the middle of its rows."""
        self._crew.cancel()

    def close(self) -> None:
        """End who calls the function."""
        self._crew.close()

    def _decide(self, results: Sequence[Mapping[str, Any]]) -> Schema:
        first = Schema.of(results[0])
        for result in results:
            if result.keys() != results[0].keys():
                raise other_fields(result, first.names)
        fields = tuple(
            self._covering(field, [_shape(result[field.name]) for result in results])
            for field in first.fields
        )
        self._pools = {
            f.name: BufferPool(allocate=self._allocate_ragged)
            if f.is_ragged
            else BufferPool(self._rows * f.nbytes, allocate=self._allocate)
            for f in fields
        }
        return Schema(fields)

    def _covering(self, field: Field, shapes: Sequence[tuple[int, ...]]) -> Field:
        """Return the field that all results fit, if it may be ragged; else the first one's."""
        cached = self._cached.get(field.name)
        if cached is None or field.is_blob:
            return field
        same_rank = [(*shape,) for shape in shapes if len(shape) == len(field.shape)]
        sizes: list[int | None] = [
            size[0] if len(set(size)) == 1 else None for size in zip(*same_rank, strict=True)
        ]
        if len(cached.shape) == len(sizes):
            sizes = [None if c is None else s for c, s in zip(cached.shape, sizes, strict=True)]
        before = self._before.get(field.name, ())
        if len(before) == len(sizes):
            sizes = [None if b is None else s for b, s in zip(before, sizes, strict=True)]
        return Field(field.name, field.dtype, tuple(sizes))

    def _batch(self, schema: Schema, rows: int) -> dict[str, Array | list[Any]]:
        """Return where the results go."""
        return {
            f.name: [None] * rows
            if f.is_ragged
            else typed(self._pools[f.name].take()[: rows * f.nbytes].reshape(rows, f.nbytes), f)
            for f in schema.fields
        }

    def _column(self, name: str, values: Array | list[Any]) -> Column:
        if isinstance(values, np.ndarray):
            return values
        assert self.schema is not None
        return of_values(self.schema[name], values, self._pools[name])


def _say_late(
    place: tuple[int, int], name: str, seconds: float, timeout_seconds: float
) -> None:
    number, position = place
    _log.warning(
        "transform has been at work for %.0f s on sample %d of pass %d%s, and training waits for it; "
        "look for what it waits for there, or raise timeout_seconds (%g)",
        *(seconds, position, number, name and f", {name}", timeout_seconds),
    )


def _shape(value: Any) -> tuple[int, ...]:
    return np.shape(value) if not isinstance(value, bytes | str) else ()
