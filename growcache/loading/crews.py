"""Who calls the user's function on samples, and where its results are put."""

from __future__ import annotations

import inspect
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np

from growcache.errors import ConfigError, FormatError
from growcache.loading.ahead import Hand
from growcache.loading.calls import blamed
from growcache.loading.gather import Column
from growcache.loading.late_calls import LateCalls
from growcache.loading.ragged import Ragged
from growcache.loading.shipping import Function, Shipped
from growcache.loading.stopping import StoppedError
from growcache.schema import Array, Field, Origin, Schema, Value
from growcache.seeding import generator

MAX_THREADS = 8
SPARE_THREADS = 2  # beside one per core: some wait for the GIL, and one more makes up for it
BY_NAME = ("rng", "origin")

T = TypeVar("T")

# Where results go: arrays, and lists for the ragged ones.
Out: TypeAlias = Mapping[str, Array | list[Any]]


def arguments_of(function: Function) -> frozenset[str]:
    """Return which of ``rng`` and ``origin`` the function takes beside the sample.

    Raises:
        ConfigError: it demands something else.
    """
    if isinstance(function, Shipped):
        return function.takes
    if not callable(function):
        raise ConfigError(f"transform must be a function itself, found {function!r}")
    parameters = list(inspect.signature(function).parameters.values())
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = {
        p.name for p in parameters[1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    required = {p.name for p in parameters[1:] if p.default is p.empty and p.name in names}
    if not parameters or required - set(BY_NAME):
        raise ConfigError(
            "transform expected as function(sample, rng, origin), of which rng and origin "
            f"may be left out; found {inspect.signature(function)}"
        )
    return frozenset(BY_NAME if takes_any else names & set(BY_NAME))


@dataclass(frozen=True, slots=True)
class Rows:
    """What the function is called with, row by row.

    Attributes:
        columns: of n rows, by field.
        places: (pass, position) of each row; they decide its generator.
        origins: of each row, where the function takes them.
    """

    columns: Mapping[str, Column]
    places: Sequence[tuple[int, int]]
    origins: Sequence[Origin] | None

    def __len__(self) -> int:
        return len(self.places)

    def part(self, start: int, stop: int) -> Rows:
        """Return some of the rows, sharing memory."""
        columns: dict[str, Column] = {
            name: column.part(start, stop) if isinstance(column, Ragged) else column[start:stop]
            for name, column in self.columns.items()
        }
        origins = None if self.origins is None else self.origins[start:stop]
        return Rows(columns, self.places[start:stop], origins)


class Call:
    """The function, with what it takes beside a sample.

    Args:
        function: called as ``function(sample, rng=…, origin=…)`` with what it takes of these.
        seed: of the loader.

    Attributes:
        running: by thread, the row that it is called with, and since when; who has no more rows
            clears it.
    """

    def __init__(self, function: Callable[..., Mapping[str, Any]], seed: int) -> None:
        self.running: dict[int, tuple[int, float]] = {}
        self._function = function
        self._takes = arguments_of(function)
        self._seed = seed

    def __call__(self, rows: Rows, i: int) -> Mapping[str, Any]:
        """Return what it makes of a row."""
        keywords = dict[str, Any]()
        if "rng" in self._takes:
            keywords["rng"] = generator(self._seed, "transform", *rows.places[i])
        if rows.origins is not None and "origin" in self._takes:
            keywords["origin"] = rows.origins[i]
        sample = {name: column[i] for name, column in rows.columns.items()}
        self.running[threading.get_ident()] = i, time.monotonic()
        with self._blamed(rows, i):
            return self._function(sample, **keywords)

    def plain(self, rows: Rows, i: int) -> dict[str, Any]:
        """Return what it makes of a row as arrays, bytes and strings, which any process can have.

        Raises:
            FormatError: there is something else in it.
        """
        result: Any = self(rows, i)
        with self._blamed(rows, i):
            if not isinstance(result, Mapping) or not result:
                raise FormatError(
                    "transform must return a non-empty dict of arrays, bytes and str, found "
                    f"{result!r:.80}"
                )
            return {name: _plain(name, value) for name, value in result.items()}

    def _blamed(self, rows: Rows, i: int) -> AbstractContextManager[None]:
        number, position = rows.places[i]
        return blamed("transform", self._function, f"sample {position} of pass {number}")


class Crew(Protocol):
    """Who calls the function."""

    def results(self, rows: Rows, late: LateCalls[int]) -> list[Any]:
        """Return what it makes of each row, as `Call.plain` does; ``late`` looks at the rows."""

    def fill(self, rows: Rows, out: Out, schema: Schema, late: LateCalls[int]) -> None:
        """Put what it makes of each row into ``out``, if it fits the schema."""

    def cancel(self) -> None:
        """Have what is under way raise StoppedError, and what follows; from any thread."""

    def close(self) -> None:
        """End."""


class Threads:
    """Threads of this process; they are used by one thread at a time.

    Args:
        call: of the function.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        threads = min(MAX_THREADS, (os.cpu_count() or 1) + SPARE_THREADS)
        # Not an executor's: at its end the interpreter waits for those before it cancels them.
        self._hands = [Hand("transform") for _ in range(threads)]
        self._cancelled = False

    def results(self, rows: Rows, late: LateCalls[int]) -> list[Any]:
        """Return what the function makes of each row."""
        return self._each(len(rows), lambda i: self._call.plain(rows, i), late)

    def fill(self, rows: Rows, out: Out, schema: Schema, late: LateCalls[int]) -> None:
        """Put what the function makes of each row into ``out``."""
        self._each(len(rows), lambda i: store(schema, self._call(rows, i), out, i), late)

    def cancel(self) -> None:
        """Begin no more rows."""
        self._cancelled = True

    def close(self) -> None:
        """End the threads."""
        for hand in self._hands:
            hand.close()

    def _each(self, n: int, call: Callable[[int], T], late: LateCalls[int]) -> list[T]:
        """Return what the calls of 0 to n - 1 return; whichever thread is free takes the next."""
        left = deque(range(n))
        results: dict[int, T] = {}

        def some() -> None:
            try:
                while not self._cancelled and (i := _popped(left)) is not None:
                    results[i] = call(i)
            except BaseException:
                left.clear()  # nobody wants the others any more
                raise
            finally:
                self._call.running.pop(threading.get_ident(), None)

        for done in [hand.ahead(some) for hand in self._hands[:n]]:
            while not done.wait(late.pause_seconds):
                late.look(dict(self._call.running), time.monotonic())
            done.result()
        if self._cancelled:
            raise StoppedError
        return [results[i] for i in range(n)]


def store(schema: Schema, result: Any, out: Out, i: int) -> None:
    """Put a result where it belongs.

    Raises:
        FormatError: it does not fit the schema.
    """
    if not isinstance(result, Mapping) or result.keys() != out.keys():
        raise other_fields(result, schema.names)
    for field in schema.fields:
        out[field.name][i] = _fitting(field, result[field.name])


def _plain(name: str, value: Any) -> Value:
    if isinstance(value, bytes):
        return bytes(value)
    if isinstance(value, str):
        return str(value)
    array = np.asarray(value)
    if array.dtype.hasobject:
        kind = type(value)
        raise FormatError(
            f"transform returned {name}: a {kind.__module__}.{kind.__qualname__}, expected an "
            "array, a number, bytes or str"
        )
    return array


def _popped(left: deque[int]) -> int | None:
    """Return the next one; None where another thread took the last."""
    try:
        return left.popleft()
    except IndexError:
        return None


def _fitting(field: Field, value: Any) -> Value:
    """Return a result as the field has it.

    Raises:
        FormatError: it does not fit.
    """
    if field.is_blob:
        if field.holds(value):
            return value  # type: ignore[no-any-return]
        raise _other_value(field, type(value).__name__)
    array = np.asarray(value)
    if array.dtype != field.item or not field.allows(array.shape):
        found = type(value).__name__ if array.dtype.hasobject else array.dtype
        raise _other_value(field, f"{found}{list(array.shape)}")
    return np.ascontiguousarray(array).reshape(array.shape) if field.is_ragged else array


def other_fields(result: Any, names: Sequence[str]) -> FormatError:
    """Return what to say of a result whose fields are not those of the others."""
    found = sorted(map(str, result)) if isinstance(result, Mapping) else type(result).__name__
    return FormatError(
        f"transform returned {found} where earlier samples had {list(names)}; it must return "
        "a dict of the same fields for every sample"
    )


def _other_value(field: Field, found: str) -> FormatError:
    return FormatError(
        f"transform returned {field.name}: {found} where earlier samples had {field}; return "
        "equal dtypes and shapes (cut or pad there), or values of different shapes under "
        "the name of a ragged field of the cache"
    )
