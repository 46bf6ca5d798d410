"""The constructor `from_dataset` of the loaders of torch and NumPy."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self


def _end(service: ExitStack, owner: int) -> None:
    if os.getpid() == owner:  # a forked child, as of a DataLoader, must leave it running
        service.close()


class FromDataset:
    """The constructor `from_dataset` of a loader."""

    _ends_service: Callable[[], object] | None = None

    @classmethod
    def from_dataset(
        cls,
        dataset: Any,
        path: str | os.PathLike[str],
        *,
        max_bytes: str | int | None = None,
        workers: int | None = None,
        names: Sequence[str] | None = None,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Self:
        """Return a loader over a cache that samplers fill from a Dataset, as long as it is not closed.

        Samplers, processes of their own, call ``dataset[i]`` in threads, for indices in random order.
        So ``dataset[i]`` must bear calls from several threads (or set ``concurrency: 1``), and is best
        the same at every call: random augmentation belongs to the loader's ``transform``.
        Where a service of the same dataset runs on the cache, as on another rank, it is joined.

        Args:
            dataset: with a length and ``dataset[i]``, as Datasets of torch and sequences have; or a function
                or class that makes one, by itself, with `functools.partial`, or as ``"package.module:function"``.
                A function of a module is best: nothing is pickled, and its source and arguments are part of the
                cache's fingerprint.
            path: of the cache directory.
            max_bytes: the bound of the cache, such as ``"200GB"``.
            workers: sampler processes.
            names: of the fields of a tuple, which are ``0``, ``1``, … otherwise; or the keys of a
                dict that are wanted.
            name: of the dataset in the cache's fingerprint. An instance has its class and length by default,
                so give a name where other files make another dataset.
            config: further settings of the service by section, as
                ``{"sampling": {"seed": 1, "concurrency": 4}, "split": {…}}``.
            options: of the loader; see ``help(EpochLoader)``.

        Raises:
            ConfigError: what was given is no map-style Dataset, or cannot be sent to samplers.
        """
        from growcache.sampling.dataset_service import given_dataset, settings_of, start_service

        # First, because a service must not start for arguments that cannot be meant.
        loader = cls(path, **options)  # type: ignore[call-arg]
        given = given_dataset(dataset, name)
        values = settings_of(given, path, max_bytes, workers, names, config or {})
        service = start_service(given, values)
        # At the end of the program, too, and where the loader is dropped.
        loader._ends_service = weakref.finalize(loader, _end, service, os.getpid())
        return loader

    def close(self) -> None:
        """End threads and processes, and free the snapshots; a later iteration starts anew.

        The service that `from_dataset` started ends, too.
        """
        super().close()  # type: ignore[misc]
        if self._ends_service is not None:
            self._ends_service()
