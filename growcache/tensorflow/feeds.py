"""What makes the batches of a dataset, as far as both readers are alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeAlias

import tensorflow as tf

from growcache.loading.options import LoaderOptions
from growcache.loading.streams import wait

Dataset: TypeAlias = Any


class Feed(ABC):
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
            wait(self._options, self._least_samples)
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
