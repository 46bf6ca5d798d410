"""The pipeline in which TensorFlow's own code reads, shuffles, batches and parses.

Python says which shards come, once per shard, and counts where samples came from, once per
block of batches that are decoded at once. Every record goes with a number that tells its shard.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from growcache.errors import CacheError
from growcache.loading.options import LoaderOptions
from growcache.loading.streams import Checked, Pass, ShardStream
from growcache.schema import Array
from growcache.seeding import derive
from growcache.tensorflow.feeds import Dataset, Feed
from growcache.tensorflow.generated import Generated
from growcache.tensorflow.live import end_with_the_interpreter
from growcache.tensorflow.memory import keep_freed_memory
from growcache.tensorflow.records import Records
from growcache.tensorflow.sizes import Cached
from growcache.tensorflow.tensors import Tensor, spec

CYCLE_SHARDS = 4  # shards that are read at a time
PREFETCH_BATCHES = 4
CHUNKS_PER_SHARD = 8  # at least, so that those that are read at a time are mixed
ROW_BITS = 32  # of a record's number; the token of its shard stands above
MOST_SHARDS = 1 << 62  # of an iteration


class NativeFeed(Feed):
    """Tells TensorFlow which shards to read, and hears what it delivered.

    It holds nothing itself: what an iteration holds is in its `ShardStream`, which its
    generator closes.

    Args:
        options: of the loader.
        records: how the cache is read.
        runs_on: whether a pass follows the other.
    """

    def __init__(self, options: LoaderOptions, records: Records, *, runs_on: bool) -> None:
        super().__init__(options, runs_on=runs_on)
        self._records = records
        self._checked = Checked()
        self._passes = itertools.count()
        self._names = itertools.count()
        self._streams: dict[int, ShardStream] = {}
        self._shards: dict[int, Iterator[tuple[str, int, int]]] = {}
        self._numbers: frozenset[int] | None = None

    def close(self) -> None:
        """Nothing outlives an iteration."""

    def pipeline(self) -> Dataset:
        """Return the dataset of decoded batches.

        An iteration is one element of the outermost dataset, whose generator stands still
        while the inner pipeline runs: TensorFlow closes it with the iterator.
        """
        iterations = Generated(self._iterate, [spec(tf.int64)] * 6).dataset
        made = iterations.flat_map(self._batches).prefetch(PREFETCH_BATCHES)
        options = tf.data.Options()
        # The order is the same for the same seed and cache, unless the cache is waited for.
        options.deterministic = True
        return made.with_options(options)

    def _batches(
        self,
        name: Tensor,
        seed: Tensor,
        read_bytes: Tensor,
        chunk_samples: Tensor,
        buffer_samples: Tensor,
        block_samples: Tensor,
    ) -> Dataset:
        """Return the batches of one iteration (this is traced once)."""
        samples = self._in_order(name, read_bytes, chunk_samples)
        if self._options.shuffles:
            samples = samples.shuffle(buffer_samples, seed=seed)
        sizes, full = self._epoch_sizes(), self._full_batches
        if self._records.cuts:
            blocks = self._decoded(name, samples.batch(block_samples))
            return blocks.rebatch(sizes or self._options.batch_size, drop_remainder=full)
        batches = samples.batch(self._options.batch_size, drop_remainder=full)
        return self._decoded(name, batches if sizes is None else batches.rebatch(sizes))

    def _decoded(self, name: Tensor, samples: Dataset) -> Dataset:
        return samples.map(
            lambda numbers, records: self._delivered(name, numbers, records),
            num_parallel_calls=tf.data.AUTOTUNE,
        )

    def _in_order(self, name: Tensor, read_bytes: Tensor, chunk_samples: Tensor) -> Dataset:
        """Return (number, record) of each sample, as shards come and threads read them."""
        # Not from a generator: TensorFlow prepares each function of a pipeline for each
        # iterator anew, and a generator has four.
        shards = _until_stopped(
            tf.data.Dataset.range(MOST_SHARDS), lambda turn: self._shard(name)
        )
        threads = self._records.threads

        def samples(paths: Tensor, token: Tensor, count: Tensor) -> Dataset:
            found = self._samples(name, read_bytes, paths, token, count)
            if threads is None:
                return found
            return found.batch(tf.clip_by_value(count // CHUNKS_PER_SHARD, 1, chunk_samples))

        cycle = CYCLE_SHARDS if self._options.shuffles else 1
        read = shards.interleave(samples, cycle_length=cycle, num_parallel_calls=threads)
        return read if threads is None else read.unbatch()

    @property
    def _full_batches(self) -> bool:
        return self._runs_on or not self._options.keeps_last

    def _shard(self, name: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (paths, token, samples) of the next shard: one path, or none."""
        found = tf.numpy_function(self._next_shard, [name], [tf.string, tf.int64, tf.int64])
        for value, shape in zip(found, ([None], [], []), strict=True):
            value.set_shape(shape)
        return tuple(found)

    def _samples(
        self, name: Tensor, read_bytes: Tensor, paths: Tensor, token: Tensor, count: Tensor
    ) -> Dataset:
        """Return (number, record) of each sample of a shard, and note when it was read.

        The numbers come first, so that they are asked once more behind the last record.
        """
        first = tf.bitwise.left_shift(token, ROW_BITS)
        numbers = tf.data.Dataset.range(first, first + count)
        end = tf.data.Dataset.from_tensors(token).filter(
            lambda token: tf.ensure_shape(
                tf.numpy_function(self._was_read, [name, token], tf.bool), []
            )
        )
        return tf.data.Dataset.zip(
            (numbers.concatenate(end), self._records.read(paths, read_bytes))
        )

    def _delivered(self, name: Tensor, numbers: Tensor, records: Tensor) -> Any:
        counted = tf.numpy_function(self._count, [name, numbers], tf.bool)
        with tf.control_dependencies([counted]):
            return self._records.decode(records)

    # What TensorFlow's threads call

    def _iterate(self) -> Iterator[tuple[int, ...]]:
        keep_freed_memory()
        stream = ShardStream(
            self._options,
            lambda: next(self._passes),
            self._checked,
            endless=self._runs_on,
        )
        name, complete = next(self._names), False
        self._streams[name], self._shards[name] = stream, stream.shards()
        end_with_the_interpreter(stream)
        try:
            first = stream.begin(self._least_samples)
            self._begun = True
            if self._options.fixed:
                self._refuse_change(first)
            seed = derive(self._options.seed, "tensorflow", first.number) % 2**31
            yield name, seed, *self._sizes(first)
            complete = True
        finally:
            del self._streams[name], self._shards[name]
            stream.close(complete=complete)

    def _sizes(self, first: Pass) -> tuple[int, int, int, int]:
        """Return (read bytes, chunk, buffer, block), the latter in samples."""
        sample_bytes = first.snapshot.sample_bytes
        samples = sum(row.samples for row in first.rows)
        cached = Cached(samples, sample_bytes, self._runs_on)
        return (
            self._records.read_bytes(sample_bytes),
            cached.chunk_samples(),
            cached.buffer_samples(),
            cached.block_samples(self._options.batch_size),
        )

    def _next_shard(self, name: np.int64) -> tuple[Array, np.int64, np.int64]:
        shards = self._shards.get(int(name), iter(()))
        path, token, samples = next(shards)  # StopIteration is the dataset's end
        return np.array([path] if path else [], object), np.int64(token), np.int64(samples)

    def _was_read(self, name: np.int64, token: np.int64) -> np.bool_:
        stream = self._streams.get(int(name))
        if stream is not None:
            stream.read(int(token))
        return np.False_

    def _count(self, name: np.int64, numbers: Any) -> np.bool_:
        stream = self._streams.get(int(name))
        if stream is not None:
            stream.delivered(numbers >> ROW_BITS)
        return np.True_

    def _refuse_change(self, first: Pass) -> None:
        numbers = frozenset(row.number for row in first.rows)
        if self._numbers not in (None, numbers):
            raise CacheError(
                f"the shards of {self._options.root} changed under a fixed dataset; give it a "
                "cache with eviction: none"
            )
        self._numbers = numbers


def _until_stopped(dataset: Dataset, function: Any) -> Dataset:
    """Return a map that ends where the function does: `Dataset.map` would take that for an error."""
    made = tf.function(function, autograph=False).get_concrete_function(dataset.element_spec)
    specs = tuple(spec(each.dtype, each.shape) for each in made.structured_outputs)
    variant = tf.raw_ops.MapDataset(
        input_dataset=tf.data.experimental.to_variant(dataset),
        other_arguments=made.captured_inputs,
        f=made,
        output_types=[each.dtype for each in specs],
        output_shapes=[each.shape for each in specs],
        use_inter_op_parallelism=True,
        preserve_cardinality=False,
    )
    return tf.data.experimental.from_variant(variant, specs)
