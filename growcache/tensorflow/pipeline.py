"""Code that both readers share: epochs, generators as datasets, and their end.

`tf.data.Dataset.from_generator` makes a new dataset for each iterator, in a `flat_map`.
TensorFlow needs twice as long to prepare that as everything here.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias
from weakref import WeakSet

import numpy as np
import tensorflow as tf

from growcache.loading.options import LoaderOptions
from growcache.loading.streams import wait_for_stream
from growcache.tensorflow.tensors import Spec, tensor_spec

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
# The largest that glibc accepts, and at which its adjustment ends.
MAX_MMAP_THRESHOLD = 32 << 20


def keep_freed_memory() -> None:
    """Restore glibc's reuse of freed memory, as before the first generator.

    With its first generator TensorFlow sets M_TRIM_THRESHOLD, which stops glibc from adjusting
    the mmap threshold. The threshold stays at 128 KiB, less than most batches. Each batch would
    be mapped, cleared and unmapped, and reading would take two to four times as long.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return  # another C library, which TensorFlow does not change
    mallopt(M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD)
    mallopt(M_TRIM_THRESHOLD, 2 * MAX_MMAP_THRESHOLD)


QUIET_SECONDS = 0.05  # enough for calls in progress


class _Closable(Protocol):
    def close(self) -> None: ...


_live: WeakSet[_Closable] = WeakSet()


def close_at_exit(what: _Closable) -> None:
    _live.add(what)


@atexit.register
def _close_all() -> None:
    """Close everything, so that no thread of TensorFlow calls a finalized interpreter."""
    live = list(_live)
    for what in live:
        what.close()
    if live:
        time.sleep(QUIET_SECONDS)


Dataset: TypeAlias = Any


class Pipeline(ABC):
    """Code that both pipelines share.

    TensorFlow keeps it for the life of the process, so each iteration frees its own resources.
    """

    def __init__(self, options: LoaderOptions, *, runs_on: bool) -> None:
        self._options = options
        self._runs_on = runs_on
        self._begun = False  # the cache held ``min_samples`` once
        self._shares = False  # one iterator serves all epochs

    @abstractmethod
    def pipeline(self) -> Dataset: ...

    def epochs(self) -> Dataset:
        """Cut the pipeline into epochs, each of which continues where the last one ended."""
        steps = self._options.steps_per_epoch
        assert steps is not None
        iterator, self._shares = iter(self.pipeline()), True
        return tf.data.Dataset.range(steps).map(lambda _: iterator.get_next())

    def wait(self) -> None:
        if not self._is_under_way:
            wait_for_stream(self._options, self._least_samples)
            self._begun = True

    @property
    def _is_under_way(self) -> bool:
        return self._shares and self._begun

    @property
    def _least_samples(self) -> int:
        return 1 if self._begun else self._options.min_samples

    def _epoch_sizes(self) -> list[int] | None:
        options = self._options
        if options.samples_per_epoch is None or not options.keep_last:
            return None
        whole, rest = divmod(options.samples_per_epoch, options.batch_size)
        return [options.batch_size] * whole + [rest] if rest else None

    @abstractmethod
    def close(self) -> None: ...


class GeneratorDataset:
    """A dataset whose iterators are Python generators.

    TensorFlow keeps it for the life of the process.
    """

    def __init__(
        self, begin: Callable[[], Iterator[tuple[Any, ...]]], specs: Sequence[Spec]
    ) -> None:
        self._make = begin
        self._types = [each.dtype for each in specs]
        self._names = itertools.count()
        self._running: dict[int, Iterator[tuple[Any, ...]]] = {}
        with tf.init_scope():  # it must not belong to a graph in the making
            self._functions = self._traced()
            made = tf.raw_ops.GeneratorDataset(
                **self._functions,
                init_func_other_args=[],
                next_func_other_args=[],
                finalize_func_other_args=[],
                output_types=self._types,
                output_shapes=[each.shape for each in specs],
            )
            self.dataset: Dataset = tf.data.experimental.from_variant(made, tuple(specs))

    def _traced(self) -> dict[str, Any]:
        name = tensor_spec(tf.int64)

        def begin() -> Any:
            return tf.numpy_function(self._begin, [], tf.int64)

        def following(name: Any) -> Any:
            return tuple(tf.numpy_function(self._next, [name], self._types))

        def end(name: Any) -> Any:
            return tf.numpy_function(self._end, [name], tf.int64)

        def traced(function: Callable[..., Any], *specs: Spec) -> Any:
            return tf.function(function, autograph=False).get_concrete_function(*specs)

        return {
            "init_func": traced(begin),
            "next_func": traced(following, name),
            "finalize_func": traced(end, name),
        }

    # --- called by TensorFlow's threads ---

    def _begin(self) -> np.int64:
        name = next(self._names)
        self._running[name] = self._make()
        return np.int64(name)

    def _next(self, name: np.int64) -> tuple[Any, ...]:
        return next(self._running[int(name)])  # StopIteration ends the dataset

    def _end(self, name: np.int64) -> np.int64:
        del self._running[int(name)]  # the last reference, whose end closes the generator
        return name
