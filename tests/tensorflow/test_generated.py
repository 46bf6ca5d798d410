"""Iterators of Python as datasets of TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from growcache.tensorflow.pipeline import GeneratorDataset

pytestmark = pytest.mark.tensorflow


class Counting:
    """Counts its iterators that are there; each yields (i, i zeros) for i below 3."""

    def __init__(self) -> None:
        self.running = 0

    def __call__(self) -> Iterator[tuple[Any, ...]]:
        self.running += 1
        try:
            for i in range(3):
                yield np.int64(i), np.zeros(i, np.float32)
        finally:
            self.running -= 1

    def dataset(self) -> Any:
        return GeneratorDataset(
            self, [tf.TensorSpec([], tf.int64), tf.TensorSpec([None], tf.float32)]
        ).dataset


def test_each_iterator_is_one_of_python() -> None:
    source = Counting()
    dataset = source.dataset()
    for _ in range(2):
        assert [(i.numpy(), zeros.shape) for i, zeros in dataset] == [
            (i, (i,)) for i in range(3)
        ]
        assert not source.running


def test_two_at_a_time_do_not_meet() -> None:
    dataset = Counting().dataset()
    both = zip(dataset, dataset, strict=True)
    assert [(i.numpy(), k.numpy()) for (i, _), (k, _) in both] == [(0, 0), (1, 1), (2, 2)]


def test_it_is_closed_with_the_iterator_that_is_broken_off() -> None:
    source = Counting()
    iterator = iter(source.dataset())
    next(iterator)
    assert source.running == 1
    del iterator
    assert not source.running


def test_what_it_raises_reaches_who_iterates() -> None:
    def broken() -> Iterator[tuple[Any, ...]]:
        yield (np.int64(0),)
        raise ValueError("no more of these")

    iterator = iter(GeneratorDataset(broken, [tf.TensorSpec([], tf.int64)]).dataset)
    next(iterator)
    with pytest.raises(tf.errors.InvalidArgumentError, match="no more of these"):
        next(iterator)


def test_it_may_be_made_in_a_graph_that_outlives_its_maker() -> None:
    source = Counting()

    def summed() -> Any:
        return source.dataset().reduce(np.int64(0), lambda found, element: found + element[0])

    total = tf.function(summed)
    assert total().numpy() == total().numpy() == 3
