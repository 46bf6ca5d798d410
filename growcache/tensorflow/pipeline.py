"""What both readers have in common: epochs, generators as datasets, and their end.

`tf.data.Dataset.from_generator` makes a dataset anew for each iterator, within a `flat_map`, which
takes TensorFlow twice as long to prepare as everything here.
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
from growcache.loading.streams import wait_for_pass
from growcache.tensorflow.tensors import Spec, tensor_spec

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
MAX_MMAP_THRESHOLD = 32 << 20  # the highest that glibc takes, and where its own adjusting ends


def keep_freed_memory() -> None:
    """Have tensors use freed memory again, as they do before a generator is used.

    With the first generator TensorFlow has glibc give memory back sooner (M_TRIM_THRESHOLD).
    To set that ends glibc's adjusting of another threshold, from which on each piece is
    mapped, cleared and unmapped for itself: then it is 128 KiB for good, less than most
    batches and many samples, and reading takes two to four times as long. So both are set to
    what they come to by themselves.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return  # another C library, which TensorFlow does not touch
    mallopt(M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD)
    mallopt(M_TRIM_THRESHOLD, 2 * MAX_MMAP_THRESHOLD)


QUIET_SECONDS = 0.05  # is enough for calls that are under way


class _Closable(Protocol):
    def close(self) -> None:
        """End what waits, and let go of everything."""


_live: WeakSet[_Closable] = WeakSet()


def close_at_exit(what: _Closable) -> None:
    """Have it closed before the interpreter goes, if it is still there then."""
    _live.add(what)


@atexit.register
def _close_all() -> None:
    """Have TensorFlow's threads call Python no more before the interpreter goes.

    A thread that asks again and again for what comes next would never return from a call
    into an interpreter that has ended, and TensorFlow waits for its threads.
    """
    live = list(_live)
    for what in live:
        what.close()
    if live:
        time.sleep(QUIET_SECONDS)


Dataset: TypeAlias = Any


class Pipeline(ABC):
    """Makes the pipeline, and answers what TensorFlow asks while it runs.

    TensorFlow keeps it for as long as the process lives, so what it holds ends with its
    iterations.

    Args:
        options: of the loader.
        runs_on: whether one iteration is all epochs.
    """

    def __init__(self, options: LoaderOptions, *, runs_on: bool) -> None:
        self._options = options
        self._runs_on = runs_on
        self._begun = False  # so the cache held ``min_samples`` once
        self._shares = False  # one iterator for all epochs

    @abstractmethod
    def pipeline(self) -> Dataset:
        """Return the batches: of an epoch, or without end."""

    def epochs(self) -> Dataset:
        """Return the pipeline cut into epochs that go on where the last one ended."""
        steps = self._options.steps_per_epoch
        assert steps is not None
        iterator, self._shares = iter(self.pipeline()), True
        return tf.data.Dataset.range(steps).map(lambda _: iterator.get_next())

    def wait(self) -> None:
        """Wait, in the calling thread, until the cache holds enough for the next epoch."""
        if not self._is_under_way:
            wait_for_pass(self._options, self._least_samples)
            self._begun = True

    @property
    def _is_under_way(self) -> bool:
        """Whether the next epoch was begun beforehand."""
        return self._shares and self._begun

    @property
    def _least_samples(self) -> int:
        """How many samples the next epoch waits for."""
        return 1 if self._begun else self._options.min_samples

    def _epoch_sizes(self) -> list[int] | None:
        """Return the batch sizes of an epoch whose last batch is kept and is smaller."""
        options = self._options
        if options.samples_per_epoch is None or not options.keeps_last:
            return None
        whole, rest = divmod(options.samples_per_epoch, options.batch_size)
        return [options.batch_size] * whole + [rest] if rest else None

    @abstractmethod
    def close(self) -> None:
        """Let go of what no iterator holds."""


class GeneratorDataset:
    """A dataset, each iterator of which is one of Python's.

    TensorFlow keeps it for as long as the process lives.

    Args:
        begin: makes the iterator, when TensorFlow asks for its first element. It is closed
            with TensorFlow's.
        specs: of the tuples of arrays that it yields.

    Attributes:
        dataset: of tuples of tensors.
    """

    def __init__(
        self, begin: Callable[[], Iterator[tuple[Any, ...]]], specs: Sequence[Spec]
    ) -> None:
        self._make = begin
        self._types = [each.dtype for each in specs]
        self._names = itertools.count()
        self._running: dict[int, Iterator[tuple[Any, ...]]] = {}
        with tf.init_scope():  # it is one of no graph that may be in the making
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

    # What TensorFlow's threads call

    def _begin(self) -> np.int64:
        name = next(self._names)
        self._running[name] = self._make()
        return np.int64(name)

    def _next(self, name: np.int64) -> tuple[Any, ...]:
        return next(self._running[int(name)])  # StopIteration is the dataset's end

    def _end(self, name: np.int64) -> np.int64:
        del self._running[int(name)]  # the last reference, which closes it
        return name
