"""The pipeline whose batches growcache's own gather makes (``reader="gather"``).

TensorFlow's tensors are the gather's recycled buffers, and each tensor keeps a reference to its
buffer. A call into Python takes TensorFlow longer than copying a batch of small samples. So it
gets several batches at once if all fields have fixed shapes, and cuts them itself without
copying.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from growcache.loading.consumer import Consumer
from growcache.loading.framework import Framework
from growcache.loading.maps import MapPool
from growcache.loading.options import LoaderOptions
from growcache.seeding import derive_seed
from growcache.tensorflow.pipeline import (
    Dataset,
    GeneratorDataset,
    Pipeline,
    close_at_exit,
    keep_freed_memory,
)
from growcache.tensorflow.tensors import (
    BatchForm,
    Tensor,
    TensorColumn,
    loader_style,
    tensor_spec,
)

# How long the next epoch stays prepared, with its lease, threads and memory.
IDLE_SECONDS = 5.0


class ConsumerPool:
    """One consumer per iterator, and one that prepares the next iteration's epoch.

    If no iterator starts in time, the prepared consumer releases everything, because evictions
    wait for its lease and TensorFlow does not report a dropped dataset. The consumer of a
    broken iteration is closed, but the next one need not verify its shards again.
    """

    def __init__(self, options: LoaderOptions, framework: Framework) -> None:
        self._options = options
        self._framework = framework
        self._maps = MapPool.of(options.root)  # remembers verified shards
        # Reentrant, because the garbage collector may close a consumer in the middle of a call.
        self._lock = threading.RLock()
        self._idle: Consumer | None = None
        self._ahead = False  # the idle consumer has started the next epoch
        self._timer: threading.Timer | None = None
        self._made = 0
        self._closed = False

    @property
    def is_prefetched(self) -> bool:
        return self._ahead

    def begin(self) -> None:
        with self._lock:
            if self._ahead or self._closed:
                return
            consumer = self._idle or self._make()
            consumer.prefetch()
            self._keep(consumer)

    def take(self) -> Consumer:
        with self._lock:
            return self._pop() or self._make()

    def give_back(self, consumer: Consumer, *, whole: bool) -> None:
        with self._lock:
            if whole and not self._closed and self._idle is None:
                self._keep(consumer)
                return
        consumer.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            consumer = self._pop()
        if consumer is not None:
            consumer.close()

    def _keep(self, consumer: Consumer) -> None:
        self._pop()
        self._idle, self._ahead = consumer, True
        # The consumer of a fixed cache may stay, because a fixed cache evicts nothing.
        if not self._options.fixed and not self._closed:
            self._begin_timer(consumer)

    def _pop(self) -> Consumer | None:
        consumer, self._idle, self._ahead = self._idle, None, False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return consumer

    def _begin_timer(self, consumer: Consumer) -> None:
        self._timer = threading.Timer(IDLE_SECONDS, self._rest, [consumer])
        self._timer.daemon = True
        self._timer.start()

    def _rest(self, consumer: Consumer) -> None:
        with self._lock:
            if self._idle is consumer:
                self._ahead = False
                consumer.close()

    def _make(self) -> Consumer:
        options, number = self._options, self._made
        if number:
            seed = derive_seed(options.seed, "iterator", number)
            options = replace(options, seed=seed, min_samples=1)
        self._made = number + 1
        consumer = Consumer(options, self._framework)
        close_at_exit(consumer)
        return consumer


PREFETCH_BATCHES = 2
BATCHES_AT_ONCE = 16
PAUSE_SECONDS = 0.05  # at most, between two "nothing now", because TensorFlow may want to end
ENDLESS_STEPS = 2**40


class GatherPipeline(Pipeline):
    def __init__(self, options: LoaderOptions, form: BatchForm, *, runs_on: bool) -> None:
        super().__init__(options, runs_on=runs_on)
        self._form = form
        self._columns = [TensorColumn(field, loader_style(form)) for field in form.fields]
        self._cuts = not any(field.is_ragged for field in form.fields)
        framework = Framework(batches_at_once=BATCHES_AT_ONCE if self._cuts else 1)
        self._consumers = ConsumerPool(
            _consumer_options(options, form, runs_on=runs_on), framework
        )
        nothing = (array for each in self._columns for array in each.nothing())
        self._nothing = (np.empty(0, np.bool_), *nothing)

    def wait(self) -> None:
        """Wait like every pipeline, and then prepare the epoch, because TensorFlow asks late."""
        goes_on = super()._is_under_way
        super().wait()
        if not goes_on:
            self._consumers.begin()

    @property
    def _is_under_way(self) -> bool:
        return super()._is_under_way or self._consumers.is_prefetched

    def close(self) -> None:
        self._consumers.close()

    def pipeline(self) -> Dataset:
        specs = {name: each for column in self._columns for name, each in column.specs.items()}

        def batch(there: Tensor, *values: Tensor) -> Any:
            return self._batch(dict(zip(specs, values, strict=True)))

        made = GeneratorDataset(
            self._iterate, [tensor_spec(tf.bool, [None]), *specs.values()]
        ).dataset
        # Prefetch comes before the filter, because a filter that waits for a passing element
        # does not notice the end. No map is among them, because TensorFlow would run it ahead.
        made = made.prefetch(1 if self._cuts else PREFETCH_BATCHES)
        made = made.filter(lambda there, *_: tf.size(there) > 0)
        if self._cuts:
            sizes = self._epoch_sizes() or self._options.batch_size
            made = made.rebatch(sizes, drop_remainder=self._of_one_size)
        return made.map(batch)

    @property
    def _of_one_size(self) -> bool:
        options = self._options
        return not options.keep_last or (self._runs_on and options.samples_per_epoch is None)

    def _batch(self, values: Mapping[str, Tensor]) -> Any:
        rows = self._options.batch_size if self._of_one_size else None
        made: dict[str, Tensor] = {}
        for column in self._columns:
            made |= column.tensors(values, rows)
        return self._form.batch(made)

    # --- called by TensorFlow's threads ---

    def _iterate(self) -> Iterator[tuple[Any, ...]]:
        keep_freed_memory()
        self._begun = True
        consumer, whole = self._consumers.take(), False
        try:
            yield from self._epoch(consumer)
            while self._runs_on:
                yield from self._epoch(consumer)
            whole = True
        finally:
            self._consumers.give_back(consumer, whole=whole)

    def _epoch(self, consumer: Consumer) -> Iterator[tuple[Any, ...]]:
        few = PREFETCH_BATCHES * self._options.batch_size
        for made in map(self.arrays, consumer.epoch(PAUSE_SECONDS)):
            several, ready = len(made[0]) > few, [made]
            del made  # its memory is needed when TensorFlow is done with it
            yield ready.pop()
            if several:
                # TensorFlow requests one element ahead. It gets this empty one, and requests the
                # next batch, or the end, only when it needs it.
                yield self._nothing

    def arrays(self, batch: Mapping[str, Any] | None) -> tuple[Any, ...]:
        if batch is None:
            return self._nothing
        arrays = [array for each in self._columns for array in each.arrays(batch)]
        return (np.ones(len(arrays[0]) if self._cuts else 1, np.bool_), *arrays)


def _consumer_options(
    options: LoaderOptions, form: BatchForm, *, runs_on: bool
) -> LoaderOptions:
    wanted = tuple(field.name for field in form.fields)
    options = replace(options, fields=wanted, ragged=loader_style(form), gather="thread")
    if runs_on and options.samples_per_epoch is None:
        return replace(options, samples_per_epoch=ENDLESS_STEPS * options.batch_size)
    return options
