"""`growcache.tensorflow.dataset`, and what it returns."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias, cast

import tensorflow as tf

from growcache.cache.identity import read_identity
from growcache.cache.sigterm import release_at_sigterm
from growcache.errors import ConfigError
from growcache.loading.maps import Verify
from growcache.loading.options import LoaderOptions, names_of
from growcache.loading.waiting import wait_for_samples
from growcache.schema import Schema
from growcache.tensorflow.feeds import Dataset, Feed
from growcache.tensorflow.gathered import GatherFeed
from growcache.tensorflow.native import NativeFeed
from growcache.tensorflow.records import records_of
from growcache.tensorflow.tensors import Form, Spec

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
    """Return batches from a growing cache; every iteration is a new epoch over what is there.

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
        min_samples: wait until so many are cached, or the whole population is.
        samples_per_epoch: None makes an epoch of everything that is cached, so it grows; a
            number makes every epoch of so many samples, in whole batches unless ``drop_last``
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
            `tf.RaggedTensor`, ``pad`` as tensors with zeros behind each value, whose sizes
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
        A `tf.data.Dataset` of dicts of field name to tensor [batch, *shape], in the dtype
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
    if reader not in READERS:
        raise ConfigError(f"reader must be native or gather, found {reader!r}")
    release_at_sigterm()
    schema = _schema(options, reader)
    form = Form.of(schema, options, names_of("as_tuple", as_tuple))
    runs_on = endless or samples_per_epoch is not None
    feed: Feed
    if reader == "gather":
        feed = GatherFeed(options, form, runs_on=runs_on)
    else:
        feed = NativeFeed(options, records_of(schema, form), runs_on=runs_on)
    made = feed.epochs() if runs_on and not endless else feed.pipeline()
    if endless:
        made = made.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
    return EpochDataset(made, feed, bare=reader == "gather" or (runs_on and not endless))


class EpochDataset(tf.data.Dataset):  # type: ignore[misc]
    """A `tf.data.Dataset` that waits for its cache in the thread that iterates it.

    TensorFlow would wait in one of its own threads, where Ctrl-C does not reach.
    """

    def __init__(self, made: Dataset, feed: Feed, *, bare: bool) -> None:
        """Take the pipeline.

        Args:
            made: the pipeline.
            feed: that it asks.
            bare: whether there is nothing in it that TensorFlow could tune.
        """
        self._made = made
        self._feed = feed
        self._alone = made.with_options(_as_it_is(tunes=not bare))
        # TensorFlow keeps the feed for good, and does not say when its dataset goes.
        weakref.finalize(self, feed.close)
        super().__init__(tf.data.experimental.to_variant(made))

    def _inputs(self) -> list[Dataset]:
        return [self._made]

    @property
    def element_spec(self) -> Spec:
        """What a batch is made of: a dict, or a tuple, of `tf.TensorSpec`."""
        return self._made.element_spec

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the next epoch, once the cache holds enough for it."""
        iterator: Any
        if tf.executing_eagerly():
            self._feed.wait()
            iterator = iter(self._alone)
            # In `for batch in dataset(...)` nobody else keeps what closes the feed as it goes.
            iterator._keeps = self
        else:
            iterator = super().__iter__()
        return cast("Iterator[Any]", iterator)


def _as_it_is(*, tunes: bool) -> Any:
    """Return the options of a pipeline that is not rewritten, and may be tuned.

    TensorFlow would do both for each iterator anew, which takes milliseconds.
    """
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False
    options.autotune.enabled = tunes
    return options


def _schema(options: LoaderOptions, reader: Reader) -> Schema:
    """Return the schema of the cache's samples, once it is known."""
    identity = read_identity(options.root) or wait_for_samples(options.root, 1).identity
    assert identity is not None  # it is written before the first sample
    if reader == "native" and identity.cache_format != "tfrecord":
        raise ConfigError(
            f"TensorFlow itself reads caches of format tfrecord, {options.root} is of format "
            f'{identity.cache_format}; use reader="gather", or set cache.format: tfrecord and '
            "fill another one"
        )
    return identity.schema
