"""The pipeline whose batches growcache's own gather puts together.

A thread of `growcache.loading` copies rows out of maps into recycled memory, and that
memory is what TensorFlow's tensors are: each keeps a reference to it, so that it is used
again only once nobody holds the tensor any more. Python is asked once per batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import tensorflow as tf

from growcache.loading.options import LoaderOptions
from growcache.tensorflow.columns import Column, style_of
from growcache.tensorflow.engines import Engines
from growcache.tensorflow.feeds import Dataset, Feed
from growcache.tensorflow.tensors import Form, Tensor, spec

PREFETCH_BATCHES = 2
PAUSE_SECONDS = 0.05  # at most, between two "nothing now": TensorFlow may want to end
ENDLESS_STEPS = 2**40


class GatherFeed(Feed):
    """Gives TensorFlow the next batch of growcache's when it asks.

    Args:
        options: of the loader.
        form: of the batches.
        runs_on: whether one iteration is all epochs.
    """

    def __init__(self, options: LoaderOptions, form: Form, *, runs_on: bool) -> None:
        super().__init__(options, runs_on=runs_on)
        self._form = form
        self._columns = [Column(field, style_of(form)) for field in form.fields]
        self._engines = Engines(_engine_options(options, form, runs_on=runs_on))
        self._nothing = (False, *(array for each in self._columns for array in each.nothing()))

    @property
    def _is_under_way(self) -> bool:
        return super()._is_under_way or self._engines.any_ahead

    def close(self) -> None:
        """End what is ready for the next iteration."""
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
        self._begun = True
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
