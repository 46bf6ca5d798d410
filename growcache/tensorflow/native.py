"""The pipeline in which TensorFlow's own code reads, shuffles, batches and parses (``reader="native"``).

TensorFlow calls Python once per shard, and once per block of batches to count their samples.
Every record carries a number that identifies its shard.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from growcache.cache.formats.tfrecord import SHAPE_SUFFIX, record_layout
from growcache.errors import CacheError
from growcache.loading.maps import MapPool
from growcache.loading.options import LoaderOptions
from growcache.loading.streams import NOTHING_NOW, ShardStream, StreamPass
from growcache.schema import Field, Schema
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
    decode_numbers,
    nested_ragged,
    ragged_rows,
    tensor_spec,
    typed_tensor,
)

# Below this size, passing a record between threads takes as long as reading it.
SMALL_RECORD_BYTES = 16 * 1024

READ_BYTES = 256 * 1024  # TensorFlow's default
UNBUFFERED = 0  # into the record's final memory, which saves a copy


class _FixedRecords:
    """Records of one size.

    TFRecord's checksums are skipped, because the shard's digest was checked.
    """

    def __init__(self, schema: Schema, form: BatchForm) -> None:
        where = record_layout(schema)
        offsets = {field.name: offset for field, offset in where.fields}
        self._record_bytes = where.record_bytes
        small = where.record_bytes < SMALL_RECORD_BYTES
        self.threads: int | None = None if small else tf.data.AUTOTUNE
        self.cuts = True  # slices share the memory
        self._offsets = [(field, offsets[field.name]) for field in form.fields]
        self._form = form

    def read_bytes(self, sample_bytes: int) -> int:
        return READ_BYTES

    def read(self, paths: Tensor, read_bytes: Tensor) -> Dataset:
        found = tf.raw_ops.FixedLengthRecordDatasetV2(
            filenames=paths,
            header_bytes=np.int64(0),
            record_bytes=np.int64(self._record_bytes),
            footer_bytes=np.int64(0),
            buffer_size=read_bytes,
            compression_type="",
        )
        return tf.data.experimental.from_variant(found, tensor_spec(tf.string))

    def decode(self, records: Tensor) -> Any:
        batch = records.shape[0] if records.shape[0] is not None else tf.shape(records)[0]
        rows = tf.reshape(tf.io.decode_raw(records, tf.uint8), [batch, self._record_bytes])
        values = {
            field.name: _fixed_tensor(rows[:, offset : offset + field.nbytes], batch, field)
            for field, offset in self._offsets
        }
        return self._form.batch(values)


def _fixed_tensor(raw: Tensor, batch: Tensor, field: Field) -> Tensor:
    """Return uint8 [batch, nbytes] as tensors ``[batch, *shape]``."""
    dtype, nbytes = tf.as_dtype(field.item_dtype), field.nbytes
    if dtype == tf.bool:
        cells = tf.cast(raw, tf.bool)
    elif dtype.size == 1:
        cells = tf.bitcast(raw, dtype)
    else:
        cells = tf.bitcast(tf.reshape(raw, [batch, nbytes // dtype.size, dtype.size]), dtype)
    return tf.reshape(cells, [batch, *field.fixed_shape])


class _ExampleRecords:
    """Records of different sizes: `tf.train.Example`s, parsed a batch at a time."""

    def __init__(self, form: BatchForm) -> None:
        self.threads: int | None = tf.data.AUTOTUNE
        self.cuts = False
        self._form = form
        self._features = {}
        for field in form.fields:
            self._features[field.name] = tf.io.FixedLenFeature([], tf.string)
            if field.needs_shape:
                shape = tf.io.FixedLenFeature([len(field.shape)], tf.int64)
                self._features[field.name + SHAPE_SUFFIX] = shape

    def read_bytes(self, sample_bytes: int) -> int:
        return READ_BYTES if sample_bytes < SMALL_RECORD_BYTES else UNBUFFERED

    def read(self, paths: Tensor, read_bytes: Tensor) -> Dataset:
        found = tf.raw_ops.TFRecordDataset(
            filenames=paths, compression_type="", buffer_size=read_bytes
        )
        return tf.data.experimental.from_variant(found, tensor_spec(tf.string))

    def decode(self, records: Tensor) -> Any:
        parsed = tf.io.parse_example(records, self._features)
        values: dict[str, Any] = {}
        for field in self._form.fields:
            values |= _decode_field(field, parsed, self._form.style)
        return self._form.batch(values)


# Readers of a cache's records.
RecordReader: TypeAlias = _FixedRecords | _ExampleRecords


def record_reader(schema: Schema, form: BatchForm) -> RecordReader:
    return _ExampleRecords(form) if schema.is_ragged else _FixedRecords(schema, form)


def _decode_field(field: Field, parsed: dict[str, Tensor], style: str) -> dict[str, Any]:
    raw = parsed[field.name]
    if field.is_blob:
        return {field.name: raw}
    if not field.is_ragged:
        return {field.name: typed_tensor(raw, field)}
    flat = decode_numbers(tf.strings.reduce_join(raw), field)
    if style == "offsets" and field.ragged_dims == (0,) and not field.needs_shape:
        return {field.name: ragged_rows(flat, _lengths(raw, field), field)}
    shapes = parsed[field.name + SHAPE_SUFFIX] if field.needs_shape else _shapes(raw, field)
    values = nested_ragged(flat, shapes, field)
    if style == "offsets":
        return {field.name: values}
    lengths = tf.gather(shapes, field.ragged_dims, axis=1)
    if len(field.ragged_dims) == 1:
        lengths = lengths[:, 0]
    return {field.name: values.to_tensor(), f"{field.name}_lengths": lengths}


def _shapes(raw: Tensor, field: Field) -> Tensor:
    """Return the shapes of the values: int64 [batch, rank]."""
    found = _lengths(raw, field)
    sizes = [found if size is None else tf.fill(tf.shape(raw), size) for size in field.dims]
    return tf.stack([tf.cast(size, tf.int64) for size in sizes], axis=1)


def _lengths(raw: Tensor, field: Field) -> Tensor:
    """Return the sizes of the ragged dimension: int64 [batch]."""
    return tf.cast(tf.strings.length(raw), tf.int64) // field.unit_bytes


SHUFFLE_BYTES = 64_000_000  # a small buffer is enough, because shards are mixtures already
SHUFFLE_SAMPLES = 16_384
BUFFERS_PER_PASS = 4

# Passing a record between threads takes TensorFlow 15 us, and a core that must wake up.
CHUNK_BYTES = 2_000_000
CHUNK_SAMPLES = 64
CHUNKS_PER_SHARD = 8  # at least, so that the shards that are read together are mixed

# Counting the origins of a batch in Python takes 0.14 ms of CPU time.
BLOCK_BYTES = 2_000_000
BLOCK_BATCHES = 8
BLOCKS_PER_PASS = 4


@dataclass(frozen=True)
class PipelineSizes:
    """Sizes of buffers and blocks, from the samples that are cached when an iteration starts."""

    samples: int
    sample_bytes: int
    runs_on: bool

    def buffer_samples(self) -> int:
        """Return the size of the shuffle buffer.

        It is small for endless passes, because a sample may stay for several times the buffer's
        size.
        """
        wanted = min(SHUFFLE_SAMPLES, self._fit(SHUFFLE_BYTES))
        most = self.samples // BUFFERS_PER_PASS if self.runs_on else self.samples
        return max(1, min(wanted, most))

    def chunk_samples(self, shard_samples: int) -> int:
        most = min(CHUNK_SAMPLES, self._fit(CHUNK_BYTES))
        return max(1, min(most, shard_samples // CHUNKS_PER_SHARD))

    def block_samples(self, batch_size: int) -> int:
        """Return the size of a block.

        It is small for endless passes, because a block waits for samples that are not cached
        yet.
        """
        batches = min(BLOCK_BATCHES, self._fit(BLOCK_BYTES) // batch_size)
        if self.runs_on:
            batches = min(batches, self.samples // (BLOCKS_PER_PASS * batch_size))
        return batch_size * max(1, batches)

    def _fit(self, nbytes: int) -> int:
        return nbytes // max(1, self.sample_bytes)


CYCLE_SHARDS = 4  # shards that are read together
PREFETCH_BATCHES = 4
# Fewer than one per core, because samples of blocks decoded ahead count as used. A few threads
# are enough, because decoding only copies memory.
MAX_DECODED_BLOCKS = 4  # blocks of batches, at a time
ROW_BITS = 32  # of a record's number; the higher bits are the token of its shard
ENDLESS_TURNS = 1 << 62  # of an endless iteration


class NativeIteration:
    def __init__(self, stream: ShardStream, cached: PipelineSizes) -> None:
        self.stream = stream
        self.cached = cached
        self._shards = stream.shards()
        self._turns = itertools.count()
        self._waiting: dict[int, tuple[str, int, int] | None] = {}
        self._error: Exception | None = None
        self._lock = threading.Lock()

    def shard(self, turn: int) -> tuple[str, int, int] | None:
        """Return the next (path, token, samples).

        Threads ask in any order, and again after an error.
        """
        with self._lock:
            while turn not in self._waiting:
                self._waiting[next(self._turns)] = self._next()
            return self._waiting.pop(turn)

    def _next(self) -> tuple[str, int, int] | None:
        if self._error is not None:
            raise self._error.with_traceback(None)
        try:
            return next(self._shards, None)
        except Exception as error:
            self._error = error
            raise


class NativePipeline(Pipeline):
    """The pipeline of TensorFlow's own readers.

    It holds no lease itself: each iteration's leases are in its `ShardStream`, which its
    generator closes.
    """

    def __init__(self, options: LoaderOptions, records: RecordReader, *, runs_on: bool) -> None:
        super().__init__(options, runs_on=runs_on)
        self._records = records
        self._maps = MapPool.of(options.root)  # remembers verified shards
        self._passes, self._tokens = itertools.count(), itertools.count()
        self._names = itertools.count()
        self._iterations: dict[int, NativeIteration] = {}
        self._numbers: frozenset[int] | None = None

    def close(self) -> None: ...

    def pipeline(self) -> Dataset:
        """Return the dataset of decoded batches.

        An iteration is one element of the outermost dataset. Its generator is suspended while
        the inner pipeline runs, and TensorFlow closes it with the iterator.

        TensorFlow prepares each function of a pipeline anew for each iterator. This takes
        milliseconds, and twice as long for a function that makes an inner dataset. So there are
        few functions, as far outside as possible.
        """
        iterations = GeneratorDataset(self._iterate, [tensor_spec(tf.int64)] * 5).dataset
        sizes, full = self._epoch_sizes(), self._full_batches
        made = iterations.flat_map(self._groups)
        if not self._records.cuts:
            made = made if sizes is None else made.rebatch(sizes)
        made = made.map(self._records.decode, num_parallel_calls=MAX_DECODED_BLOCKS)
        if self._records.cuts:
            made = made.rebatch(sizes or self._options.batch_size, drop_remainder=full)
        options = tf.data.Options()
        # The same seed and cache give the same order, unless the pipeline waits for the cache.
        options.deterministic = True
        return made.prefetch(PREFETCH_BATCHES).with_options(options)

    @property
    def _full_batches(self) -> bool:
        return self._runs_on or not self._options.keep_last

    # --- traced into TensorFlow's graph ---

    def _groups(
        self,
        name: Tensor,
        turns: Tensor,
        seed: Tensor,
        buffer_samples: Tensor,
        block_samples: Tensor,
    ) -> Dataset:
        """Return the batches of an iteration, and count their records.

        They are counted here, because the iteration releases its shards after the last was
        requested.
        """
        threads, shuffles = self._records.threads, self._options.is_shuffled
        samples = tf.data.Dataset.range(turns).interleave(
            lambda turn: self._samples(name, turn),
            cycle_length=CYCLE_SHARDS if shuffles else 1,
            num_parallel_calls=threads,
        )
        if threads is not None:
            samples = samples.unbatch()
        if shuffles:
            samples = samples.shuffle(buffer_samples, seed=seed)
        if self._records.cuts:
            groups = samples.batch(block_samples)
        else:
            groups = samples.batch(self._options.batch_size, drop_remainder=self._full_batches)
        return groups.map(self._delivered)

    def _samples(self, name: Tensor, turn: Tensor) -> Dataset:
        """Return (number, record) pairs of a shard.

        Numbers come first in the zip, because one more is requested after the last record.
        """
        types = [tf.string, *[tf.int64] * 4]
        found = tf.numpy_function(self._shard, [name, turn], types)
        for value, shape in zip(found, ([None], [], [], [], []), strict=True):
            value.set_shape(shape)
        paths, first, stop, chunk, read_bytes = found
        numbers = tf.data.Dataset.range(first, stop)
        end = tf.data.Dataset.from_tensors(first).filter(self._is_read)
        records = self._records.read(paths, read_bytes)
        samples = tf.data.Dataset.zip((numbers.concatenate(end), records))
        return samples if self._records.threads is None else samples.batch(chunk)

    def _is_read(self, first: Tensor) -> Tensor:
        noted = tf.numpy_function(self._was_read, [first], tf.bool)
        noted.set_shape([])
        return noted

    def _delivered(self, numbers: Tensor, records: Tensor) -> Any:
        counted = tf.numpy_function(self.count, [numbers], tf.bool)
        with tf.control_dependencies([counted]):
            return tf.identity(records)

    # --- called by TensorFlow's threads ---

    def _iterate(self) -> Iterator[tuple[int, ...]]:
        keep_freed_memory()
        stream = ShardStream(
            self._options,
            lambda: next(self._passes),
            endless=self._runs_on,
            tokens=self._tokens,
        )
        close_at_exit(stream)
        name = next(self._names)
        try:
            first = stream.begin(self._least_samples)
            self._begun = True
            if self._options.fixed:
                self._refuse_change(first)
            # One more turn, in which the stream learns that no further shard is wanted.
            turns = ENDLESS_TURNS if self._runs_on else len(first.rows) + 1
            samples = sum(row.samples for row in first.rows)
            cached = PipelineSizes(samples, first.snapshot.sample_bytes, self._runs_on)
            self._iterations[name] = NativeIteration(stream, cached)
            yield (
                name,
                turns,
                derive_seed(self._options.seed, "tensorflow", first.number) % 2**31,
                cached.buffer_samples(),
                cached.block_samples(self._options.batch_size),
            )
        finally:
            self._iterations.pop(name, None)
            stream.close()

    def _shard(self, name: np.int64, turn: np.int64) -> tuple[Any, ...]:
        """Return (paths, first number, end, chunk, read bytes), with one path or none."""
        iteration = self._iterations.get(int(name))
        found = iteration.shard(int(turn)) if iteration else None
        if iteration is None or iteration.stream.closed:
            raise StopIteration  # ends the iteration
        path, token, samples = found or ("", NOTHING_NOW, 0)
        first = token << ROW_BITS
        chunk = iteration.cached.chunk_samples(samples)
        read_bytes = self._records.read_bytes(iteration.cached.sample_bytes)
        numbers = map(np.int64, (first, first + samples, chunk, read_bytes))
        return np.array([path] if path else [], object), *numbers

    def _was_read(self, first: np.int64) -> np.bool_:
        for iteration in list(self._iterations.values()):
            iteration.stream.read(int(first) >> ROW_BITS)
        return np.False_

    def count(self, numbers: Any) -> np.bool_:
        for iteration in list(self._iterations.values()):
            iteration.stream.delivered(numbers >> ROW_BITS)
        return np.True_

    def _refuse_change(self, first: StreamPass) -> None:
        numbers = frozenset(row.number for row in first.rows)
        if self._numbers not in (None, numbers):
            raise CacheError(
                f"the shards of {self._options.root} changed under a fixed dataset; give it a "
                "cache with eviction: none",
                code="GC606",
            )
        self._numbers = numbers
