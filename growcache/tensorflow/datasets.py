"""`growcache.tensorflow.dataset`, and `files` for users' own pipelines."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, Self, TypeAlias, cast, overload

import tensorflow as tf

from growcache.cache.side_files import read_identity
from growcache.cache.system import release_at_sigterm
from growcache.errors import ConfigError
from growcache.loading.maps import Verify
from growcache.loading.options import LoaderOptions, field_names
from growcache.loading.snapshot import Snapshot
from growcache.loading.streams import open_stream_pass
from growcache.loading.waiting import wait_for_samples
from growcache.schema import Schema
from growcache.tensorflow.gather import GatherPipeline
from growcache.tensorflow.native import NativePipeline, record_reader
from growcache.tensorflow.pipeline import Dataset, Pipeline
from growcache.tensorflow.tensors import BatchForm, Spec


class Files(Sequence[str]):
    """The TFRecord files of one snapshot of a cache, which are not deleted before `close`.

    A sequence of the paths, and a context manager. The lease on the files ends with `close`,
    with the last reference to this object, and with the process. Keep this object for as long
    as a dataset reads the files.

    Attributes:
        paths: Paths of the files, in the order of an epoch.
        samples: Number of samples in all files.
    """

    def __init__(self, snapshot: Snapshot, numbers: Sequence[int]) -> None:
        self._snapshot = snapshot
        self.paths = [os.fspath(snapshot.file(number)) for number in numbers]
        self.samples = len(snapshot)

    def __len__(self) -> int:
        return len(self.paths)

    @overload
    def __getitem__(self, i: int) -> str: ...

    @overload
    def __getitem__(self, i: slice) -> list[str]: ...

    def __getitem__(self, i: int | slice) -> str | list[str]:
        return self.paths[i]

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def close(self) -> None:
        """Release the files, which may then be deleted. A second call does nothing."""
        self._snapshot.close()

    @property
    def closed(self) -> bool:
        """Whether the files may be deleted."""
        return self._snapshot.closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "held"
        return f"<Files: {self.samples} samples in {len(self)} files, {state}>"


def files(
    path: str | os.PathLike[str],
    *,
    min_samples: int = 1,
    seed: int = 0,
    shuffle: bool = True,
    job: str = "default",
) -> Files:
    """Return the TFRecord files that are cached now, and protect them from eviction.

    Use it for your own pipelines, ``tf.data.TFRecordDataset(held.paths)``, while a service runs
    on the cache. Without the lease, files would be deleted while they are read. Each call takes
    a new snapshot, and counts as a use of every sample in it. Close the files after each epoch,
    because they cannot be evicted before.

    Args:
        path: Path of a cache directory of format tfrecord.
        min_samples: Samples that must be cached before the call returns, or the whole
            population if that is smaller.
        seed: Seed of the order of the files. Use another one for each epoch.
        shuffle: False orders the files by number.
        job: Name under which uses are counted.

    Returns:
        The files; close them after use.

    Raises:
        ConfigError: The cache has another format, or an argument is not valid.
        CacheError: The cache is complete and has no samples.

    Example::

        with growcache.tensorflow.files("/data/cache", seed=epoch) as held:
            for record in tf.data.TFRecordDataset(held.paths):
                ...
    """
    options = LoaderOptions(
        path=path,
        batch_size=1,
        min_samples=min_samples,
        seed=seed,
        shuffle=shuffle,
        job=job,
    )
    identity = read_identity(options.root) or wait_for_samples(options.root, 1).identity
    if identity is not None and identity.cache_format != "tfrecord":
        raise ConfigError(
            f"{options.root} is of format {identity.cache_format}, and has no TFRecord files; use "
            'growcache.tensorflow.dataset(..., reader="gather"), or set cache.format: tfrecord and '
            "fill another cache",
            code="GC612",
        )
    opened = open_stream_pass(options, 0, min_samples)
    numbers = [row.number for row in opened.rows]
    opened.snapshot.mark_read(numbers)  # they stay protected until the snapshot is closed
    opened.snapshot.lease.count(len(opened.snapshot))  # TensorFlow does not report its reads
    return Files(opened.snapshot, numbers)


Reader: TypeAlias = Literal["native", "gather"]

READERS: tuple[Reader, ...] = ("native", "gather")


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
    reader: Reader = "native",
) -> EpochDataset:
    """Return batches from a growing cache.

    Each iteration is a new epoch over the shards cached by then.

    The call waits until the cache knows the schema of its samples, and logs that it waits.

    The shards of an epoch are leased while TensorFlow needs them. The lease ends with the
    iterator or its last reference, with two exceptions. With ``samples_per_epoch`` the rest of
    the pass stays leased as long as this dataset, or one made from it, exists. With
    ``reader="gather"`` the start of the next epoch is prepared, and released if no iteration
    starts within 5 seconds.

    Keras keeps the length of the first epoch, so use ``endless`` or ``samples_per_epoch`` with
    it. The dataset knows no ranks: each process of a job gets all samples of its cache.

    Args:
        path: Path of the cache directory. It need not exist yet.
        batch_size: Samples per batch.
        min_samples: Samples that must be cached before an epoch starts, or the whole population
            if that is smaller.
        samples_per_epoch: Samples of an epoch, in whole batches unless ``drop_last`` is False.
            An epoch is then a part of a pass over the cache, or several passes; the next
            iteration continues where it ended. With None an epoch is one pass over everything
            that is cached, so epochs grow with the cache.
        seed: Seed of the order.
        shuffle: False delivers shards by number, and samples in the order in which they were
            drawn.
        drop_last: Leave out the last batch if it is smaller than ``batch_size``.
        fixed: Wait until the cache is complete. Every epoch is then one pass in order, and its
            last batch is kept. Use it for validation.
        fields: Names of the fields to deliver; other fields are not decoded. None delivers all.
        as_tuple: Names of fields. Batches are tuples of these fields, in this order, instead of
            dicts.
        ragged: How ragged fields are delivered. ``"offsets"``: as `tf.RaggedTensor`. ``"pad"``:
            as tensors with zeros after each value, and with the sizes in ``x_lengths``, int64
            ``[batch]``, or ``[batch, k]`` for k ragged dimensions. Bytes and strings are
            delivered as `tf.string`.
        job: Name under which uses are counted.
        endless: Return one dataset without end, which goes from pass to pass without a gap,
            each pass over the shards cached by then:
            ``model.fit(endless, steps_per_epoch=400, epochs=90)``. It has no epochs, so
            ``samples_per_epoch`` has no effect.
        verify: ``"first"`` checks a shard before this process first reads it, ``"always"`` in
            every pass.
        reader: ``"native"``: TensorFlow's own code reads, shuffles and parses. ``"gather"``:
            growcache does, and its memory becomes TensorFlow's tensors. That is faster, most of
            all for large samples, and works for caches of any format. It runs Python code once
            per large or ragged batch, and once per several small ones, so a training step in
            pure Python delays it more.

    Returns:
        A `tf.data.Dataset` of dicts of field name to tensor ``[batch, *shape]``, in the dtype
        of the schema. The batch dimension is static if every batch is full.

    Raises:
        ConfigError: An argument is not valid, or ``reader="native"`` meets a cache of another
            format than tfrecord.
        FormatError: A field has a dtype that TensorFlow does not have.
        CacheError: The cache is complete and has no samples.

    Example::

        train = growcache.tensorflow.dataset(
            "/data/cache", batch_size=64, as_tuple=["x", "y"], endless=True
        )
        model.fit(train, steps_per_epoch=400, epochs=90)
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
        fields=field_names("fields", fields),
        ragged=ragged,
        job=job,
        verify=verify,
    )
    if endless and fixed:
        raise ConfigError(
            "endless and fixed exclude one another: a fixed epoch ends; use dataset(..., "
            "fixed=True).repeat() to continue with the next one",
            code="GC601",
        )
    if endless:
        # Its batches continue across passes, so there is no last one to leave out.
        options = replace(options, samples_per_epoch=None, drop_last=False)
    if ragged not in ("offsets", "pad"):
        raise ConfigError(
            f"ragged must be offsets or pad for TensorFlow, found {ragged!r}", code="GC601"
        )
    if reader not in READERS:
        raise ConfigError(f"reader must be native or gather, found {reader!r}", code="GC601")
    release_at_sigterm()
    schema = _wait_for_schema(options, reader)
    form = BatchForm.of(schema, options, field_names("as_tuple", as_tuple))
    runs_on = endless or samples_per_epoch is not None
    feed: Pipeline
    if reader == "gather":
        feed = GatherPipeline(options, form, runs_on=runs_on)
    else:
        feed = NativePipeline(options, record_reader(schema, form), runs_on=runs_on)
    made = feed.epochs() if runs_on and not endless else feed.pipeline()
    if endless:
        made = made.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
    bare = reader == "gather" or (runs_on and not endless)
    return EpochDataset(made, feed, bare=bare, classes=schema.classes)


