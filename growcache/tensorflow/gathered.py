"""The pipeline whose batches growcache's own gather puts together.

A thread of `growcache.loading` copies rows out of maps into recycled memory, and that
memory is what TensorFlow's tensors are: each keeps a reference to it, so that it is used
again only once nobody holds the tensor any more. Python is asked once per batch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import tensorflow as tf

from growcache.loading.epochs import Engine
from growcache.loading.options import LoaderOptions
from growcache.loading.streams import wait
from growcache.seeding import derive
from growcache.tensorflow.columns import Column, style_of
from growcache.tensorflow.live import end_with_the_interpreter
from growcache.tensorflow.tensors import Form, Tensor, spec

Dataset: TypeAlias = Any

PREFETCH_BATCHES = 2
PAUSE_SECONDS = 0.05  # at most, between two "nothing now": TensorFlow may want to end
ENDLESS_STEPS = 2**40


class GatherFeed:
    """Makes the pipeline, and gives TensorFlow the next batch when it asks.

    TensorFlow keeps it for as long as the process lives; `close` is for what an iteration
    left behind for the next one.

    Args:
        options: of the loader.
        form: of the batches.
        runs_on: whether one iteration is all epochs.
    """

    def __init__(self, options: LoaderOptions, form: Form, *, runs_on: bool) -> None:
        self._options = options
        self._form = form
        self._columns = [Column(field, style_of(form)) for field in form.fields]
        self._runs_on = runs_on
        self._shares = self._waited = False  # one iterator for all epochs
        self._engines = _Engines(_engine_options(options, form, runs_on=runs_on))
        self._nothing = (False, *(array for each in self._columns for array in each.nothing()))

    def wait(self) -> None:
        """Wait, in the calling thread, until the cache holds enough for the next epoch."""
        shared_runs = self._shares and self._waited
        if not shared_runs and not self._engines.any_idle:  # else the next epoch is under way
            wait(self._options, self._engines.min_samples)
            self._waited = True

    def close(self) -> None:
        """End what waits for the next iteration."""
        self._engines.close()

    def pipeline(self) -> Dataset:
        """Return the batches: of an epoch, or without end."""
        specs = {name: each for column in self._columns for name, each in column.specs.items()}

        def batch(there: Tensor, *values: Tensor) -> Any:
            return self._batch(dict(zip(specs, values, strict=True)))

        made = tf.data.Dataset.from_generator(
            self._iterate, output_signature=(spec(tf.bool), *specs.values())
        )
        # In this order: a filter that waits for what it lets through hears of no end.
        made = made.prefetch(PREFETCH_BATCHES)
        return made.filter(lambda there, *_: there).map(batch)

    def epochs(self) -> Dataset:
        """Return the pipeline cut into epochs that go on where the last one ended."""
        steps = self._options.steps_per_epoch
        assert steps is not None
        iterator, self._shares = iter(self.pipeline()), True
        return tf.data.Dataset.range(steps).map(lambda _: iterator.get_next())

    def _batch(self, values: Mapping[str, Tensor]) -> Any:
        options = self._options
        of_one_size = not options.keeps_last or (
            self._runs_on and options.samples_per_epoch is None
        )
        made: dict[str, Tensor] = {}
        for column in self._columns:
            made |= column.tensors(values, options.batch_size if of_one_size else None)
        return self._form.batch(made)

    # What TensorFlow's threads call

    def _iterate(self) -> Iterator[tuple[Any, ...]]:
        engine, whole = self._engines.take(), False
        try:
            yield from map(self._arrays, engine.epoch(PAUSE_SECONDS))
            while self._runs_on:
                yield from map(self._arrays, engine.epoch(PAUSE_SECONDS))
            whole = True
        finally:
            self._engines.give_back(engine, whole=whole)

    def _arrays(self, batch: Mapping[str, Any] | None) -> tuple[Any, ...]:
        if batch is None:
            return self._nothing
        return (True, *(array for each in self._columns for array in each.arrays(batch)))


def _engine_options(options: LoaderOptions, form: Form, *, runs_on: bool) -> LoaderOptions:
    """Return what a loader delivers the batches of."""
    wanted = tuple(field.name for field in form.fields)
    options = replace(options, fields=wanted, ragged=style_of(form), gather="thread")
    if runs_on and options.samples_per_epoch is None:
        return replace(options, samples_per_epoch=ENDLESS_STEPS * options.batch_size)
    return options


class _Engines:
    """The loaders of a dataset: one per iterator that is under way, and one that waits.

    Where an iteration ended, its loader is ahead in the next epoch already, and waits for
    an iterator; where it was broken off, it ends, and frees its leases.

    Args:
        options: of the first loader. The others have other seeds, so that iterations that
            were broken off do not repeat the same order.

    Attributes:
        min_samples: that the next loader waits for.
    """

    def __init__(self, options: LoaderOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._idle: Engine | None = None
        self._made = 0
        self._closed = False
        self.min_samples = options.min_samples

    @property
    def any_idle(self) -> bool:
        """Whether the next iteration finds a loader that is ahead already."""
        return self._idle is not None

    def take(self) -> Engine:
        """Return a loader for an iteration."""
        with self._lock:
            engine, self._idle = self._idle, None
            return engine or self._make()

    def _make(self) -> Engine:
        options, number = self._options, self._made
        if number:
            seed = derive(options.seed, "iterator", number)
            options = replace(options, seed=seed, min_samples=1)
        self._made, self.min_samples = number + 1, 1
        engine = Engine(options)
        end_with_the_interpreter(engine)
        return engine

    def give_back(self, engine: Engine, *, whole: bool) -> None:
        """Take a loader back.

        Args:
            engine: that `take` returned.
            whole: whether its epoch came to its end.
        """
        with self._lock:
            if whole and not self._closed and self._idle is None:
                self._idle = engine
                return
        engine.close()

    def close(self) -> None:
        """End the one that waits, and those that will be given back."""
        with self._lock:
            self._closed = True
            engine, self._idle = self._idle, None
        if engine is not None:
            engine.close()
