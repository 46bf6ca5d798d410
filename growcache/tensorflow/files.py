"""Files of a live cache for a `tf.data.TFRecordDataset` of the user's own, held by a lease."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Self, overload

from growcache.cache.identity import read_identity
from growcache.errors import ConfigError
from growcache.loading.options import LoaderOptions
from growcache.loading.snapshot import Snapshot
from growcache.loading.streams import open_pass
from growcache.loading.waiting import wait_for_samples


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
    """Return the TFRecord files of what is cached now, and keep them from being evicted.

    For pipelines written by hand, ``tf.data.TFRecordDataset(held.paths)``, on a cache whose service
    runs. Without a lease files vanish while they are read. Each call takes a new
    snapshot, and counts as a use of every sample in it. What is held cannot make room, so close it
    after each epoch.

    Args:
        path: of the cache directory, whose format is tfrecord.
        min_samples: wait until so many are cached, or the whole population is.
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
            "fill another cache"
        )
    begun = open_pass(options, 0, min_samples)
    numbers = [row.number for row in begun.rows]
    begun.snapshot.mark_read(numbers)  # protected all the same, until it is closed
    begun.snapshot.lease.count(len(begun.snapshot))  # what is read of the files nobody tells
    return Files(begun.snapshot, numbers)
