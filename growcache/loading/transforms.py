"""The user's function on every delivered sample, in threads, and its results as a batch."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from growcache.errors import ConfigError, FormatError
from growcache.loading.buffers import BufferPool
from growcache.loading.gather import Integers, typed
from growcache.schema import Array, Origin, Schema
from growcache.seeding import generator

MAX_THREADS = 8
BY_NAME = ("rng", "origin")


def arguments_of(function: Callable[..., Any]) -> frozenset[str]:
    """Return which of ``rng`` and ``origin`` the function takes beside the sample.

    Raises:
        ConfigError: it demands something else.
    """
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


class Transform:
    """Applies a function to the rows of blocks; used by one thread at a time.

    The function may change the sample's arrays in place: they are copies. What it returns
    is copied into the batch.

    Args:
        function: called as ``function(sample, rng=…, origin=…)`` with what it takes of these.
        seed: of the loader.
        rows: the most that one block holds.
    """

    def __init__(
        self, function: Callable[..., Mapping[str, Any]], seed: int, rows: int
    ) -> None:
        self._function = function
        self._takes = arguments_of(function)
        self._seed = seed
        self._rows = rows
        self._threads = min(MAX_THREADS, os.cpu_count() or 1)
        self._executor = ThreadPoolExecutor(self._threads, "growcache-transform")
        self._schema: Schema | None = None
        self._pools: dict[str, BufferPool] = {}

    @property
    def takes_origin(self) -> bool:
        """Whether `run` must be given origins."""
        return "origin" in self._takes

    def run(
        self,
        arrays: Mapping[str, Array],
        places: Sequence[tuple[int, int]],
        origins: Sequence[Origin] | None,
    ) -> dict[str, Array]:
        """Return the batch of what the function makes of each row.

        Args:
            arrays: [n, *shape] per field.
            places: (pass, position) of each row; they decide its generator.
            origins: of each row, where `takes_origin`.

        Raises:
            FormatError: results that differ in names, dtypes or shapes.
        """
        n = len(places)

        def one(i: int) -> Mapping[str, Any]:
            keywords: dict[str, Any] = {}
            if "rng" in self._takes:
                keywords["rng"] = generator(self._seed, "transform", *places[i])
            if origins is not None and self.takes_origin:
                keywords["origin"] = origins[i]
            return self._function({name: a[i] for name, a in arrays.items()}, **keywords)

        first = one(0)
        out = self._batch(first, n)
        self._store(first, out, 0)

        def some(indices: Integers) -> None:
            for i in indices.tolist():
                self._store(one(i), out, i)

        chunks = np.array_split(np.arange(1, n, dtype=np.int64), self._threads)
        for done in [self._executor.submit(some, chunk) for chunk in chunks]:
            done.result()
        return out

    def close(self) -> None:
        """End the threads."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _batch(self, first: Mapping[str, Any], rows: int) -> dict[str, Array]:
        if self._schema is None:
            self._schema = Schema.of(first)
            self._pools = {
                f.name: BufferPool(self._rows * f.nbytes) for f in self._schema.fields
            }
        return {
            f.name: typed(
                self._pools[f.name].take()[: rows * f.nbytes].reshape(rows, f.nbytes), f
            )
            for f in self._schema.fields
        }

    def _store(self, result: Mapping[str, Any], out: Mapping[str, Array], i: int) -> None:
        if self._schema is None or result.keys() != out.keys():
            raise FormatError(
                f"transform returned {sorted(map(str, result))} where earlier samples "
                f"had {sorted(out)}; it must return the same fields for every sample"
            )
        for name, array in out.items():
            value = np.asarray(result[name])
            if value.shape != array.shape[1:] or value.dtype != array.dtype:
                raise FormatError(
                    f"transform returned {name}: {value.dtype}{list(value.shape)} where earlier "
                    f"samples had {array.dtype}{list(array.shape[1:])}; batches need equal ones"
                )
            array[i] = value
