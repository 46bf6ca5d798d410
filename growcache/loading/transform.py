"""The user's functions: `transform`, applied to every delivered sample, and `batch_transform`."""

from __future__ import annotations

import inspect
import logging
import os
import pickle
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

from growcache.errors import CacheError, ConfigError, FormatError, GrowcacheError
from growcache.loading.buffers import Allocate, BufferPool, allocate_private
from growcache.loading.gather import typed_rows
from growcache.loading.ragged import Column, Ragged, ragged_of_values
from growcache.schema import Array, Field, Origin, Schema, Value
from growcache.seeding import generator_at
from growcache.threads import DaemonThread, StoppedError


class TransformSchema(NamedTuple):
    """The schema of a transform's results, as JSON. The first samples determine it."""

    transformed: list[list[Any]] | None = None


LOADING_DIR = Path(__file__).parent


@contextmanager
def blame_function(what: str, function: Callable[..., Any], on: str = "") -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(
            f"in {what} {_function_name(function)}{_function_line(error, function)}{on and f', on {on}'}"
        )
        raise


def portable_error(error: BaseException, where: str) -> BaseException:
    if not isinstance(error, GrowcacheError):
        error.add_note(f"in {where}:\n{''.join(traceback.format_exception(error)).rstrip()}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - pickling such a class may raise anything
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        return CacheError(f"{type(error).__name__}: {error}{notes}", code="GC608")
    return error


def _function_name(function: Callable[..., Any]) -> str:
    found = getattr(function, "__qualname__", None)
    return found if isinstance(found, str) else type(function).__qualname__


def _function_line(error: BaseException, function: Callable[..., Any]) -> str:
    """Return the innermost line in the user's own file, or else in any file outside the loader."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if Path(frame.filename).parent != LOADING_DIR]
    own = [frame for frame in theirs if frame.filename == _function_file(function)]
    return "".join(f" ({frame.filename}:{frame.lineno})" for frame in (own or theirs)[-1:])


def _function_file(function: Callable[..., Any]) -> str | None:
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None) or getattr(
        type(function).__call__, "__code__", None
    )
    return code.co_filename if code is not None else None


@dataclass(frozen=True, slots=True)
class PickledFunction:
    """A pickled function, which a process can forward without being able to import it."""

    code: bytes
    takes: frozenset[str]

    def load(self) -> Callable[..., Any]:
        """Return the function. ConfigError if its module cannot be imported."""
        function: Callable[..., Any] = pickle.loads(self.code)
        return function


# The user's function, or its pickle, which is never called.
UserFunction: TypeAlias = Callable[..., Any] | PickledFunction


def pickle_function(function: UserFunction, takes: frozenset[str]) -> PickledFunction:
    """Pickle a function by name, or by value from scripts and notebooks."""
    import cloudpickle  # here, because only workers need it

    if isinstance(function, PickledFunction):
        return function
    try:
        return PickledFunction(cloudpickle.dumps(function), takes)
    except Exception as error:  # pickling a part of it may raise anything
        raise ConfigError(
            f"transform cannot be sent to the processes of num_workers: {type(error).__name__}: "
            f"{error}; leave out what cannot be pickled, or use num_workers=0",
            code="GC109",
        ) from error


TIMEOUT_SECONDS = 60.0
MAX_TIMEOUT_SECONDS = 1e7


class SlowCallWatch:
    """Warns after ``timeout_seconds``, and whenever that time has doubled. For one thread."""

    def __init__(self, timeout_seconds: float, report: Callable[[int, float], object]) -> None:
        self.pause_seconds = min(1.0, timeout_seconds / 4)
        self._timeout_seconds = timeout_seconds
        self.report = report
        # Start of the call, and time of the next warning.
        self._next_warnings: dict[int, tuple[float, float]] = {}

    def look(self, calls: Mapping[int, tuple[int, float]], now: float) -> None:
        for thread, (call, began) in calls.items():
            since, limit = self._next_warnings.get(thread, (began, self._timeout_seconds))
            if since != began:
                limit = self._timeout_seconds
            if now - began >= limit:
                self.report(call, now - began)
                limit *= 2
            self._next_warnings[thread] = began, limit


NAMED_ARGUMENTS = ("rng", "origin")


def function_arguments(function: UserFunction) -> frozenset[str]:
    if isinstance(function, PickledFunction):
        return function.takes
    if not callable(function):
        raise ConfigError(f"transform must be a function, found {function!r}", code="GC608")
    parameters = list(inspect.signature(function).parameters.values())
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = {
        p.name for p in parameters[1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    required = {p.name for p in parameters[1:] if p.default is p.empty and p.name in names}
    if not parameters or required - set(NAMED_ARGUMENTS):
        raise ConfigError(
            "transform: expected function(sample, rng, origin), of which rng and origin may be "
            f"left out; found {inspect.signature(function)}",
            code="GC608",
        )
    return frozenset(NAMED_ARGUMENTS if takes_any else names & set(NAMED_ARGUMENTS))


MAX_THREADS = 8
SPARE_THREADS = 2  # more than cores, because some wait for the GIL


T = TypeVar("T")

# Destination of results: arrays, and lists for ragged fields.
ResultColumns: TypeAlias = Mapping[str, Array | list[Any]]


@dataclass(frozen=True, slots=True)
class TransformRows:
    columns: Mapping[str, Column]
    places: Sequence[tuple[int, int]]
    origins: Sequence[Origin] | None

    def __len__(self) -> int:
        return len(self.places)

    def part(self, start: int, stop: int) -> TransformRows:
        columns: dict[str, Column] = {
            name: column.part(start, stop) if isinstance(column, Ragged) else column[start:stop]
            for name, column in self.columns.items()
        }
        origins = None if self.origins is None else self.origins[start:stop]
        return TransformRows(columns, self.places[start:stop], origins)


class TransformCall:
    def __init__(self, function: Callable[..., Mapping[str, Any]], seed: int) -> None:
        self.running: dict[int, tuple[int, float]] = {}
        self._function = function
        self._takes = function_arguments(function)
        self._seed = seed

    def __call__(self, rows: TransformRows, i: int) -> Mapping[str, Any]:
        keywords = dict[str, Any]()
        if "rng" in self._takes:
            keywords["rng"] = generator_at(self._seed, "transform", *rows.places[i])
        if rows.origins is not None and "origin" in self._takes:
            keywords["origin"] = rows.origins[i]
        sample = {name: column[i] for name, column in rows.columns.items()}
        self.running[threading.get_ident()] = i, time.monotonic()
        with self._blamed(rows, i):
            return self._function(sample, **keywords)

    def plain(self, rows: TransformRows, i: int) -> dict[str, Any]:
        """Return the result for a row as arrays, bytes and strings, which any process can load."""
        result: Any = self(rows, i)
        with self._blamed(rows, i):
            if not isinstance(result, Mapping) or not result:
                raise FormatError(
                    "transform must return a non-empty dict of arrays, bytes and str, found "
                    f"{result!r:.80}",
                    code="GC608",
                )
            return {name: _plain_value(name, value) for name, value in result.items()}

    def _blamed(self, rows: TransformRows, i: int) -> AbstractContextManager[None]:
        number, position = rows.places[i]
        return blame_function(
            "transform", self._function, f"sample {position} of pass {number}"
        )


def never() -> bool:
    return False


class Executor(Protocol):
    """Calls the user's function in threads or processes.

    After `stopped` it raises StoppedError.
    """

    def run(
        self,
        rows: TransformRows,
        slow_calls: SlowCallWatch,
        schema: Schema | None = None,
        out: ResultColumns | None = None,
    ) -> list[Any]:
        """Return the results of rows, or with a schema, store them in ``out``.

        Raises:
            FormatError: A result does not fit the schema.
        """

    def close(self) -> None: ...


class ThreadExecutor:
    def __init__(self, call: TransformCall, stopped: Callable[[], bool] = never) -> None:
        self._call = call
        self._stopped = stopped
        threads = min(MAX_THREADS, (os.cpu_count() or 1) + SPARE_THREADS)
        # Not an executor's threads, because at its end the interpreter waits for them before it
        # cancels them.
        self._threads = [DaemonThread("transform") for _ in range(threads)]

    def run(
        self,
        rows: TransformRows,
        slow_calls: SlowCallWatch,
        schema: Schema | None = None,
        out: ResultColumns | None = None,
    ) -> list[Any]:
        if schema is None or out is None:
            return self._each(len(rows), lambda i: self._call.plain(rows, i), slow_calls)
        return self._each(
            len(rows), lambda i: store_result(schema, self._call(rows, i), out, i), slow_calls
        )

    def close(self) -> None:
        for thread in self._threads:
            thread.close()

    def _each(self, n: int, call: Callable[[int], T], slow_calls: SlowCallWatch) -> list[T]:
        left = deque(range(n))
        results: dict[int, T] = {}

        def some() -> None:
            try:
                while not self._stopped() and (i := _pop_row(left)) is not None:
                    results[i] = call(i)
            except BaseException:
                left.clear()  # the other rows are not needed any more
                raise
            finally:
                self._call.running.pop(threading.get_ident(), None)

        for done in [thread.submit(some) for thread in self._threads[:n]]:
            while not done.wait(slow_calls.pause_seconds):
                slow_calls.look(dict(self._call.running), time.monotonic())
            done.result()
        if self._stopped():
            raise StoppedError
        return [results[i] for i in range(n)]


def store_result(schema: Schema, result: Any, out: ResultColumns, i: int) -> None:
    if not isinstance(result, Mapping) or result.keys() != out.keys():
        raise fields_error(result, schema.names)
    for field in schema.fields:
        out[field.name][i] = _fit_value(field, result[field.name])


def _plain_value(name: str, value: Any) -> Value:
    if isinstance(value, bytes):
        return bytes(value)
    if isinstance(value, str):
        return str(value)
    array = np.asarray(value)
    if array.dtype.hasobject:
        kind = type(value)
        raise FormatError(
            f"transform returned {name}: a {kind.__module__}.{kind.__qualname__}, expected an "
            "array, a number, bytes or str",
            code="GC608",
        )
    return array


def _pop_row(left: deque[int]) -> int | None:
    try:
        return left.popleft()
    except IndexError:
        return None


def _fit_value(field: Field, value: Any) -> Value:
    if field.is_blob:
        if field.stores_as_is(value):
            return value  # type: ignore[no-any-return]
        raise _value_error(field, type(value).__name__)
    array = np.asarray(value)
    if array.dtype != field.item_dtype or not field.allows(array.shape):
        found = type(value).__name__ if array.dtype.hasobject else array.dtype
        raise _value_error(field, f"{found}{list(array.shape)}")
    return np.ascontiguousarray(array).reshape(array.shape) if field.is_ragged else array


def fields_error(result: Any, names: Sequence[str]) -> FormatError:
    found = sorted(map(str, result)) if isinstance(result, Mapping) else type(result).__name__
    return FormatError(
        f"transform returned {found} where earlier samples had {list(names)}; it must return "
        "a dict of the same fields for every sample",
        code="GC608",
    )


def _value_error(field: Field, found: str) -> FormatError:
    return FormatError(
        f"transform returned {field.name}: {found} where earlier samples had {field}; return "
        "equal dtypes and shapes (cut or pad there), or values of different shapes under "
        "the name of a ragged field of the cache",
        code="GC608",
    )


_log = logging.getLogger(__name__)


class BlockTransform:
    """Applies a function to the rows of blocks, in one thread at a time.

    The first results determine the fields. A field has one shape, or is ragged if it is bytes,
    strings, or named like a ragged field of the cache.
    """

    def __init__(
        self,
        function: UserFunction,
        seed: int,
        rows: int,
        cached: Schema,
        before: Schema | None = None,
        executor: Executor | None = None,
        allocate: Allocate = allocate_private,
        allocate_ragged: Allocate = allocate_private,
        timeout_seconds: float = TIMEOUT_SECONDS,
        stopped: Callable[[], bool] = never,
    ) -> None:
        self._takes = function_arguments(function)
        if executor is None:
            # It goes to where processes call it.
            assert not isinstance(function, PickledFunction)
            executor = ThreadExecutor(TransformCall(function, seed), stopped)
        self._executor = executor
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
        return "origin" in self._takes

    def run(
        self,
        columns: Mapping[str, Column],
        places: Sequence[tuple[int, int]],
        origins: Sequence[Origin] | None,
        name: Callable[[int], str] = lambda row: "",
    ) -> dict[str, Column]:
        rows = TransformRows(columns, places, origins)
        slow_calls: SlowCallWatch = SlowCallWatch(
            self._timeout_seconds,
            lambda i, seconds: _warn_slow_call(
                places[i], name(i), seconds, self._timeout_seconds
            ),
        )
        if self.schema is None:
            results = self._executor.run(rows, slow_calls)
            self.schema = self._decide(results)
            out = self._batch(self.schema, len(rows))
            for i, result in enumerate(results):
                store_result(self.schema, result, out, i)
        else:
            out = self._batch(self.schema, len(rows))
            self._executor.run(rows, slow_calls, self.schema, out)
        return {name: self._column(name, values) for name, values in out.items()}

    def close(self) -> None:
        self._executor.close()

    def _decide(self, results: Sequence[Mapping[str, Any]]) -> Schema:
        first = Schema.from_sample(results[0])
        for result in results:
            if result.keys() != results[0].keys():
                raise fields_error(result, first.names)
        fields = tuple(
            self._covering(field, [_value_shape(result[field.name]) for result in results])
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
        """Return the field that fits all results, if it may be ragged, or else that of the first one."""
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
        return {
            f.name: [None] * rows
            if f.is_ragged
            else typed_rows(
                self._pools[f.name].take()[: rows * f.nbytes].reshape(rows, f.nbytes), f
            )
            for f in schema.fields
        }

    def _column(self, name: str, values: Array | list[Any]) -> Column:
        if isinstance(values, np.ndarray):
            return values
        assert self.schema is not None
        return ragged_of_values(self.schema[name], values, self._pools[name])


def _warn_slow_call(
    place: tuple[int, int], name: str, seconds: float, timeout_seconds: float
) -> None:
    number, position = place
    _log.warning(
        "transform has run for %.0f s on sample %d of pass %d%s, and training waits for it; "
        "find out what it waits for, or raise timeout_seconds (%g)",
        *(seconds, position, number, name and f", {name}", timeout_seconds),
    )


def _value_shape(value: Any) -> tuple[int, ...]:
    return np.shape(value) if not isinstance(value, bytes | str) else ()
