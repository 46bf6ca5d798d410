"""TensorFlow's front door: epochs over a cache as a `tf.data.Dataset`.

TensorFlow's own code reads, shuffles, batches and parses. Python says which shards come,
once per shard, and counts where the samples of a batch came from, once per batch.
"""

from __future__ import annotations

import atexit
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias
from weakref import WeakSet

import numpy as np
import tensorflow as tf

from growcache.cache.formats.tfrecord_ragged import SHAPE
from growcache.cache.identity import read_identity
from growcache.errors import CacheError, ConfigError, FormatError
from growcache.loading.maps import Verify
from growcache.loading.options import LoaderOptions, missing, names_of
from growcache.loading.streams import Checked, Pass, ShardStream, wait
from growcache.loading.waiting import wait_for_samples
from growcache.schema import Field, Schema
from growcache.seeding import derive

__all__ = ["EpochDataset", "dataset"]

Tensor: TypeAlias = Any  # TensorFlow has no types
Dataset: TypeAlias = Any
Spec: TypeAlias = Any

SHUFFLE_BYTES = 64_000_000  # shards are mixtures already, so a small buffer mixes enough
SHUFFLE_SAMPLES = 16_384
BUFFERS_PER_PASS = 4
CYCLE_SHARDS = 4  # shards that are read at a time
PREFETCH_BATCHES = 4
QUIET_SECONDS = 0.05  # is enough for calls that are under way

# What decode_raw has no kernel for is read as an integer of that size first.
SAME_SIZE = {"uint32": "int32", "uint64": "int64"}
DECODABLE = frozenset(
    {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "float16", "float32"}
    | {"float64", "complex64", "complex128"}
)


_streams: WeakSet[ShardStream] = WeakSet()


def dataset(
    path: str | os.PathLike[str],
    *,
    batch_size: int,
    min_samples: int = 1000,
    samples_per_epoch: int | None = None,
    seed: int = 0,
    shuffle: bool = True,
    drop_last: bool = True,
    fixed: bool = False,
    fields: Sequence[str] | None = None,
    as_tuple: Sequence[str] | None = None,
    ragged: Literal["offsets", "pad"] = "offsets",
    job: str = "default",
    endless: bool = False,
    verify: Verify = "first",
) -> EpochDataset:
    """Return batches from a growing cache; every iteration is a new epoch over what is there.

    The shards of an epoch are leased while TensorFlow needs them. The lease ends with the
    iterator, or with its last reference. Keras keeps the length of the first epoch that it
    sees, so give it ``endless``, or ``samples_per_epoch``.

    Args:
        path: of the cache directory. It need not exist yet, but its samples must be known
            before there is a dataset: this waits for the first ones, and says so.
        batch_size: samples per batch.
        min_samples: wait until so many are cached, or the whole population is.
        samples_per_epoch: None makes an epoch of everything that is cached, so it grows; a
            number makes every epoch of exactly so many samples, part of a pass over the
            cache or several; the next iteration goes on where the last one ended.
        seed: of the order.
        shuffle: False gives shards by number and samples as they were drawn.
        drop_last: leave a last, smaller batch out.
        fixed: wait until the cache is complete; then every epoch is one pass in order, and
            its last batch is kept. For validation.
        fields: names of the cache's fields that are wanted; the others are not decoded.
        as_tuple: names of fields; batches are tuples of these instead of dicts.
        ragged: how fields whose values differ in size come: ``offsets`` as
            `tf.RaggedTensor`, ``pad`` as tensors with zeros behind each value, whose sizes
            are in ``x_lengths``, int64 [batch], or [batch, k] for k ragged dimensions.
            bytes and str come as `tf.string`.
        job: in whose name uses are counted.
        endless: one pipeline that runs on from pass to pass without a gap, each over what
            is cached by then: ``model.fit(endless, steps_per_epoch=400, epochs=90)``. It
            has no epochs of its own, so ``samples_per_epoch`` has no bearing on it.
        verify: check a shard before this process first reads it, or in every pass.

    Returns:
        A `tf.data.Dataset` of dicts of field name to tensor [batch, *shape], in the dtype
        of the schema; the batch dimension is static where every batch is full.

    Raises:
        ConfigError: arguments that cannot be meant, or a cache of another format than
            tfrecord.
        FormatError: a field has a dtype that TensorFlow does not have.
        CacheError: the cache is complete without a sample.
    """
    options = LoaderOptions(
        path=path,
        batch_size=batch_size,
        min_samples=min_samples,
        samples_per_epoch=samples_per_epoch,
        seed=seed,
        shuffle=shuffle,
        drop_last=drop_last,
        fixed=fixed,
        fields=names_of("fields", fields),
        ragged=ragged,
        job=job,
        verify=verify,
    )
    if endless and fixed:
        raise ConfigError(
            "endless and fixed exclude one another: a fixed epoch ends; use "
            "dataset(..., fixed=True).repeat() to go on with the next one"
        )
    if endless:
        # Its batches run on across passes, so there is no last one to leave out.
        options = replace(options, samples_per_epoch=None, drop_last=False)
    if ragged not in ("offsets", "pad"):
        raise ConfigError(f"ragged must be offsets or pad for TensorFlow, found {ragged!r}")
    decode = _decoder(_schema(options), options, names_of("as_tuple", as_tuple))
    runs_on = endless or samples_per_epoch is not None
    made = _Feed(options, decode, runs_on=runs_on).pipeline()
    if endless:
        made = made.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
    elif runs_on:
        made = _epochs_of(made, options)
    return EpochDataset(made, options)


