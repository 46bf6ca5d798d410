"""The pipeline whose batches growcache's own gather puts together.

A thread of `growcache.loading` copies rows out of maps into recycled memory, and that
memory is what TensorFlow's tensors are: each keeps a reference to it, so that it is used
again only once nobody holds the tensor any more.

To ask Python takes TensorFlow longer than to copy a batch of small samples. So it is given
some batches at once, where all fields are of fixed shape, and cuts them itself, which copies
nothing; where some are ragged it asks for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from growcache.loading.epochs import Engine
from growcache.loading.framework import Framework
from growcache.loading.options import LoaderOptions
from growcache.tensorflow.columns import Column, style_of
from growcache.tensorflow.engines import Engines
from growcache.tensorflow.feeds import Dataset, Feed
from growcache.tensorflow.generated import Generated
from growcache.tensorflow.memory import keep_freed_memory
from growcache.tensorflow.tensors import Form, Tensor, spec

PREFETCH_BATCHES = 2
AT_ONCE = 16
BLOCK_BYTES = 18_000_000  # few, for an iterator begins with fresh memory
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
        self._cuts = not any(field.is_ragged for field in form.fields)
        framework = Framework(block_bytes=BLOCK_BYTES, at_once=AT_ONCE if self._cuts else 1)
        self._engines = Engines(_engine_options(options, form, runs_on=runs_on), framework)
        nothing = (array for each in self._columns for array in each.nothing())
        self._nothing = (np.empty(0, np.bool_), *nothing)

    def wait(self) -> None:
        """Wait as any feed does, and begin: TensorFlow takes a while until it asks."""
        goes_on = super()._is_under_way
        super().wait()
        if not goes_on:
            self._engines.begin()

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

        made = Generated(self._iterate, [spec(tf.bool, [None]), *specs.values()]).dataset
        # In this order: a filter that waits for what it lets through hears of no end. And
        # without a map among them: TensorFlow would have it run ahead.
        made = made.prefetch(1 if self._cuts else PREFETCH_BATCHES)
        made = made.filter(lambda there, *_: tf.size(there) > 0)
        if self._cuts:
            sizes = self._epoch_sizes() or self._options.batch_size
            made = made.rebatch(sizes, drop_remainder=self._of_one_size)
        return made.map(batch)

    @property
    def _of_one_size(self) -> bool:
        options = self._options
        return not options.keeps_last or (self._runs_on and options.samples_per_epoch is None)

    def _batch(self, values: Mapping[str, Tensor]) -> Any:
        rows = self._options.batch_size if self._of_one_size else None
        made: dict[str, Tensor] = {}
        for column in self._columns:
            made |= column.tensors(values, rows)
        return self._form.batch(made)

    # What TensorFlow's threads call

    def _iterate(self) -> Iterator[tuple[Any, ...]]:
        keep_freed_memory()
        self._begun = True
        engine, whole = self._engines.take(), False
        try:
            yield from self._epoch(engine)
            while self._runs_on:
                yield from self._epoch(engine)
            whole = True
        finally:
            self._engines.give_back(engine, whole=whole)

    def _epoch(self, engine: Engine) -> Iterator[tuple[Any, ...]]:
        few = PREFETCH_BATCHES * self._options.batch_size
        for made in map(self._arrays, engine.epoch(PAUSE_SECONDS)):
            several, ready = len(made[0]) > few, [made]
            del made  # its memory is wanted once TensorFlow has done with it
            yield ready.pop()
            if several:
                # This is what TensorFlow asks for beforehand: what follows, be it the end, it
                # asks for once it wants more.
                yield self._nothing

    def _arrays(self, batch: Mapping[str, Any] | None) -> tuple[Any, ...]:
        if batch is None:
            return self._nothing
        arrays = [array for each in self._columns for array in each.arrays(batch)]
        return (np.ones(len(arrays[0]) if self._cuts else 1, np.bool_), *arrays)


def _engine_options(options: LoaderOptions, form: Form, *, runs_on: bool) -> LoaderOptions:
    """Return what a loader delivers the batches of."""
    wanted = tuple(field.name for field in form.fields)
    options = replace(options, fields=wanted, ragged=style_of(form), gather="thread")
    if runs_on and options.samples_per_epoch is None:
        return replace(options, samples_per_epoch=ENDLESS_STEPS * options.batch_size)
    return options