class EpochDataset(tf.data.Dataset):  # type: ignore[misc]
    """A `tf.data.Dataset` that waits for its cache in the iterating thread.

    TensorFlow would wait in one of its own threads, which Ctrl-C does not reach.
    """

    def __init__(
        self, made: Dataset, feed: Pipeline, *, bare: bool, classes: dict[str, list[str]]
    ) -> None:
        """~"""
        self._classes = classes
        self._made = made
        self._feed = feed
        self._alone = made.with_options(_unoptimized(tunes=not bare))
        # TensorFlow keeps the feed forever, and does not report when its dataset is freed.
        weakref.finalize(self, feed.close)
        super().__init__(tf.data.experimental.to_variant(made))

    def _inputs(self) -> list[Dataset]:
        return [self._made]

    @property
    def classes(self) -> dict[str, list[str]]:
        """Names of classes by field, for each field of the cache that has classes."""
        return {name: list(names) for name, names in self._classes.items()}

    @property
    def element_spec(self) -> Spec:
        """Spec of a batch: a dict or a tuple of `tf.TensorSpec`, or of `tf.RaggedTensorSpec`."""
        return self._made.element_spec

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the next epoch, after the cache holds enough samples."""
        iterator: Any
        if tf.executing_eagerly():
            self._feed.wait()
            iterator = iter(self._alone)
            # In `for batch in dataset(...)` nothing else keeps the dataset alive, and its end
            # closes the feed.
            iterator._keeps = self
        else:
            iterator = super().__iter__()
        return cast("Iterator[Any]", iterator)


def _unoptimized(*, tunes: bool) -> Any:
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False
    options.autotune.enabled = tunes
    return options


def _wait_for_schema(options: LoaderOptions, reader: Reader) -> Schema:
    identity = read_identity(options.root) or wait_for_samples(options.root, 1).identity
    assert identity is not None  # it is written before the first sample
    if reader == "native" and identity.cache_format != "tfrecord":
        raise ConfigError(
            f"TensorFlow itself reads caches of format tfrecord, {options.root} is of format "
            f'{identity.cache_format}; use reader="gather", or set cache.format: tfrecord and '
            "fill another one",
            code="GC612",
        )
    return identity.schema