class EpochDataset(tf.data.Dataset):  # type: ignore[misc]
    """A `tf.data.Dataset` that waits for its cache in the thread that iterates it.

    TensorFlow would wait in one of its own threads, where Ctrl-C does not reach.
    """

    def __init__(self, made: Dataset, options: LoaderOptions) -> None:
        self._made = made
        self._options = options
        self._begun = False
        super().__init__(tf.data.experimental.to_variant(made))

    def _inputs(self) -> list[Dataset]:
        return [self._made]

    @property
    def element_spec(self) -> Spec:
        """What a batch is made of: a dict, or a tuple, of `tf.TensorSpec`."""
        return self._made.element_spec

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the next epoch, once the cache holds enough for it."""
        if tf.executing_eagerly():
            wait(self._options, 1 if self._begun else self._options.min_samples)
            self._begun = True
        iterator: Iterator[Any] = super().__iter__()
        return iterator


def _schema(options: LoaderOptions) -> Schema:
    """Return the schema of the cache's samples, once it is known."""
    identity = read_identity(options.root) or wait_for_samples(options.root, 1).identity
    assert identity is not None  # it is written before the first sample
    if identity.cache_format != "tfrecord":
        raise ConfigError(
            f"growcache.tensorflow reads caches of format tfrecord, {options.root} is of format "
            f"{identity.cache_format}; set cache.format: tfrecord and fill another one, or use "
            "growcache.numpy"
        )
    return identity.schema


def _epochs_of(batches: Dataset, options: LoaderOptions) -> Dataset:
    """Cut an endless dataset into epochs that go on where the last one ended."""
    steps = options.steps_per_epoch
    assert steps is not None
    iterator = iter(batches)
    return tf.data.Dataset.range(steps).map(lambda _: iterator.get_next())


