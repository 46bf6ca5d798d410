"""`growcache.tensorflow.dataset`, and `files` for pipelines of the user's own."""

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
    """The TFRecord files of one snapshot of a cache; none of them is deleted before `close`.

    A context manager, and a sequence of the paths. The lease ends with `close`, with the last
    reference to this object, and with the process. So keep it for as long as a dataset reads
    the files.

    Attributes:
        paths: of the files, in the order of an epoch.
        samples: in all of them.
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
        """Let go of the files, which may be deleted from now on; twice is harmless."""
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
    """Return the TFRecord files that are cached now, and keep them from being evicted.

    For pipelines written by hand, ``tf.data.TFRecordDataset(held.paths)``, on a cache whose service
    runs. Without a lease files vanish while they are read. Each call takes a new
    snapshot, and counts as a use of every sample in it. Held files cannot be evicted, so close them
    after each epoch.

    Args:
        path: of the cache directory, whose format is tfrecord.
        min_samples: wait until this many are cached, or the whole population is.
        seed: of the order of the files; another one for each epoch.
        shuffle: False orders the files by number.
        job: in whose name uses are counted.

    Raises:
        ConfigError: the cache is of another format, or arguments that cannot be meant.
        CacheError: the cache is complete without a sample.
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
    opened.snapshot.mark_read(numbers)  # protected all the same, until it is closed
    opened.snapshot.lease.count(
        len(opened.snapshot)
    )  # TensorFlow does not report what it reads
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
    """Return batches from a growing cache; every iteration is a new epoch over the shards cached by then.

    The shards of an epoch are leased while TensorFlow needs them. The lease ends with the
    iterator, or with its last reference. Two things outlast it: with ``samples_per_epoch``
    the rest of the pass, for as long as there is this dataset or one made of it; with
    ``reader="gather"`` the begin of the next epoch, which is let go where that has not come
    after 5 seconds. Keras keeps the length of the first epoch that it sees, so give it
    ``endless``, or ``samples_per_epoch``.

    It knows no ranks: each process of a job gets all samples of its cache.

    Args:
        path: of the cache directory. It need not exist yet, but its samples must be known
            before there is a dataset: this waits for the first ones, and says so.
        batch_size: samples per batch.
        min_samples: wait until this many are cached, or the whole population is.
        samples_per_epoch: None makes an epoch of everything that is cached, so it grows; a
            number makes every epoch of that many samples, in whole batches unless ``drop_last``
            is False: part of a pass over the cache or several; the next iteration goes on
            where the last one ended.
        seed: of the order.
        shuffle: False gives shards by number and samples as they were drawn.
        drop_last: leave a last, smaller batch out.
        fixed: wait until the cache is complete; then every epoch is one pass in order, and
            its last batch is kept. For validation.
        fields: names of the cache's fields that are wanted; the others are not decoded.
        as_tuple: names of fields; batches are tuples of these instead of dicts.
        ragged: how fields whose values differ in size come: ``offsets`` as
            `tf.RaggedTensor`, ``pad`` as tensors with zeros after each value, whose sizes
            are in ``x_lengths``, int64 [batch], or [batch, k] for k ragged dimensions.
            bytes and str come as `tf.string`.
        job: in whose name uses are counted.
        endless: one pipeline that runs on from pass to pass without a gap, each over what
            is cached by then: ``model.fit(endless, steps_per_epoch=400, epochs=90)``. It
            has no epochs of its own, so ``samples_per_epoch`` has no bearing on it.
        verify: check a shard before this process first reads it, or in every pass.
        reader: ``native``, TensorFlow's own code reads, shuffles and parses; or ``gather``,
            growcache's, whose memory becomes TensorFlow's tensors: faster, most so for
            large samples, and for caches of any format. It needs Python once for each large or
            ragged batch, and once for several small ones, so a training step in pure Python
            holds it up more.

    Returns:
        A `tf.data.Dataset` of dicts of field name to tensor ``[batch, *shape]``, in the dtype
        of the schema; the batch dimension is static where every batch is full.

    Raises:
        ConfigError: arguments that cannot be meant, or ``reader="native"`` on a cache of
            another format than tfrecord.
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
        fields=field_names("fields", fields),
        ragged=ragged,
        job=job,
        verify=verify,
    )
    if endless and fixed:
        raise ConfigError(
            "endless and fixed exclude one another: a fixed epoch ends; use "
            "dataset(..., fixed=True).repeat() to go on with the next one",
            code="GC601",
        )
    if endless:
        # Its batches run on across passes, so there is no last one to leave out.
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
    """A `tf.data.Dataset` that waits for its cache in the thread that iterates it.

    TensorFlow would wait in one of its own threads, where Ctrl-C does not reach.
    """

    def __init__(
        self, made: Dataset, feed: Pipeline, *, bare: bool, classes: dict[str, list[str]]
    ) -> None:
        """~"""
        self._classes = classes
        self._made = made
        self._feed = feed
        self._alone = made.with_options(_unoptimized(tunes=not bare))
        # TensorFlow keeps the feed for good, and does not say when its dataset goes.
        weakref.finalize(self, feed.close)
        super().__init__(tf.data.experimental.to_variant(made))

    def _inputs(self) -> list[Dataset]:
        return [self._made]

    @property
    def classes(self) -> dict[str, list[str]]:
        """The names that the numbers of a field stand for, of each field of the cache that has classes."""
        return {name: list(names) for name, names in self._classes.items()}

    @property
    def element_spec(self) -> Spec:
        """The spec of a batch: a dict, or a tuple, of `tf.TensorSpec`."""
        return self._made.element_spec

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the next epoch, once the cache holds enough for it."""
        iterator: Any
        if tf.executing_eagerly():
            self._feed.wait()
            iterator = iter(self._alone)
            # In `for batch in dataset(...)` nothing else keeps the dataset alive, which closes it.
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
