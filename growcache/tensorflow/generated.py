"""Iterators of Python as datasets.

`tf.data.Dataset.from_generator` is the same and a `flat_map` around it, a dataset made anew for
each iterator. To prepare that takes TensorFlow twice as long as all that is here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from growcache.tensorflow.feeds import Dataset
from growcache.tensorflow.tensors import Spec, spec


class Generated:
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
        name = spec(tf.int64)

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