class _Feed:
    """Makes the pipeline, and answers what TensorFlow asks while it runs.

    TensorFlow keeps it for as long as the process lives, so it holds nothing itself: what
    an iteration holds is in its `ShardStream`, which its generator closes.
    """

    def __init__(
        self,
        options: LoaderOptions,
        decode: Callable[[Tensor], Any],
        *,
        runs_on: bool,
    ) -> None:
        self._options = options
        self._decode = decode
        self._runs_on = runs_on
        self._checked = Checked()
        self._passes = itertools.count()
        self._names = itertools.count()
        self._streams: dict[int, ShardStream] = {}
        self._begun = False
        self._numbers: frozenset[int] | None = None

    def pipeline(self) -> Dataset:
        """Return the dataset of decoded batches.

        An iteration is one element of the outermost dataset, whose generator stands still
        while the inner pipeline runs: TensorFlow closes it with the iterator.
        """
        iterations = tf.data.Dataset.from_generator(
            self._iterate, output_signature=(_spec(tf.int64), _spec(tf.int64), _spec(tf.int64))
        )
        made = iterations.flat_map(self._batches).prefetch(PREFETCH_BATCHES)
        options = tf.data.Options()
        # The order is the same for the same seed and cache, unless the cache is waited for.
        options.deterministic = True
        return made.with_options(options)

    def _batches(self, name: Tensor, buffer_samples: Tensor, seed: Tensor) -> Dataset:
        """Return the batches of one iteration (this is traced once)."""
        options = self._options
        shuffled = options.shuffle and not options.fixed
        shards = tf.data.Dataset.from_generator(
            self._shards,
            args=(name,),
            output_signature=(_spec(tf.string, [None]), _spec(tf.int64)),
        )
        samples = shards.interleave(
            lambda paths, token: self._samples(name, paths, token),
            cycle_length=CYCLE_SHARDS if shuffled else 1,
            num_parallel_calls=tf.data.AUTOTUNE,
        )
        if shuffled:
            samples = samples.shuffle(buffer_samples, seed=seed)
        samples = samples.batch(options.batch_size, drop_remainder=self._full_batches)
        sizes = self._epoch_sizes()
        if sizes is not None:
            samples = samples.rebatch(sizes)
        return samples.map(
            lambda records, tokens: self._delivered(name, records, tokens),
            num_parallel_calls=tf.data.AUTOTUNE,
        )

    @property
    def _full_batches(self) -> bool:
        return self._runs_on or not self._options.keeps_last

    def _epoch_sizes(self) -> list[int] | None:
        """Return the batch sizes of an epoch whose last batch is kept and is smaller."""
        options = self._options
        if options.samples_per_epoch is None or not options.keeps_last:
            return None
        whole, rest = divmod(options.samples_per_epoch, options.batch_size)
        return [options.batch_size] * whole + [rest] if rest else None

    def _samples(self, name: Tensor, paths: Tensor, token: Tensor) -> Dataset:
        """Return (record, token) of each sample of a shard, and note when it was read."""
        records = tf.data.TFRecordDataset(paths)
        tokens = tf.data.Dataset.from_tensors(token).repeat()
        end = tf.data.Dataset.from_tensors((b"", token)).filter(
            lambda _, token: tf.ensure_shape(
                tf.numpy_function(self._was_read, [name, token], tf.bool), []
            )
        )
        return tf.data.Dataset.zip((records, tokens)).concatenate(end)

    def _delivered(self, name: Tensor, records: Tensor, tokens: Tensor) -> Any:
        counted = tf.numpy_function(self._count, [name, tokens], tf.bool)
        with tf.control_dependencies([counted]):
            return self._decode(records)

    # What TensorFlow's threads call

    def _iterate(self) -> Iterator[tuple[int, int, int]]:
        stream = ShardStream(
            self._options,
            lambda: next(self._passes),
            self._checked,
            endless=self._runs_on,
        )
        name, complete = next(self._names), False
        self._streams[name] = stream
        _streams.add(stream)
        try:
            first = stream.begin(1 if self._begun else self._options.min_samples)
            self._begun = True
            if self._options.fixed:
                self._refuse_change(first)
            seed = derive(self._options.seed, "tensorflow", first.number) % 2**31
            yield name, self._buffer_samples(first), seed
            complete = True
        finally:
            del self._streams[name]
            stream.close(complete=complete)

    def _shards(self, name: np.int64) -> Iterator[tuple[list[str], int]]:
        stream = self._streams.get(int(name))
        if stream is None:
            return
        for path, token in stream.shards():
            yield [path] if path else [], token

    def _was_read(self, name: np.int64, token: np.int64) -> np.bool_:
        stream = self._streams.get(int(name))
        if stream is not None:
            stream.read(int(token))
        return np.False_

    def _count(self, name: np.int64, tokens: Any) -> np.bool_:
        stream = self._streams.get(int(name))
        if stream is not None:
            stream.delivered(tokens)
        return np.True_

    def _buffer_samples(self, first: Pass) -> int:
        """Return the size of the shuffle buffer.

        Where passes run on, it stays well below one: a sample may be left in the buffer for
        several times its size, and nothing but chance ends that.
        """
        wanted = min(SHUFFLE_SAMPLES, SHUFFLE_BYTES // max(1, first.snapshot.sample_bytes))
        cached = sum(row.samples for row in first.rows)
        most = cached // BUFFERS_PER_PASS if self._runs_on else cached
        return max(1, min(wanted, most))

    def _refuse_change(self, first: Pass) -> None:
        numbers = frozenset(row.number for row in first.rows)
        if self._numbers not in (None, numbers):
            raise CacheError(
                f"the shards of {self._options.root} changed under a fixed dataset; give it a "
                "cache with eviction: none"
            )
        self._numbers = numbers


@atexit.register
def _end_streams() -> None:
    """Have TensorFlow's threads call Python no more before the interpreter goes.

    A thread that asks again and again for the next shard would never return from a call
    into an interpreter that has ended, and TensorFlow waits for its threads.
    """
    streams = list(_streams)
    for stream in streams:
        stream.close()
    if streams:
        time.sleep(QUIET_SECONDS)


def _spec(dtype: Any, shape: Sequence[int | None] = ()) -> Spec:
    return tf.TensorSpec(shape, dtype)


def _decoder(
    schema: Schema, options: LoaderOptions, as_tuple: tuple[str, ...] | None
) -> Callable[[Tensor], Any]:
    """Return the function that makes tensors of a batch of records.

    Raises:
        ConfigError: ``as_tuple`` or ``fields`` names a field that is not there.
        FormatError: a field that TensorFlow cannot hold.
    """
    fields = options.chosen(schema).fields
    made = {name: field for field in fields for name in _made_of(field, options.ragged)}
    for name in as_tuple or ():
        if name not in made:
            raise ConfigError(f"as_tuple: {missing(name, list(made))}")
    if as_tuple is not None:
        fields = tuple(dict.fromkeys(made[name] for name in as_tuple))
    features = {}
    for field in fields:
        _refuse_unknown(field)
        features[field.name] = tf.io.FixedLenFeature([], tf.string)
        if field.needs_shape:
            features[field.name + SHAPE] = tf.io.FixedLenFeature([len(field.shape)], tf.int64)

    def decode(records: Tensor) -> Any:
        parsed = tf.io.parse_example(records, features)
        values: dict[str, Any] = {}
        for field in fields:
            values |= _decoded(field, parsed, options.ragged)
        return values if as_tuple is None else tuple(values[name] for name in as_tuple)

    return decode


def _made_of(field: Field, style: str) -> tuple[str, ...]:
    """Return the names in a batch that come of a field."""
    padded = style == "pad" and field.is_ragged and not field.is_blob
    return (field.name, f"{field.name}_lengths") if padded else (field.name,)


def _decoded(field: Field, parsed: dict[str, Tensor], style: str) -> dict[str, Any]:
    """Return what a batch holds of a field."""
    raw = parsed[field.name]
    if field.is_blob:
        return {field.name: raw}
    if not field.is_ragged:
        return {field.name: _typed(raw, field)}
    shapes = parsed[field.name + SHAPE] if field.needs_shape else _shapes(raw, field)
    values = _nested(raw, shapes, field)
    if style == "offsets":
        return {field.name: values}
    lengths = tf.gather(shapes, field.ragged_dims, axis=1)
    if len(field.ragged_dims) == 1:
        lengths = lengths[:, 0]
    return {field.name: values.to_tensor(), f"{field.name}_lengths": lengths}


def _shapes(raw: Tensor, field: Field) -> Tensor:
    """Return the shapes, int64 [batch, rank], of values whose bytes tell them."""
    found = tf.cast(tf.strings.length(raw), tf.int64) // field.unit_bytes
    sizes = [found if size is None else tf.fill(tf.shape(raw), size) for size in field.dims]
    return tf.stack([tf.cast(size, tf.int64) for size in sizes], axis=1)


def _nested(raw: Tensor, shapes: Tensor, field: Field) -> Tensor:
    """Return strings [batch] as a ragged tensor, uniform in what is fixed."""
    last = field.ragged_dims[-1]
    rows = [tf.reduce_prod(shapes[:, :level], axis=1) for level in range(last + 2)]
    values = tf.reshape(
        _numbers(tf.strings.reduce_join(raw), field),
        [tf.reduce_sum(rows[last + 1]), *field.dims[last + 1 :]],
    )
    for level in range(last, -1, -1):
        size = field.dims[level]
        if size is None:
            lengths = tf.repeat(shapes[:, level], rows[level])
            values = tf.RaggedTensor.from_row_lengths(values, lengths, validate=False)
        else:
            values = tf.RaggedTensor.from_uniform_row_length(
                values, size, nrows=tf.reduce_sum(rows[level]), validate=False
            )
    return values


def _refuse_unknown(field: Field) -> None:
    name = field.item.name
    if name not in DECODABLE and name not in SAME_SIZE:
        raise FormatError(
            f"field {field.name!r} has dtype {name}, which TensorFlow does not have; cast it in "
            "sampling.transform, or leave it out by fields"
        )


def _typed(raw: Tensor, field: Field) -> Tensor:
    """Return strings [batch] as tensors [batch, *shape]."""
    batch = raw.shape[0] if raw.shape[0] is not None else tf.shape(raw)[0]
    return tf.reshape(_numbers(raw, field), [batch, *field.fixed_shape])


def _numbers(raw: Tensor, field: Field) -> Tensor:
    """Return strings, all of one length, as numbers of the field's dtype."""
    wanted = field.item.name
    stored = SAME_SIZE.get(wanted, wanted)
    flat = tf.io.decode_raw(raw, tf.as_dtype(stored))
    return flat if stored == wanted else tf.bitcast(flat, tf.as_dtype(wanted))
